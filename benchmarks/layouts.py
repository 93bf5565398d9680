"""Parallel layouts beside one device, from one directory of weights: differences of loss, gradients and logprobs; moved checkpoints.

In float32 a layout differs only by the order of its sums; TOLERANCE is its limit. In bfloat16 a layout also rounds elsewhere, so its limit
is measured: the difference of one device in bfloat16 to itself in float32, kept as the line `one, bfloat16`, and doubled by limits_of.
Layouts have FlashAttention 4 in bfloat16. CP2 has flex attention, so its difference to the one device includes that of the kernels.
A checkpoint that is saved under one layout and loaded under another must continue with the same loss and gradient norm.
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
MOVES = {
    4: ("FSDP2xTP2", "FSDP2"),
    2: ("FSDP2", "one"),
}  # devices -> layouts under which a checkpoint is saved and loaded
TOLERANCE = {
    "loss": 1e-5,
    "logprobs": 1e-5,
    "worst_logprob": 1e-4,
    "grad_norm": 1e-5,
    "gradient": 1e-5,
    "worst_parameter": 1e-4,
}
StepReport = tuple[
    RankOutput, float
]  # of one rank: the output of forward_backward, and the gradient norm of optim_step
# eps is large, because Adam's first step is otherwise the sign of the gradient, which noise may flip.
STEP = OptimParams(learning_rate=1e-3, eps=1e-2, grad_divisor=1000.0)


@dataclass(frozen=True, kw_only=True)
class Shape:
    model: ModelConfig
    row_length: int
    documents: tuple[int, ...]  # positions of each; they fill a row
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
    """Qwen3-0.6B's width in four blocks; tiny on a CPU. The output projection is not tied, because pipelines refuse tied ones."""
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


# --- jobs of a rank -----------------------------------------------------------------------------------------------


def engine_of(shape: Shape, directory: str, layout: str, dtype: str) -> "TrainEngine":
    from rl_actors.engine.train_engine import TrainEngine

    # The kernel of configs.qwen3, which works in bfloat16 and without context parallelism.
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
    """One forward_backward and optim_step. Writes the whole gradients to the file `keep`, or compares them with the file `against`."""
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
    known = load_file(against, device=str(engine.built.device)) if against else {}
    norms = {}
    for name, expected in known.items():
        if name in gradients:  # a rank of a pipeline has only the gradients of its stage
            norms[name] = (float((gradients[name] - expected).norm()), float(expected.norm()))
    return {
        "output": output,
        "grad_norm": grad_norm,
        "gradients": norms,
        "seconds": [built - start, time.perf_counter() - built],
    }


def save(shape: Shape, directory: str, layout: str, dtype: str, checkpoint: str) -> StepReport:
    """Two steps and a checkpoint. Returns what the step after it reports."""
    engine = engine_of(shape, directory, layout, dtype)
    for _ in range(2):
        step(engine, shape)
    engine.save_checkpoint(checkpoint).result()
    return step(engine, shape)


def load(shape: Shape, directory: str, layout: str, dtype: str, checkpoint: str) -> StepReport:
    """Load the checkpoint. Returns what the next step reports."""
    engine = engine_of(shape, directory, layout, dtype)
    engine.load_checkpoint(checkpoint)
    return step(engine, shape)


def step(engine: "TrainEngine", shape: Shape) -> StepReport:
    output = engine.forward_backward(shape.samples(), "cross_entropy")
    return output, engine.optim_step(STEP).grad_norm


# --- comparison of the answers ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Numbers:
    output: ForwardBackwardOutput
    grad_norm: float
    gradients: Mapping[
        str, tuple[float, float]
    ]  # name -> (norm of the difference to the expected gradient, norm of that one)


def merged(shape: Shape, answers: Sequence[Mapping[str, Any]]) -> Numbers:
    """The answers of all ranks as those of one."""
    gradients: dict[str, tuple[float, float]] = {}
    for answer in answers:
        gradients.update(answer["gradients"])
    count = len(shape.documents) * shape.num_rows
    output = merge_outputs(count, [answer["output"] for answer in answers])
    return Numbers(output=output, grad_norm=answers[0]["grad_norm"], gradients=gradients)


def differences(actual: Numbers, expected: Numbers) -> dict[str, float]:
    """Relative differences. The worst logprob's is relative to 1 + its absolute value."""
    losses = [numbers.output.metrics["loss:sum"] for numbers in (actual, expected)]
    logprobs, known = (torch.cat(numbers.output.logprobs) for numbers in (actual, expected))
    apart = (logprobs - known).abs()
    pairs = Tensor(list(actual.gradients.values()))
    # A parameter whose gradient is next to nothing holds rounding errors of the whole, which do not count as its own.
    errors = (pairs[:, 0] - 1e-7 * pairs[:, 1].norm()).clamp(min=0) / pairs[:, 1]
    return {
        "loss": abs(losses[0] / losses[1] - 1),
        "logprobs": float(apart.mean() / known.abs().mean()),
        "worst_logprob": float((apart / (1 + known.abs())).max()),
        "grad_norm": abs(actual.grad_norm / expected.grad_norm - 1),
        "gradient": float(pairs[:, 0].norm() / pairs[:, 1].norm()),
        "worst_parameter": float(errors.nan_to_num().max()),
    }


def limits_of(dtype: str, yardstick: Mapping[str, float]) -> Mapping[str, float]:
    """The limit of every difference. yardstick: the differences of one device in bfloat16 to itself in float32.

    Two layouts that are as far from float32 as the yardstick are at most twice as far from each other. The loss has the limit of the
    logprobs, and the norm that of the gradient: they cannot differ by more, while their own yardsticks may be near 0 by chance.
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
        self.ones: dict[str, Numbers] = {}  # dtype -> the answers of one device
        self.yardstick: dict[str, float] = {}
        self.before: list[StepReport] = []  # of the step after the saved checkpoint
        self.failed: list[str] = []

    def phases(self, layouts: Sequence[str], dtypes: Sequence[str]) -> list[list[Job]]:
        """Jobs that run side by side, in phases: a job needs the files of earlier phases."""
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
        """Keep the line of a finished job, and its name if a difference is out of bounds."""
        if job.name == "saved":
            self.before = answers
            return
        if job.name == "loaded":
            name = f"{self.saved_under} to {self.loaded_under}"
            self.failed += report_move(name, self.shape, self.before, answers)
            return
        layout, dtype = job.name.split(", ")
        numbers = merged(self.shape, answers)
        figures = {"ranks": job.num_ranks, "seconds": [round(x, 1) for x in answers[0]["seconds"]]}
        if layout != "one":
            found = differences(numbers, self.ones[dtype])
            self.failed += report(job.name, found, dtype, self.yardstick, figures)
            return
        self.ones[dtype] = numbers
        if dtype == "bfloat16":
            self.yardstick = differences(numbers, self.ones["float32"])
            results.add("layouts", job.name, self.yardstick | figures)


def num_ranks(layout: str) -> int:
    return math.prod(LAYOUTS[layout].values())


def main() -> None:
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:5.1f} s] {text}", flush=True)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    num_devices = torch.cuda.device_count() or 4
    parser.add_argument("--gpus", type=int, default=min(4, num_devices), help="devices; on a CPU ranks of gloo")
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS)[1:], default=list(LAYOUTS)[1:])
    parser.add_argument("--dtypes", nargs="*", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    if arguments.gpus < 2:
        parser.error(f"--gpus {arguments.gpus}; a layout needs at least two devices")
    layouts = [name for name in arguments.layouts if num_ranks(name) <= arguments.gpus]
    with Ranks(arguments.gpus) as ranks, ExitStack() as stack:
        from benchmarks.harness.random_weights import (
            scratch,
            write,
        )  # this import and those of the ranks run at the same time

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
            if not comparison.ones:  # nothing to compare with
                break
    if comparison.failed:
        say(f"out of bounds or failed: {', '.join(comparison.failed)}")
        raise SystemExit(1)
    say("all within")


def report(
    name: str, found: Mapping[str, float], dtype: str, yardstick: Mapping[str, float], figures: Mapping[str, Any]
) -> list[str]:
    """Keep the line of a layout. Returns its name if a difference is out of bounds, else nothing."""
    limits = limits_of(dtype, yardstick)
    within = all(found[kind] < limits[kind] for kind in found)
    shares = {f"{kind}_of_limit": found[kind] / limits[kind] for kind in found}
    results.add("layouts", name, {**found, **shares, "within": within, **figures})
    return [] if within else [name]


def report_move(name: str, shape: Shape, before: Sequence[StepReport], after: Sequence[StepReport]) -> list[str]:
    """Keep the line of a moved checkpoint. before, after: the reports of all ranks. Returns its name if it differs, else nothing."""
    if not before:
        return [name]
    count = len(shape.documents) * shape.num_rows
    losses, norms = [], []
    for side in (before, after):
        losses.append(merge_outputs(count, [output for output, _ in side]).metrics["loss:sum"])
        norms.append(side[0][1])
    found = {"loss": abs(losses[1] / losses[0] - 1), "grad_norm": abs(norms[1] / norms[0] - 1)}
    return report(f"checkpoint {name}", found, "float32", {}, {"losses": losses, "grad_norms": norms})


if __name__ == "__main__":
    main()
