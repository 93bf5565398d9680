"""Compares losses, gradients and logprobs of parallel layouts with those of one device. Also moves a checkpoint between two layouts.

Every layout starts with the same weights. In float32 a layout differs from one device only because it adds numbers in another order. TOLERANCE
has the limits of these differences. In bfloat16 a layout also rounds at other places, so the limits are measured: they are twice the yardstick.
The yardstick is the difference between bfloat16 and float32 on one device, and is recorded under the name `one, bfloat16`. On GPUs in bfloat16,
CP2 (context parallelism on two devices) uses flex attention, and one device and all other layouts use FlashAttention 4. So the difference
between CP2 and one device includes the difference between these two kernels.
A checkpoint is saved under one layout and loaded under another. The next step must have the same loss and gradient norm under both layouts,
within the limits of TOLERANCE.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.harness import results
from benchmarks.harness.ranks import Job, Ranks
from rl_actors import ModelConfig, OptimParams, Sample, TrainerConfig
from rl_actors.clients.conversion import merge_outputs
from rl_actors.types import ForwardBackwardOutput, RankOutput

if TYPE_CHECKING:
    from rl_actors.engine.train_engine import TrainEngine

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "FSDP2": {"data_parallel_shard": 2},
    "TP2": {"tensor_parallel": 2},
    "CP2": {"context_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
    "FSDP2xTP2": {"data_parallel_shard": 2, "tensor_parallel": 2},
}
# Key: how many devices the move uses. Value: (layout under which the checkpoint is saved, layout under which it is loaded).
MOVES = {4: ("FSDP2xTP2", "FSDP2"), 2: ("FSDP2", "one")}
# Limits of the float32 differences, by the names that `differences` returns.
TOLERANCE = {
    "loss": 1e-5,
    "logprobs": 1e-5,
    "worst_logprob": 1e-4,
    "grad_norm": 1e-5,
    "gradient": 1e-5,
    "worst_parameter": 1e-4,
}
# The report of one rank about a step: the output of forward_backward, and the gradient norm of optim_step.
StepReport = tuple[RankOutput, float]
# With a small eps Adam's first step is nearly the sign of the gradient, and rounding can flip that sign. A large eps avoids this.
STEP = OptimParams(learning_rate=1e-3, eps=1e-2, grad_divisor=1000.0)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, and the sizes of the samples of one call."""

    model: ModelConfig
    row_length: int  # positions in a row, into which the trainer packs several documents
    documents: tuple[int, ...]  # lengths in positions; all documents together fill a row
    num_rows: int

    def samples(self) -> list[Sample]:
        draw = torch.Generator().manual_seed(0)
        made = []
        for length in self.documents * self.num_rows:
            ids = torch.randint(self.model.vocab_size, (length + 1,), generator=draw)
            weights = 0.5 + torch.rand(length, generator=draw)
            made.append(Sample(tokens=ids[:-1], targets=ids[1:].clone(), columns={"loss_weights": weights}))
        return made


def shape_here() -> Shape:
    """The shape for this machine. On GPUs the model has four blocks of Qwen3-0.6B's width, and on a CPU the model is tiny. Embedding and head
    are not tied, because pipelines refuse tied weights."""
    if torch.cuda.is_available():
        model = ModelConfig(vocab_size=32_768, num_hidden_layers=4, tie_word_embeddings=False)
        return Shape(model=model, row_length=1024, documents=(512, 320, 128, 64), num_rows=8)
    model = ModelConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
    )
    return Shape(model=model, row_length=256, documents=(128, 80, 32, 16), num_rows=4)


# --- functions that each rank of a job runs -----------------------------------------------------------------------


def engine_of(shape: Shape, directory: str, layout: str, dtype: str) -> "TrainEngine":
    from rl_actors.engine.train_engine import TrainEngine

    # FlashAttention 4 is the kernel of configs.qwen3. It works in bfloat16 only, and not under context parallelism.
    has_flash4 = dtype == "bfloat16" and "context_parallel" not in LAYOUTS[layout]
    config = TrainerConfig(
        model=replace(shape.model),
        hf_path=directory,
        attention="flash4" if has_flash4 else "flex",
        compute_dtype=dtype,  # type: ignore[arg-type]
        max_sequence_length=max(shape.documents),
        tokens_per_row=shape.row_length,
    )
    for name, degree in LAYOUTS[layout].items():
        setattr(config.parallelism, f"{name}_degree", degree)
    return TrainEngine(config)


def compare(shape: Shape, directory: str, layout: str, dtype: str, keep: str, against: str) -> dict[str, Any]:
    """Run one forward_backward and one optim_step on this rank, and return their outputs.

    keep: a file to which the unsharded gradients are written. against: a file of expected gradients, with which the unsharded gradients are
    compared. "" means no file. In the returned dict, "gradients" has the same form as Numbers.gradients, and is empty if `against` is "".
    "seconds" has the seconds that building the engine took, and the seconds of the rest.
    """
    start = time.perf_counter()
    engine = engine_of(shape, directory, layout, dtype)
    built = time.perf_counter()
    output = engine.forward_backward(shape.samples(), "cross_entropy")
    gradients = {}
    for name, parameter in engine.built.model.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        gradients[name] = whole.detach().clone()  # a copy, because optim_step divides in place
    grad_norm = engine.optim_step(STEP).grad_norm
    if keep:
        save_file({name: gradient.cpu().contiguous() for name, gradient in gradients.items()}, keep)
    expected = load_file(against, device=str(engine.built.device)) if against else {}
    norms = {}
    for name, gradient in expected.items():
        if name in gradients:  # a rank of a pipeline has only the gradients of its stage
            norms[name] = (float((gradients[name] - gradient).norm()), float(gradient.norm()))
    return {
        "output": output,
        "grad_norm": grad_norm,
        "gradients": norms,
        "seconds": [built - start, time.perf_counter() - built],
    }


def save(shape: Shape, directory: str, layout: str, dtype: str, checkpoint: str) -> StepReport:
    """Take two steps, save a checkpoint, and take a third step. Returns the report of the third step."""
    engine = engine_of(shape, directory, layout, dtype)
    for _ in range(2):
        step(engine, shape)
    engine.save_checkpoint(checkpoint).result()
    return step(engine, shape)


def load(shape: Shape, directory: str, layout: str, dtype: str, checkpoint: str) -> StepReport:
    """Load the checkpoint. Returns the report of the next step."""
    engine = engine_of(shape, directory, layout, dtype)
    engine.load_checkpoint(checkpoint)
    return step(engine, shape)


def step(engine: "TrainEngine", shape: Shape) -> StepReport:
    output = engine.forward_backward(shape.samples(), "cross_entropy")
    return output, engine.optim_step(STEP).grad_norm


# --- comparison of the answers ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The numbers of one job of `compare`, merged from the answers of its ranks."""

    output: ForwardBackwardOutput
    grad_norm: float
    # Maps a parameter to (norm of the difference between its gradient and the expected gradient, norm of the expected gradient).
    gradients: Mapping[str, tuple[float, float]]


def merged(shape: Shape, answers: Sequence[Mapping[str, Any]]) -> Numbers:
    """Merge the answers of all ranks of a job."""
    gradients: dict[str, tuple[float, float]] = {}
    for answer in answers:
        gradients.update(answer["gradients"])
    count = len(shape.documents) * shape.num_rows
    output = merge_outputs(count, [answer["output"] for answer in answers])
    return Numbers(output=output, grad_norm=answers[0]["grad_norm"], gradients=gradients)


def differences(actual: Numbers, expected: Numbers) -> dict[str, float]:
    """Relative differences between the numbers of a job and the expected numbers.

    "logprobs" is the mean absolute difference divided by the mean absolute value of the expected logprobs. For "worst_logprob" the absolute
    difference of each logprob is divided by 1 + the absolute value of the expected logprob, and the largest quotient is taken. "gradient" and
    "worst_parameter" divide the norm of a difference of gradients by the norm of the expected gradient. "gradient" does this for all parameters
    together. "worst_parameter" does this for each parameter, and takes the largest result.
    """
    losses = [numbers.output.metrics["loss:sum"] for numbers in (actual, expected)]
    logprobs, expected_logprobs = (torch.cat(numbers.output.logprobs) for numbers in (actual, expected))
    logprob_differences = (logprobs - expected_logprobs).abs()
    difference_norms, norms = Tensor(list(actual.gradients.values())).unbind(dim=1)
    # A gradient close to 0 consists mostly of rounding errors of larger numbers. So for "worst_parameter" 1e-7 times the
    # norm of the whole gradient is subtracted from the norm of every difference.
    errors = (difference_norms - 1e-7 * norms.norm()).clamp(min=0) / norms
    return {
        "loss": abs(losses[0] / losses[1] - 1),
        "logprobs": float(logprob_differences.mean() / expected_logprobs.abs().mean()),
        "worst_logprob": float((logprob_differences / (1 + expected_logprobs.abs())).max()),
        "grad_norm": abs(actual.grad_norm / expected.grad_norm - 1),
        "gradient": float(difference_norms.norm() / norms.norm()),
        "worst_parameter": float(errors.nan_to_num().max()),
    }


def limits_of(dtype: str, yardstick: Mapping[str, float]) -> Mapping[str, float]:
    """The limit of every difference. In float32 this is TOLERANCE. yardstick: the differences between bfloat16 and float32 on one device.

    Suppose that a layout in bfloat16 and one device in bfloat16 both differ from float32 by the yardstick. Then they differ from each other by
    at most twice the yardstick. Loss and gradient norm are single numbers, so their yardsticks may be near 0 by chance. The loss is a sum
    of the logprobs, each times a random loss weight. So the relative difference of the loss is hardly larger than that of the logprobs, and the
    loss gets the limit of the logprobs. The gradient norm cannot differ by more than the gradient, so it gets the limit of the gradient.
    """
    if dtype == "float32":
        return TOLERANCE
    twice = {name: 2 * difference for name, difference in yardstick.items()}
    return twice | {"loss": twice["logprobs"], "grad_norm": twice["gradient"]}


class Comparison:
    """The jobs of one run of this program, and the answers that later jobs are compared with."""

    def __init__(self, folder: str, num_devices: int) -> None:
        self.folder, self.shape = folder, shape_here()
        self.directory = f"{folder}/model"
        self.saved_under, self.loaded_under = MOVES[4 if num_devices >= 4 else 2]
        self.on_one_device: dict[str, Numbers] = {}  # by dtype
        self.yardstick: dict[str, float] = {}
        self.reports_of_saved: list[StepReport] = []  # each rank's report about the step after the checkpoint was saved
        self.failed: list[str] = []

    def phases(self, layouts: Sequence[str], dtypes: Sequence[str]) -> list[list[Job]]:
        """All jobs, as a list of phases. Jobs of a phase may run at the same time. A job may need files that jobs of earlier phases write."""
        one_float32 = self._compare("one", "float32", keep="float32")
        second = [self._compare("one", "bfloat16", keep="bfloat16", against="float32")]
        if "float32" in dtypes:
            second += [self._compare(name, "float32", against="float32") for name in layouts]
        third = []
        if "bfloat16" in dtypes:
            third += [self._compare(name, "bfloat16", against="bfloat16") for name in layouts]
        third.append(self._move("saved", save, self.saved_under))
        return [[one_float32], second, third, [self._move("loaded", load, self.loaded_under)]]

    def _compare(self, layout: str, dtype: str, *, keep: str = "", against: str = "") -> Job:
        kept, known = (f"{self.folder}/{name}.safetensors" if name else "" for name in (keep, against))
        arguments = (self.shape, self.directory, layout, dtype, kept, known)
        return Job(name=f"{layout}, {dtype}", work=compare, arguments=arguments, num_ranks=num_ranks(layout))

    def _move(self, name: str, work: Callable[..., StepReport], layout: str) -> Job:
        arguments = (self.shape, self.directory, layout, "float32", f"{self.folder}/checkpoint")
        return Job(name=name, work=work, arguments=arguments, num_ranks=num_ranks(layout))

    def take(self, job: Job, answers: list[Any]) -> None:
        """Record the result of a finished job, and add its name to `failed` if a difference is beyond its limit."""
        if job.name == "saved":
            self.reports_of_saved = answers
            return
        if job.name == "loaded":
            name = f"{self.saved_under} to {self.loaded_under}"
            self.failed += record_move(name, self.shape, self.reports_of_saved, answers)
            return
        layout, dtype = job.name.split(", ")
        numbers = merged(self.shape, answers)
        figures = {"ranks": job.num_ranks, "seconds": [round(x, 1) for x in answers[0]["seconds"]]}
        if layout != "one":
            found = differences(numbers, self.on_one_device[dtype])
            self.failed += record(job.name, found, dtype, self.yardstick, figures)
            return
        self.on_one_device[dtype] = numbers
        if dtype == "bfloat16":
            self.yardstick = differences(numbers, self.on_one_device["float32"])
            results.add("layouts", job.name, self.yardstick | figures)


def num_ranks(layout: str) -> int:
    return math.prod(LAYOUTS[layout].values())


def main() -> None:
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:5.1f} s] {text}", flush=True)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    num_devices = torch.cuda.device_count() or 4
    parser.add_argument(
        "--gpus", type=int, default=min(4, num_devices), help="number of GPUs, or of processes if there are no GPUs"
    )
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS)[1:], default=list(LAYOUTS)[1:])
    parser.add_argument("--dtypes", nargs="*", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    if arguments.gpus < 2:
        parser.error(f"--gpus {arguments.gpus}; a layout needs at least two devices")
    layouts = [name for name in arguments.layouts if num_ranks(name) <= arguments.gpus]
    with Ranks(arguments.gpus) as ranks, ExitStack() as stack:
        # The processes of `ranks` have just started, and import torch. Meanwhile this process imports these two functions.
        from benchmarks.harness.random_weights import scratch, write

        model = shape_here().model
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=scratch(model, times=16)))
        comparison = Comparison(folder, arguments.gpus)
        write(model, Path(comparison.directory), scale=4.0)
        say("weights written")
        for jobs in comparison.phases(layouts, arguments.dtypes):
            for job, answers, error in ranks.run(jobs):
                say(f"{job.name}: {error or 'done'}")
                if error:
                    comparison.failed.append(job.name)
                else:
                    comparison.take(job, answers)
            if not comparison.on_one_device:  # the job on one device failed, so there is nothing to compare with
                break
    if comparison.failed:
        say(f"beyond a limit, or failed: {', '.join(comparison.failed)}")
        raise SystemExit(1)
    say("all differences are within their limits")


def record(
    name: str, found: Mapping[str, float], dtype: str, yardstick: Mapping[str, float], figures: Mapping[str, Any]
) -> list[str]:
    """Record the result of a layout. Returns [name] if a difference is beyond its limit, otherwise []."""
    limits = limits_of(dtype, yardstick)
    within = all(found[kind] < limits[kind] for kind in found)
    shares = {f"{kind}_of_limit": found[kind] / limits[kind] for kind in found}
    results.add("layouts", name, {**found, **shares, "within": within, **figures})
    return [] if within else [name]


def record_move(name: str, shape: Shape, saved: Sequence[StepReport], loaded: Sequence[StepReport]) -> list[str]:
    """Record the result of a moved checkpoint. Returns [name] if a difference is beyond its limit, or if saving failed; otherwise [].

    saved: the reports of all ranks about the step after the checkpoint, from the trainer that saved the checkpoint. loaded: the reports about
    the same step, from the trainer that loaded the checkpoint.
    """
    if not saved:
        return [name]
    count = len(shape.documents) * shape.num_rows
    losses, norms = [], []
    for reports in (saved, loaded):
        losses.append(merge_outputs(count, [output for output, _ in reports]).metrics["loss:sum"])
        norms.append(reports[0][1])
    found = {"loss": abs(losses[1] / losses[0] - 1), "grad_norm": abs(norms[1] / norms[0] - 1)}
    return record(f"checkpoint {name}", found, "float32", {}, {"losses": losses, "grad_norms": norms})


if __name__ == "__main__":
    main()
