"""Training through TrainerClient beside torchtitan's own pieces without actors: rows of one table, each one pair in one run.

Medians of steps after warm-up; the reference runs first, each side alone on the GPUs.
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

CHANGEABLE = ("attention", "checkpointing")  # on the command line
PEAK_FLOPS = 989e12  # torchtitan's figure of an H200, dense bfloat16


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
        logprob_chunk_tokens=8192 if on_gpu else row.rows * row.row_length // row.chunks,  # as configs.qwen3
    )
    config.compile.enable = on_gpu
    config.parallelism.data_parallel_shard_degree = max(1, row.num_gpus)
    return config


def ours(row: Row, warmup: int, steps: int, trace: str) -> dict[str, Any]:
    """Seconds of every step, of its two calls, and the peak memory of the fullest rank."""
    config = trainer_config(row)
    draw = torch.Generator().manual_seed(0)
    ones = torch.ones(row.document)
    samples = []
    for _ in range(row.positions * max(1, row.num_gpus) // row.document):
        ids = torch.randint(config.model.vocab_size, (row.document + 1,), generator=draw)
        samples.append(Sample(tokens=ids[:-1], targets=ids[1:].clone(), columns={"loss_weights": ones}))
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
            except RuntimeError as error:  # the figures are there
                print(f"no trace: {error}", flush=True)
    return found


def reference(row: Row, warmup: int, steps: int, trace: str) -> dict[str, Any]:
    """The same of torchtitan's pieces: the slowest rank's seconds, the fullest rank's memory."""
    from benchmarks import titan

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
        raise SystemExit("the reference failed") from None
    for child in children:
        child.join()
    return {
        "seconds": [max(of_step) for of_step in zip(*(answer["seconds"] for answer in answers), strict=True)],
        "peak_bytes": max(answer["peak_bytes"] for answer in answers),
    }


def flops_per_token(model: ModelConfig, context: float) -> float:
    """Of forward and backward pass: 6 for every parameter of a matrix product, and attention over `context` positions.

    torchtitan counts the row's length as context; within documents under a causal mask it is half a document.
    """
    d, w = model.hidden_size, model.head_dim
    heads, groups = model.num_attention_heads * w, model.num_key_value_heads * w
    block = d * (heads + 2 * groups) + heads * d + 3 * d * model.intermediate_size
    parameters = model.num_hidden_layers * block + model.vocab_size * d
    return 6 * parameters + 12 * model.num_hidden_layers * heads * context


def run_row(name: str, row: Row, *, warmup: int, steps: int, profile: Path | None) -> None:
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
    rates = [tokens / statistics.median(side["seconds"]) for side in (own, theirs)]
    per_gpu, model = rates[0] / max(1, row.num_gpus), model_of(row)
    figures = {
        "tokens_per_second": rates[0],
        "reference_tokens_per_second": rates[1],
        "ratio": rates[0] / rates[1],
        "mfu_torchtitan": flops_per_token(model, row.row_length) * per_gpu / PEAK_FLOPS if row.num_gpus else None,
        "mfu_causal": flops_per_token(model, row.document / 2) * per_gpu / PEAK_FLOPS if row.num_gpus else None,
        "peak_gib": own["peak_bytes"] / 2**30,
        "reference_peak_gib": theirs["peak_bytes"] / 2**30,
        **asdict(row),
        "steps": steps,
        "seconds": [round(x, 4) for x in own["seconds"]],
        "reference_seconds": [round(x, 4) for x in theirs["seconds"]],
        "optim_step_seconds": statistics.median(own["optim_step"]),
        "wall_seconds": [round(middle - began, 1), round(time.perf_counter() - middle, 1)],
    }
    results.add("trainer_speed", name, figures)
    if profile:
        from benchmarks.harness import trace

        files = [profile / "reference.json", profile / "rank-0.json"]
        text = "\n\n".join(trace.summary(file, TRACED_STEPS) for file in files if file.exists())
        (profile / f"{name}.txt").write_text(text + "\n")
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="; ".join(ROWS), metavar="ROW")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7, help="steps of each side that are timed")
    parser.add_argument("--profile", type=Path, help="a folder for a trace of two more steps of each side")
    kinds = get_type_hints(Row)
    for field in CHANGEABLE:
        parser.add_argument(f"--{field}", choices=get_args(kinds[field]), help=f"in the place of the row's {field}")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.rows if name not in ROWS]:
        parser.error(f"no row {unknown[0]!r}; there are: {', '.join(ROWS)}")
    for name in arguments.rows:
        row = ROWS[name]
        given = {field: getattr(arguments, field) or getattr(row, field) for field in CHANGEABLE}
        changed = [f", {field} {value}" for field, value in given.items() if value != getattr(row, field)]
        named = name + "".join(changed)  # what was changed is no result of the table's row
        run_row(named, replace(row, **given), warmup=arguments.warmup, steps=arguments.steps, profile=arguments.profile)


if __name__ == "__main__":
    main()
