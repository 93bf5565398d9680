"""Speed of training through TrainerClient, compared with the reference: torchtitan's own components, without our actors.

Each row of the table in harness/rows.py has a model, a batch shape, a number of GPUs and settings. A run of a row measures
both sides: our trainer and the reference. Speeds come from the median time of the steps after warm-up. The reference runs first
and ends before our trainer starts, so each side has the GPUs for itself.
"""

import argparse
import multiprocessing
import socket
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from benchmarks.harness import results
from benchmarks.harness.rows import ROWS, TRACED_STEPS, Row
from configs.qwen3 import MODELS
from configs.tiny import tiny
from rl_actors import ModelConfig, OptimParams, Sample, TrainerClient, TrainerConfig
from rl_actors.model_flops import flops_per_token, peak_flops

CHANGEABLE = ("attention", "checkpointing")  # fields of a row that the command line may change


def model_of(row: Row) -> ModelConfig:
    model = tiny().trainer.model if row.model == "tiny" else MODELS[row.model]
    return replace(model, max_position_embeddings=max(model.max_position_embeddings, row.row_length))


def trainer_config(row: Row) -> TrainerConfig:
    on_gpu = row.num_gpus > 0
    config = TrainerConfig(
        model=model_of(row),
        attention=row.attention,
        compute_dtype="bfloat16" if on_gpu else "float32",
        activation_checkpointing=row.checkpointing,
        float8=row.float8,
        float8_recipe=row.float8_recipe,
        max_sequence_length=row.document,
        tokens_per_row=row.row_length,
        rows_per_microbatch=row.rows,
        logprob_chunk_tokens=8192 if on_gpu else row.rows * row.row_length // row.chunks,  # 8192 as in configs.qwen3
    )
    config.compile.enable = on_gpu
    config.parallelism.data_parallel_shard_degree = max(1, row.num_gpus)
    return config


def samples_of(row: Row, vocab_size: int) -> list[Sample]:
    """The documents of one step, for all GPUs together."""
    draw = torch.Generator().manual_seed(0)
    ones = torch.ones(row.document)
    samples = []
    for _ in range(row.positions * max(1, row.num_gpus) // row.document):
        ids = torch.randint(vocab_size, (row.document + 1,), generator=draw)
        samples.append(Sample(tokens=ids[:-1], targets=ids[1:].clone(), columns={"loss_weights": ones}))
    return samples


def ours(row: Row, warmup: int, steps: int, trace: str) -> dict[str, Any]:
    """Measure our trainer: the seconds of every step and of its two calls, and the largest peak memory of a rank.

    trace: a folder for traces of a few more steps; "" for no traces.
    """
    config = trainer_config(row)
    samples = samples_of(row, config.model.vocab_size)
    params = OptimParams(learning_rate=1e-5, grad_divisor=float(row.document * len(samples)))
    found: dict[str, Any] = {"seconds": [], "forward_backward": [], "optim_step": []}
    with TrainerClient.spawn(config) as trainer:

        def step() -> tuple[float, float]:
            start = time.perf_counter()
            trainer.forward_backward(samples, loss="cross_entropy").result()
            middle = time.perf_counter()
            trainer.optim_step(params).result()
            return middle - start, time.perf_counter() - middle

        for _ in range(warmup):
            step()
        for _ in range(steps):
            forward_backward, optim_step = step()
            found["forward_backward"].append(forward_backward)
            found["optim_step"].append(optim_step)
            found["seconds"].append(forward_backward + optim_step)
        found["peak_bytes"] = max(info.peak_memory_bytes for info in trainer.info().result())
        if trace:
            try:
                trainer.profile(trace, steps=TRACED_STEPS).result()
                for _ in range(TRACED_STEPS):
                    step()
            except RuntimeError as error:  # the figures are recorded even without a trace
                print(f"our trainer wrote no trace: {error}", flush=True)
    return found


def reference(row: Row, warmup: int, steps: int, trace: str) -> dict[str, Any]:
    """Measure the reference. The seconds of a step are those of the slowest rank. The peak memory is the largest of all ranks.

    trace: a file for a trace of a few more steps; "" for no trace.
    """
    from benchmarks import titan

    with socket.socket() as unused:  # the system gives this socket a free port
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for rank in range(max(1, row.num_gpus)):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (row, model_of(row), rank, port, warmup, steps, trace, sender)
        child = context.Process(target=titan.run, args=arguments)
        child.start()
        sender.close()
        pipes.append(receiver)
        children.append(child)
    try:
        answers = [pipe.recv() for pipe in pipes]
    except EOFError:
        for child in children:
            child.terminate()
        raise SystemExit("a process of the reference (torchtitan) ended before it sent its figures") from None
    for child in children:
        child.join()
    seconds_of_ranks = [answer["seconds"] for answer in answers]
    return {
        "seconds": [max(of_step) for of_step in zip(*seconds_of_ranks, strict=True)],
        "peak_bytes": max(answer["peak_bytes"] for answer in answers),
    }


def mfu(row: Row, tokens_per_second: float) -> float | None:
    """Model FLOPs utilization: FLOP/s of the model's matrix products and attention, divided by the peak FLOP/s of all GPUs. None on a CPU and
    for an unknown GPU.

    The peak is for the dtype in which the products are computed, so the result cannot exceed 1.
    """
    if not row.num_gpus:
        return None
    peak = peak_flops(results.gpus()[0], float8=row.float8)
    if peak is None:
        return None
    return flops_per_token(model_of(row), row.document) * tokens_per_second / row.num_gpus / peak


def run_row(name: str, row: Row, *, warmup: int, steps: int, profile: Path | None) -> None:
    """Measure both sides and record the result. profile: a folder for traces of both sides and their summary."""
    if row.num_gpus > torch.cuda.device_count():
        raise SystemExit(f"{name} needs {row.num_gpus} GPUs; there are {torch.cuda.device_count()}")
    if profile:
        profile.mkdir(parents=True, exist_ok=True)
    traces = (str(profile / "reference.json"), str(profile)) if profile else ("", "")
    began = time.perf_counter()
    theirs = reference(row, warmup, steps, traces[0])
    middle = time.perf_counter()
    own = ours(row, warmup, steps, traces[1])
    tokens = row.positions * max(1, row.num_gpus)
    own_rate, their_rate = (tokens / statistics.median(side["seconds"]) for side in (own, theirs))
    figures = {
        "tokens_per_second": own_rate,
        "reference_tokens_per_second": their_rate,
        "ratio": own_rate / their_rate,
        "mfu": mfu(row, own_rate),
        "peak_gib": own["peak_bytes"] / 2**30,
        "reference_peak_gib": theirs["peak_bytes"] / 2**30,
        **asdict(row),
        # A comparison counts only if both sides use the same attention kernel. In older results the kernels could differ.
        "reference_attention": row.attention,
        "steps": steps,
        "seconds": [round(x, 4) for x in own["seconds"]],
        "reference_seconds": [round(x, 4) for x in theirs["seconds"]],
        "optim_step_seconds": statistics.median(own["optim_step"]),
        "wall_seconds": [round(middle - began, 1), round(time.perf_counter() - middle, 1)],
    }
    text = results.against(own_rate, their_rate, "tokens/s")
    if figures["mfu"]:
        text += f"; MFU {figures['mfu']:.3f}"
    if row.num_gpus:
        text += f"; peak {results.against(figures['peak_gib'], figures['reference_peak_gib'], 'GiB', 1)}"
    results.add("trainer_speed", name, figures, text)
    if profile:
        from benchmarks.harness import trace

        files = [profile / "reference.json", profile / "rank-0.json"]
        text = "\n\n".join(trace.summary(file, TRACED_STEPS) for file in files if file.exists())
        (profile / f"{name}.txt").write_text(text + "\n")
        print(text, flush=True)


def changed(name: str, **values: str | None) -> tuple[str, Row]:
    """Change fields of the row `name`. values: the new value of each field, or None for a field that stays as it is.

    Returns (new name, changed row). The new name lists the changes, as in ("4b-packed, attention flex", Row(…)).
    """
    row = ROWS[name]
    for field, value in values.items():
        if value is not None and value != getattr(row, field):
            row = replace(row, **{field: value})
            name += f", {field} {value}"
    return name, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="; ".join(ROWS), metavar="ROW")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps of each side before the timed steps")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each side")
    parser.add_argument("--profile", type=Path, help="a folder for traces of two more steps of each side")
    kinds = get_type_hints(Row)
    for field in CHANGEABLE:
        parser.add_argument(f"--{field}", choices=get_args(kinds[field]), help=f"replaces the row's {field}")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.rows if name not in ROWS]
    if unknown:
        parser.error(f"no row {unknown[0]!r}; there are: {', '.join(ROWS)}")
    values = {field: getattr(arguments, field) for field in CHANGEABLE}
    for row_name in arguments.rows:
        name, row = changed(row_name, **values)
        run_row(name, row, warmup=arguments.warmup, steps=arguments.steps, profile=arguments.profile)


if __name__ == "__main__":
    main()
