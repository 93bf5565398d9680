"""What a push and a pull of the weights take: sharded as they lie, against torch's get_model_state_dict, in one run.

A round pushes once each way, in turn, and pulls what was pushed into this process; the ratios are of medians over the rounds.
"""

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from monarch.actor import endpoint
from torch import Tensor

from configs.tiny import tiny
from rl_actors import ModelConfig, TorchStoreTransport, TrainerClient, TrainerConfig
from rl_actors.meshes import collect, spawn_processes
from rl_actors.policy_trainer import PolicyTrainer
from rl_actors.transports.base import announce, find

ROUTES = ("as they lie", "get_model_state_dict")


class TimedTrainer(PolicyTrainer):
    @endpoint
    async def timed_push(self, route: str) -> tuple[float, float]:
        """Seconds until the tensors are there to be sent, and of the whole push; nothing is taken from earlier pushes."""
        own, collected = self.engine.hf_state_dict, 0.0

        def timed(dtype: torch.dtype) -> dict[str, Tensor]:
            nonlocal collected
            begin = _now()
            state = own(dtype) if route == ROUTES[0] else self._gathered(dtype)
            collected = _now() - begin
            return state

        self.new_stream()  # so that a version that is out goes out again
        torch.distributed.barrier()
        begin = _now()
        self.engine.hf_state_dict = timed
        try:
            await self.publish_weights()
        finally:
            self.engine.hf_state_dict = own
        return collected, _now() - begin

    def _gathered(self, dtype: torch.dtype) -> dict[str, Tensor]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        parts = self.engine.parts
        return {
            name: x.detach().to(dtype) for name, x in parts.adapter.to_hf(get_model_state_dict(parts.model)).items()
        }


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


async def measure(name: str, model: ModelConfig, *, processes: int, dtype: str, rounds: int) -> None:
    config = TrainerConfig(model=model, optimizer=None, max_sequence_length=128, tokens_per_row=128)
    config.parallelism.data_parallel_shard_degree = processes
    transport = TorchStoreTransport()
    await transport.open()
    mesh = await spawn_processes("push", processes)
    try:
        await announce(transport, dtype)
        actors: Any = mesh.mesh.spawn("push", TimedTrainer, config, transport)
        num_parameters = (await TrainerClient(actors).info())[0].num_parameters
        times: dict[tuple[str, str], list[float]] = defaultdict(list)
        for number in range(rounds + 1):  # the first pays for caches
            for route in ROUTES:
                ranks = await collect(actors.timed_push, route)
                begin = time.perf_counter()
                tensors = await transport.get_tensors(await find(transport, 0, 10.0))
                pulled = time.perf_counter() - begin
                assert {x.dtype for x in tensors.values()} == {getattr(torch, dtype)}
                if number:
                    for part, seconds in zip(("collect", "push"), map(max, zip(*ranks, strict=True)), strict=True):
                        times[part, route].append(seconds)
                    times["pull", route].append(pulled)
    finally:
        await mesh.stop()
        await transport.close()
    print(f"{name}: {num_parameters / 1e6:,.1f} million parameters on {processes} ranks, sent in {dtype}", flush=True)
    for part in ("collect", "push", "pull"):
        ours, theirs = (statistics.median(times[part, route]) for route in ROUTES)
        print(
            f"  {part:<8} {ROUTES[0]} {ours * 1e3:,.1f} ms, {ROUTES[1]} {theirs * 1e3:,.1f} ms, ratio {ours / theirs:.2f}"
        )


def models(num_layers: int, vocab_size: int) -> dict[str, ModelConfig]:
    return {
        "tiny": tiny().trainer.model,
        f"{num_layers} blocks of a Qwen3 0.6B": replace(
            ModelConfig(), num_hidden_layers=num_layers, vocab_size=vocab_size
        ),
    }


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="timed pushes of each way")
    parser.add_argument("--processes", type=int, default=1, help="ranks that share the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the generator")
    parser.add_argument("--layers", type=int, default=28 if on_gpu else 4, help="blocks of the larger model")
    parser.add_argument("--vocab-size", type=int, default=151_936 if on_gpu else 8192, help="of the larger model")
    arguments = parser.parse_args()
    options = {"processes": arguments.processes, "dtype": arguments.dtype, "rounds": arguments.rounds}
    for name, model in models(arguments.layers, arguments.vocab_size).items():
        asyncio.run(measure(name, model, **options))


if __name__ == "__main__":
    main()
