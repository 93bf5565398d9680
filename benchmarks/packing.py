"""Speed of training with samples packed into rows, compared with samples that are each padded to 4,096 positions.

Speed is the number of tokens that forward_backward processes in a second. Padding does not count. Sample lengths are
log-normal (median 600, sigma 1, clipped to 4,096, seed 0). One process trains a tiny model on a CPU, or a model of
Qwen3 0.6B's shape in bfloat16 on a GPU. The timed calls alternate between the ways of packing, so that a slow period of
the machine affects all ways. The docstring of `Planner` in rl_actors/engine/packing.py explains the ways.

A plan puts samples into rows, and rows into the microbatches of every rank. The program also prints the time to make
plans, and their share of padding.
"""

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from benchmarks.harness import results
from configs import qwen3
from rl_actors import ModelConfig, Sample, TrainerConfig
from rl_actors.engine.packing import Microbatch, Plan, Planner, time_of

ROW = 4096  # positions of a row
SIZES = (100, 1_000, 10_000, 100_000)  # numbers of samples for which plans are made and timed
PADDED = "padded"  # the way without packing, with which the other ways are compared


def long_tailed(count: int) -> list[int]:
    """Lengths of `count` samples. The first lengths are the same for every `count`."""
    draw = random.Random(0)
    return [max(1, min(ROW, round(600 * math.exp(draw.gauss(0, 1))))) for _ in range(count)]


def waste(lengths: Sequence[int], ranks: Plan) -> float:
    """The share of the positions of a plan that are padding."""
    num_positions = 0
    for microbatches in ranks:
        num_positions += sum(len(microbatch.rows) * microbatch.row_length for microbatch in microbatches)
    return 1 - sum(lengths) / num_positions


def padded(planner: Planner, lengths: Sequence[int]) -> Plan:
    """In place of Planner.plan: every sample is a microbatch of its own, padded to a full row."""
    rows: list[tuple[int, ...]] = [(index,) for index in range(len(lengths))]
    rows += [()] * (-len(rows) % planner.num_ranks)  # empty rows, so that all ranks have the same number of rows
    microbatches = [Microbatch(rows=(row,), row_length=planner.tokens_per_row) for row in rows]
    return [microbatches[rank :: planner.num_ranks] for rank in range(planner.num_ranks)]


def now() -> float:
    """Wait until the GPU, if there is one, has finished its work. Returns the time after the wait.

    The wait is necessary because forward_backward returns before the GPU has finished the last backward pass.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def print_planning() -> None:
    """Print the time, padding and imbalance of plans.

    The attention cost of a sample is the square of its length. In each microbatch all ranks wait for the rank with the
    highest cost. So the highest costs of all microbatches are added up. Imbalance is the excess of this sum over the
    mean cost of a rank.
    """
    print("plans with tokens_per_row=4,096 and rows_per_microbatch=1; seconds: the best of three times")
    print(
        f"{'samples':>9} {'ranks':>6} {'policy':<13} {'seconds':>8} {'padding':>7} {'microbatches':>13} {'slowest rank':>13}"
    )
    for count in SIZES:
        lengths = long_tailed(count)
        for ranks, policy in ((1, "packed"), (8, "packed"), (8, "token_budget"), (8, "fixed")):
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                found = Planner(tokens_per_row=ROW, rows_per_microbatch=1, num_ranks=ranks, policy=policy).plan(lengths)
                seconds.append(time.perf_counter() - start)
            mean_cost = sum(length**2 for length in lengths) / ranks
            excess = time_of(lengths, found)[1] / mean_cost - 1
            figures = f"{min(seconds):>8.3f} {waste(lengths, found):>7.2%} {len(found[0]):>13,} {excess:>12.2%}"
            print(f"{count:>9,} {ranks:>6} {policy:<13} {figures} over the mean in attention")


def trainer_config() -> TrainerConfig:
    common = {"max_sequence_length": ROW, "tokens_per_row": ROW}
    if torch.cuda.is_available():
        config = replace(qwen3.trainer("0_6b", tokens_per_row=ROW), activation_checkpointing="none")
        return replace(config, **common)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    model = ModelConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, **heads)
    return TrainerConfig(model=model, **common)


def measure_throughput(num_samples: int, repeats: int, ways: Sequence[str]) -> None:
    """Time forward_backward with every way of packing.

    For each way except PADDED, record a result that compares the way with PADDED.
    """
    from rl_actors.engine.train_engine import TrainEngine

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    engine = TrainEngine(trainer_config())
    config, vocab_size = engine.config, engine.config.model.vocab_size
    lengths = long_tailed(num_samples)
    draw = torch.Generator().manual_seed(0)
    samples = []
    for length in lengths:
        ids = torch.randint(vocab_size, (length + 1,), generator=draw).tolist()
        samples.append(Sample.from_tokens(ids[:1], ids[1:]))
    model = (
        f"{engine.info().num_parameters / 1e6:,.1f} million parameters, {config.compute_dtype}, {engine.built.device}"
    )
    print(f"\nforward_backward: {model}; {num_samples} samples, {sum(lengths):,} tokens")
    if num_samples < SIZES[-2]:
        print(f"that is {num_samples / SIZES[-2]:.2%} of a call of {SIZES[-2]:,} samples")
    if not torch.cuda.is_available():
        print("on a CPU attention costs the square of the row's length, so ways that make short rows are faster")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, times in seconds.items():
            engine.config = replace(config, packing=config.packing if name == PADDED else name)
            with mock.patch.object(Planner, "plan", padded if name == PADDED else Planner.plan):
                start = now()
                engine.forward_backward(samples, "cross_entropy")
                if turn:  # turn 0 is warm-up, which compiles kernels
                    times.append(now() - start)
            engine.discard_gradients()
    padded_median = statistics.median(seconds[PADDED])
    for name, times in seconds.items():
        if name == PADDED:
            continue
        median = statistics.median(times)
        figures: dict[str, Any] = {
            "tokens_per_second": sum(lengths) / median,
            "padded_tokens_per_second": sum(lengths) / padded_median,
            "ratio": padded_median / median,
            "samples": num_samples,
            "seconds": [round(x, 3) for x in times],
            "padded_seconds": [round(x, 3) for x in seconds[PADDED]],
        }
        text = results.against(figures["tokens_per_second"], figures["padded_tokens_per_second"], "tokens/s")
        results.add("packing", name, figures, text)
    torch.distributed.destroy_process_group()


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=256 if on_gpu else 32, help="number of samples in a timed call")
    parser.add_argument(
        "--repeats", type=int, default=5 if on_gpu else 3, help="number of timed calls of each way of packing"
    )
    ways = ["packed", "token_budget", "fixed"]
    # On a GPU the default is only the first way. The other ways have rows of many lengths, and the model's blocks would
    # be compiled for each length.
    default = ways[:1] if on_gpu else ways
    parser.add_argument(
        "--ways", nargs="*", default=default, choices=ways, help="ways of packing to compare with padded samples"
    )
    arguments = parser.parse_args()
    print_planning()
    measure_throughput(arguments.samples, arguments.repeats, [*arguments.ways, PADDED])


if __name__ == "__main__":
    main()
