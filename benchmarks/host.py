"""Host milliseconds of a step outside the model: what a call of 65,536 positions costs on its way, and optim_step of 28 tiny blocks.

The processor time of the thread, least and median of --repeats; a round trip to the actor in wall time. Widths are tiny, so that what is
left is the host's work: Python, torch's dispatch, pickling. About a minute.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch

from benchmarks.harness import results
from rl_actors import CrossEntropy, ModelConfig, OptimParams, Sample, TrainerClient, TrainerConfig
from rl_actors.clients.conversion import merge_outputs, to_tensors
from rl_actors.types import RankOutput, SampleList
from rl_actors.validation import validate_samples

POSITIONS = 65_536
TINY = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=28,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=32,
)


def samples_of(count: int, length: int) -> list[Sample]:
    draw = torch.Generator().manual_seed(0)
    ids = lambda: torch.randint(TINY.vocab_size, (length,), generator=draw)  # noqa: E731
    return [Sample(tokens=ids(), targets=ids(), columns={"loss_weights": torch.ones(length)}) for _ in range(count)]


def milliseconds(call: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.thread_time) -> list[float]:
    """[least, median]"""
    found = []
    for _ in range(repeats):
        start = clock()
        call()
        found.append((clock() - start) * 1e3)
    return [round(min(found), 3), round(statistics.median(found), 3)]


def on_the_way(count: int, repeats: int) -> dict[str, list[float]]:
    """What a forward_backward of `count` samples goes through before and behind the model."""
    from rl_actors.engine.batch import make_batch
    from rl_actors.engine.packing import plan

    length = POSITIONS // count
    samples = samples_of(count, length)
    limits = {"vocab_size": TINY.vocab_size, "max_sequence_length": length, "max_call_bytes": 1 << 30}
    asked, lengths = cloudpickle.dumps(SampleList(samples)), [length] * count
    row = max(length, POSITIONS // 2)
    rows = {"tokens_per_row": row, "rows_per_microbatch": POSITIONS // row, "num_ranks": 1}
    [[microbatch]] = plan(lengths, **rows)
    output = RankOutput(
        rank=0,
        indices=list(range(count)),
        lengths=lengths,
        logprobs=torch.rand(POSITIONS),
        extras={},
        metrics={"loss:sum": 1.0, "logprob:mean": (1.0, 2.0)},
        policy_version=0,
    )
    answered = cloudpickle.dumps(output)
    calls: dict[str, Callable[[], Any]] = {
        "to_tensors": lambda: [to_tensors(sample) for sample in samples],
        "validate (client and rank)": lambda: validate_samples(samples, CrossEntropy(), **limits),
        "pickle": lambda: cloudpickle.dumps(SampleList(samples)),
        "unpickle": lambda: cloudpickle.loads(asked),
        "plan": lambda: plan(lengths, **rows),
        "make_batch": lambda: make_batch(samples, microbatch, ["loss_weights"]),
        "pickle the answer": lambda: cloudpickle.dumps(output),
        "unpickle the answer": lambda: cloudpickle.loads(answered),
        "merge": lambda: merge_outputs(count, [output]),
    }
    return {name: milliseconds(call, repeats) for name, call in calls.items()}


def in_the_engine(config: TrainerConfig, repeats: int) -> dict[str, list[float]]:
    named = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in named.items()})
    from rl_actors.engine.train_engine import TrainEngine

    engine, samples = TrainEngine(config), samples_of(1, 64)
    params = OptimParams(learning_rate=1e-4, grad_divisor=64.0)
    times: dict[str, list[list[float]]] = {"forward_backward of 64 positions": [], "optim_step": []}
    for _ in range(repeats + 3):
        calls = (lambda: engine.forward_backward(samples, "cross_entropy"), lambda: engine.optim_step(params))
        for taken, call in zip(times.values(), calls, strict=True):
            taken.append(milliseconds(call, 1))
    torch.distributed.destroy_process_group()
    steady = {name: [first for first, _ in taken[3:]] for name, taken in times.items()}
    return {name: [min(taken), round(statistics.median(taken), 3)] for name, taken in steady.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    config = TrainerConfig(model=TINY, max_sequence_length=64, tokens_per_row=64)
    for count in (32, 1024):
        results.add("host", f"{count} samples", on_the_way(count, repeats))
    results.add("host", "engine of 28 blocks", in_the_engine(config, repeats))
    with TrainerClient.spawn(config) as trainer:
        trainer.ready().result()
        round_trip = milliseconds(lambda: trainer.info().result(), repeats, time.perf_counter)
    results.add("host", "round trip", {"info": round_trip})


if __name__ == "__main__":
    main()
