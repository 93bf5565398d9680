"""Speed at which a trainer moves its state from the GPU to the host (offload) and back (onload), compared with plain copies.

The plain copies move the same number of bytes between the GPU and pinned host memory, in the same run. The trainer is
one rank in this process, with the weights, gradients and Adam's state of a model in float32. The gradients are zeros,
made without a forward pass. The measurement is repeated --rounds times. Each round moves everything to the host and
back, and then makes the plain copies in blocks of at most 1 GiB. The shortest time of all rounds counts, separately for
offload, onload and the plain copies in each direction. On a CPU no memory is pinned, and all copies stay within host
memory.
"""

import argparse
import os
import time
from collections import defaultdict

import torch

from benchmarks.harness import results
from configs.qwen3 import MODELS
from configs.tiny import tiny
from rl_actors import ModelConfig, OptimParams, TrainerConfig, memory_estimate
from rl_actors.engine.train_engine import TrainEngine
from rl_actors.parts import HostMove

BLOCK = 1 << 30  # bytes


def model_of(name: str) -> ModelConfig:
    return tiny().trainer.model if name == "tiny" else MODELS[name]


def make_engine(model: ModelConfig) -> TrainEngine:
    """A trainer that has taken an optimizer step and has gradients again. The learning rate is 0, so the weights do not change."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    engine = TrainEngine(TrainerConfig(model=model, max_sequence_length=128, tokens_per_row=128))
    for _ in range(2):
        for parameter in engine.built.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        engine.step.open()
        if not engine.policy_version:
            engine.optim_step(OptimParams(learning_rate=0.0, grad_divisor=1.0))
    return engine


def plain_copies(num_bytes: int) -> tuple[float, float]:
    """(seconds of plain copies of num_bytes bytes to the host, seconds of the copies back)."""
    on_gpu = torch.cuda.is_available()
    block = min(BLOCK, num_bytes)
    host = torch.empty(block, dtype=torch.uint8, pin_memory=on_gpu)
    device = torch.zeros(block, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    seconds = []
    for target, source in ((host, device), (device, host)):
        target.copy_(source)
        begin = time.perf_counter()
        for start in range(0, num_bytes, block):
            size = min(block, num_bytes - start)
            target[:size].copy_(source[:size], non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds[0], seconds[1]


def measure(name: str, *, rounds: int) -> None:
    engine = make_engine(model_of(name))
    held = memory_estimate.memory(engine.config)
    expected = held.parameters + held.buffers + held.gradients + held.optimizer
    first = engine.offload()
    if abs(first.num_bytes - expected) > 0.05 * expected:
        raise SystemExit(f"{first.num_bytes:,} bytes moved to the host, but memory_estimate expects {expected:,}")
    engine.onload()
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        moves: dict[str, HostMove] = {"offload": engine.offload()}
        left = engine.info().memory_bytes
        moves["onload"] = engine.onload()
        plain = plain_copies(expected)
        for (way, move), seconds in zip(moves.items(), plain, strict=True):
            times[way].append(move.seconds)
            times[f"plain {way}"].append(seconds)
    best = {way: min(seconds) for way, seconds in times.items()}
    figures = {
        "gigabytes": first.num_bytes / 1e9,
        "gigabytes_left": left / 1e9,
        "buffer_seconds": first.buffer_seconds,
        "offload_seconds": best["offload"],
        "onload_seconds": best["onload"],
        "gb_per_second": 2 * first.num_bytes / 1e9 / (best["offload"] + best["onload"]),
        "plain_gb_per_second": 2 * first.num_bytes / 1e9 / (best["plain offload"] + best["plain onload"]),
        "ratio": min(best[f"plain {way}"] / best[way] for way in ("offload", "onload")),
        "rounds": rounds,
    }
    text = (
        f"{results.against(figures['gb_per_second'], figures['plain_gb_per_second'], 'GB/s', 1)}; {figures['gigabytes']:.1f} GB "
        f"to the host in {best['offload']:.3g} s and back in {best['onload']:.3g} s; host memory made once in {first.buffer_seconds:.3g} s"
    )
    results.add("offload", f"offload, {name}", figures, text)
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["tiny", *MODELS])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    measure(arguments.model, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
