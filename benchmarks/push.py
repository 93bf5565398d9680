"""What a push and a pull of the weights take: sharded as they lie, against torch's get_model_state_dict, in one run.

A round pushes once each way, in turn, and pulls what was pushed into this process; the ratios are of medians over the rounds.
collect: until the tensors are there, under their Hugging Face names and cast; push: that and sending them.
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
from rl_actors.policy_trainer import PolicyTrainer
from rl_actors.processes.spawn import collect, spawn_processes
from rl_actors.transports.base import announce, find, transfer_dtype


class AsTheyLie(PolicyTrainer):
    """A push as it is."""

    name = "as they lie"

    @endpoint
    async def timed_push(self) -> tuple[float, float]:
        """Seconds until the tensors are there to be sent, and of the whole push; nothing is taken from earlier pushes."""
        self.publisher.start_stream()  # so that a version that is out goes out again
        torch.distributed.barrier()
        begin = _now()
        self._weights(await transfer_dtype(self.transport))
        collected = _now() - begin
        own, self.engine.hf_state_dict = self.engine.hf_state_dict, self._weights
        begin = _now()
        await self.publish_weights()
        self.engine.hf_state_dict = own
        return collected, _now() - begin

    def _weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return type(self.engine).hf_state_dict(self.engine, dtype)


class GetModelStateDict(AsTheyLie):
    """With torch's own, which knows no fused projection, so the model has none."""

    name = "get_model_state_dict"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from rl_actors.engine import build

        fused = build.qwen3_config
        build.qwen3_config = lambda model, **options: fused(model, **{**options, "fuse_qkv": False})

    def _weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        built = self.engine.built
        state = built.hf_adapter.to_hf(get_model_state_dict(built.model))
        return {name: tensor.detach().to(dtype) for name, tensor in state.items()}


PARTS = ("collect", "push", "pull")
WAYS: tuple[type[AsTheyLie], ...] = (AsTheyLie, GetModelStateDict)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


async def measure(name: str, model: ModelConfig, *, processes: int, dtype: str, rounds: int) -> None:
    config = TrainerConfig(model=model, optimizer=None, max_sequence_length=128, tokens_per_row=128)
    config.parallelism.data_parallel_shard_degree = processes
    transport = TorchStoreTransport()
    await transport.open()
    meshes = [await spawn_processes("push", processes) for _ in WAYS]
    try:
        await announce(transport, dtype)
        actors: list[Any] = [
            mesh.mesh.spawn("push", way, config, transport) for mesh, way in zip(meshes, WAYS, strict=True)
        ]
        infos = [await TrainerClient(each).info() for each in actors]
        times: dict[tuple[str, str], list[float]] = defaultdict(list)
        for number in range(rounds + 1):  # the first pays for caches
            for each, way in zip(actors, WAYS, strict=True):
                ranks = await collect(each.timed_push)
                begin = time.perf_counter()
                tensors = await transport.get_tensors(await find(transport, 0, 10.0))
                pulled = time.perf_counter() - begin
                assert {x.dtype for x in tensors.values()} == {getattr(torch, dtype)}
                if number:
                    for part, seconds in zip(PARTS, (*map(max, zip(*ranks, strict=True)), pulled), strict=True):
                        times[part, way.name].append(seconds)
    finally:
        for mesh in meshes:
            await mesh.stop()
        await transport.close()
    size = infos[0][0].num_parameters / 1e6
    print(f"{name}: {size:,.1f} million parameters on {processes} ranks, sent in {dtype}", flush=True)
    for part in PARTS:
        ours, theirs = (statistics.median(times[part, way.name]) * 1e3 for way in WAYS)
        print(f"  {part:<8} {WAYS[0].name} {ours:,.1f} ms, {WAYS[1].name} {theirs:,.1f} ms, ratio {ours / theirs:.2f}")


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
