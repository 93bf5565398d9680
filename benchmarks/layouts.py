"""Parallel layouts on this machine's devices against one of them, from one directory of weights: loss, gradients, logprobs, checkpoints.

In float32 a layout differs by the order of its sums alone: TOLERANCE. In bfloat16 it also rounds elsewhere, so the yardstick is measured:
what one device in bfloat16 differs from itself in float32, printed in the line `one, bfloat16`; limits_of says what follows for a layout.
Layouts take FlashAttention 4 in bfloat16, but for CP2, whose difference to the one device is also that of its kernel, flex attention.
A checkpoint saved under one layout and loaded under another goes on with the same loss and gradient norm. Four devices, or --gpus 2.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.harness import results
from benchmarks.harness.ranks import Job, Ranks
from rl_actors import ModelConfig, OptimParams, Sample, TrainerConfig
from rl_actors.clients.conversion import merge_outputs
from rl_actors.types import ForwardBackwardOutput

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "FSDP2": {"data_parallel_shard": 2},
    "TP2": {"tensor_parallel": 2},
    "CP2": {"context_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
    "FSDP2xTP2": {"data_parallel_shard": 2, "tensor_parallel": 2},
}
MOVES = {4: ("FSDP2xTP2", "FSDP2"), 2: ("FSDP2", "one")}  # by devices: a checkpoint's first layout, its second
TOLERANCE = {
    "loss": 1e-5,
    "logprobs": 1e-5,
    "worst_logprob": 1e-4,
    "grad_norm": 1e-5,
    "gradient": 1e-5,
    "worst_parameter": 1e-4,
}
# A large eps: Adam's first step is the sign of the gradient, which noise may turn.
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
    """Qwen3-0.6B's width in four blocks with an output projection of its own, as pipelines want it; tiny on a CPU."""
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


# --- what a rank does ---------------------------------------------------------------------------------------------


def engine_of(shape: Shape, directory: str, layout: str, dtype: str) -> Any:
    from rl_actors.engine.train_engine import TrainEngine

    # In bfloat16 the kernel of configs.qwen3, where the layout can have it.
    can = dtype == "bfloat16" and "context_parallel" not in LAYOUTS[layout]
    config = TrainerConfig(
        model=replace(shape.model),
        hf_path=directory,
        attention="flash4" if can else "flex",
        compute_dtype=dtype,  # type: ignore[arg-type]
        max_sequence_length=max(shape.documents),
        tokens_per_row=shape.row_length,
    )
    for name, degree in LAYOUTS[layout].items():
        setattr(config.parallelism, f"{name}_degree", degree)
    return TrainEngine(config)


def compare(shape: Shape, directory: str, layout: str, dtype: str, keep: str, against: str) -> dict[str, Any]:
    """One forward_backward and optim_step; whole gradients are written to `keep`, or held against those in `against`."""
    start = time.perf_counter()
    engine = engine_of(shape, directory, layout, dtype)
    built = time.perf_counter()
    output = engine.forward_backward(shape.samples(), "cross_entropy")
    gradients = {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).detach().clone()
        for name, p in engine.built.model.named_parameters()
    }  # copies: optim_step divides in place
    grad_norm = engine.optim_step(STEP).grad_norm
    if keep:
        save_file({name: gradient.cpu().contiguous() for name, gradient in gradients.items()}, keep)
    known = load_file(against, device=str(engine.built.device)) if against else {}
    return {
        "output": output,
        "grad_norm": grad_norm,
        "gradients": {
            name: (float((gradients[name] - expected).norm()), float(expected.norm()))
            for name, expected in known.items()
            if name in gradients  # a rank of a pipeline has those of its stage
        },
        "seconds": [built - start, time.perf_counter() - built],
    }


def save(shape: Shape, directory: str, layout: str, dtype: str, checkpoint: str) -> tuple[Any, float]:
    """Two steps, a checkpoint, and what the next step reports."""
    engine = engine_of(shape, directory, layout, dtype)
    for _ in range(2):
        step(engine, shape)
    engine.save_checkpoint(checkpoint).result()
    return step(engine, shape)


def load(shape: Shape, directory: str, layout: str, dtype: str, checkpoint: str) -> tuple[Any, float]:
    engine = engine_of(shape, directory, layout, dtype)
    engine.load_checkpoint(checkpoint)
    return step(engine, shape)


def step(engine: Any, shape: Shape) -> tuple[Any, float]:
    output = engine.forward_backward(shape.samples(), "cross_entropy")
    return output, engine.optim_step(STEP).grad_norm


# --- what is made of it -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Numbers:
    output: ForwardBackwardOutput
    grad_norm: float
    gradients: Mapping[str, tuple[float, float]]  # norm of the difference to what it is held against, norm of that


def merged(shape: Shape, answers: Sequence[Mapping[str, Any]]) -> Numbers:
    gradients: dict[str, tuple[float, float]] = {}
    for answer in answers:
        gradients.update(answer["gradients"])
    count = len(shape.documents) * shape.num_rows
    output = merge_outputs(count, [answer["output"] for answer in answers])
    return Numbers(output=output, grad_norm=answers[0]["grad_norm"], gradients=gradients)


def differences(actual: Numbers, expected: Numbers) -> dict[str, float]:
    """Relative ones, of a parameter or a logprob the worst; to 1 + its size of a logprob."""
    losses = [numbers.output.metrics["loss:sum"] for numbers in (actual, expected)]
    logprobs, known = (torch.cat(numbers.output.logprobs) for numbers in (actual, expected))
    apart = (logprobs - known).abs()
    pairs = Tensor(list(actual.gradients.values()))
    # What rounding of the whole leaves in a parameter whose own gradient is next to nothing is no error.
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
    """Of every difference. Two that are as far from float32 as the yardstick are at most twice as far from each other.

    A loss differs by no more than its logprobs, a norm by no more than its gradient; of one run alone they may be equal by chance.
    """
    if dtype == "float32":
        return TOLERANCE
    twice = {name: 2 * difference for name, difference in yardstick.items()}
    return twice | {"loss": twice["logprobs"], "grad_norm": twice["gradient"]}


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    there = torch.cuda.device_count() or 4
    parser.add_argument(
        "--gpus", type=int, default=min(4, there), help="processes, one a device; ranks of gloo on a CPU"
    )
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS)[1:], default=list(LAYOUTS)[1:])
    parser.add_argument("--dtypes", nargs="*", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    if arguments.gpus < 2:
        parser.error(f"--gpus {arguments.gpus}; two devices at least make a layout")
    shape = shape_here()
    num_ranks = {name: torch.Size(degrees.values()).numel() for name, degrees in LAYOUTS.items()}
    layouts = [name for name in arguments.layouts if num_ranks[name] <= arguments.gpus]
    failed: list[str] = []
    with Ranks(arguments.gpus) as ranks, ExitStack() as stack:
        from benchmarks.harness.random_weights import scratch, write  # imports while the ranks do

        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=scratch(shape.model, times=16)))
        directory = f"{folder}/model"
        write(shape.model, Path(directory), scale=4.0)
        print(f"[{time.perf_counter() - began:5.1f} s] weights written", flush=True)
        kept = {dtype: f"{folder}/{dtype}.safetensors" for dtype in ("float32", "bfloat16")}

        def job(layout: str, dtype: str, *, keep: str = "", against: str = "") -> Job:
            given = (shape, directory, layout, dtype, keep, against)
            return Job(name=f"{layout}, {dtype}", work=compare, arguments=given, num_ranks=num_ranks[layout])

        checkpoint = f"{folder}/checkpoint"
        saved_under, loaded_under = MOVES[4 if arguments.gpus >= 4 else 2]
        moves = [
            Job(
                name=name,
                work=work,
                arguments=(shape, directory, layout, "float32", checkpoint),
                num_ranks=num_ranks[layout],
            )
            for name, work, layout in (("saved", save, saved_under), ("loaded", load, loaded_under))
        ]
        phases = [
            [job("one", "float32", keep=kept["float32"])],
            [job("one", "bfloat16", keep=kept["bfloat16"], against=kept["float32"])]
            + [job(name, "float32", against=kept["float32"]) for name in layouts if "float32" in arguments.dtypes],
            [job(name, "bfloat16", against=kept["bfloat16"]) for name in layouts if "bfloat16" in arguments.dtypes]
            + moves[:1],
            moves[1:],
        ]
        ones: dict[str, Numbers] = {}
        yardstick: dict[str, float] = {}
        before: list[tuple[Any, float]] = []
        for jobs in phases:
            for done, answers, error in ranks.run(jobs):
                print(f"[{time.perf_counter() - began:5.1f} s] {done.name}: {error or 'done'}", flush=True)
                if error:
                    failed.append(done.name)
                elif done.name == "saved":
                    before = answers
                elif done.name == "loaded":
                    failed += report_move(f"{saved_under} to {loaded_under}", shape, before, answers)
                else:
                    layout, dtype = done.name.split(", ")
                    numbers = merged(shape, answers)
                    figures = {"ranks": done.num_ranks, "seconds": [round(x, 1) for x in answers[0]["seconds"]]}
                    if layout == "one":
                        ones[dtype] = numbers
                    if done.name == "one, bfloat16":
                        yardstick = differences(numbers, ones["float32"])
                        results.add("layouts", done.name, yardstick | figures)
                    elif layout != "one":
                        failed += report(done.name, differences(numbers, ones[dtype]), dtype, yardstick, figures)
            if failed and not ones:
                break
    print(
        f"[{time.perf_counter() - began:5.1f} s] "
        + (f"out of bounds or failed: {', '.join(failed)}" if failed else "all within")
    )
    if failed:
        raise SystemExit(1)


def report(
    name: str, found: Mapping[str, float], dtype: str, yardstick: Mapping[str, float], figures: Mapping[str, Any]
) -> list[str]:
    """Keep the line of a layout; its name when a difference is out of bounds."""
    limits = limits_of(dtype, yardstick)
    within = all(found[kind] < limits[kind] for kind in found)
    shares = {f"{kind}_of_limit": found[kind] / limits[kind] for kind in found}
    results.add("layouts", name, {**found, **shares, "within": within, **figures})
    return [] if within else [name]


def report_move(name: str, shape: Shape, before: Sequence[Any], after: Sequence[Any]) -> list[str]:
    if not before:
        return [name]
    count = len(shape.documents) * shape.num_rows
    losses = [merge_outputs(count, [output for output, _ in side]).metrics["loss:sum"] for side in (before, after)]
    norms = [side[0][1] for side in (before, after)]
    found = {"loss": abs(losses[1] / losses[0] - 1), "grad_norm": abs(norms[1] / norms[0] - 1)}
    return report(f"checkpoint {name}", found, "float32", {}, {"losses": losses, "grad_norms": norms})


if __name__ == "__main__":
    main()
