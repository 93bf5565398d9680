"""Time of a push and a pull of the weights, for two ways of collecting them: the engine's own, and torch's get_model_state_dict.

In every round each way pushes once, and this process pulls the pushed weights. The ratios compare medians over the rounds.
The part "collect" ends when the tensors exist under their Hugging Face names in the dtype that is sent. The part "push" is collecting and
sending them.
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


class OwnWay(PolicyTrainer):
    """A trainer that collects the weights as the project does: every rank takes its own shards."""

    name = "own shards"

    @endpoint
    async def timed_push(self) -> tuple[float, float]:
        """(seconds of collecting, seconds of a whole push). No push reuses anything of an earlier one."""
        self.publisher.start_stream()  # otherwise a version that was published would not be published again
        torch.distributed.barrier()
        begin = _now()
        self._weights(await transfer_dtype(self.transport))
        collected = _now() - begin
        # A push calls the engine's hf_state_dict, so this way takes its place for the time of the push.
        original, self.engine.hf_state_dict = self.engine.hf_state_dict, self._weights
        begin = _now()
        await self.publish_weights()
        self.engine.hf_state_dict = original
        return collected, _now() - begin

    def _weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return type(self.engine).hf_state_dict(self.engine, dtype)


class GetModelStateDict(OwnWay):
    """A trainer that collects the weights with torch's get_model_state_dict.

    That function cannot split fused projections of query, key and value, so the model has none.
    """

    name = "get_model_state_dict"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from rl_actors.engine import build

        original = build.qwen3_config

        def without_fused_projections(model: ModelConfig, **options: Any) -> Any:
            return original(model, **{**options, "fuse_qkv": False})

        build.qwen3_config = without_fused_projections

    def _weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        built = self.engine.built
        state = built.hf_adapter.to_hf(get_model_state_dict(built.model))
        return {name: tensor.detach().to(dtype) for name, tensor in state.items()}


PARTS = ("collect", "push", "pull")
WAYS: tuple[type[OwnWay], ...] = (OwnWay, GetModelStateDict)


def _now() -> float:
    """The time when a GPU has done all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


async def measure(name: str, model: ModelConfig, *, processes: int, dtype: str, rounds: int) -> None:
    """Print the medians of both ways, in milliseconds."""
    config = TrainerConfig(model=model, optimizer=None, max_sequence_length=128, tokens_per_row=128)
    config.parallelism.data_parallel_shard_degree = processes
    transport = TorchStoreTransport()
    await transport.open()
    meshes = [await spawn_processes("push", processes) for _ in WAYS]
    try:
        await announce(transport, dtype)
        actors: list[Any] = []
        for mesh, way in zip(meshes, WAYS, strict=True):
            actors.append(mesh.mesh.spawn("push", way, config, transport))
        infos = [await TrainerClient(actor).info() for actor in actors]
        times: dict[tuple[str, str], list[float]] = defaultdict(list)
        for turn in range(rounds + 1):
            for actor, way in zip(actors, WAYS, strict=True):
                seconds_of_ranks = await collect(actor.timed_push)
                begin = time.perf_counter()
                tensors = await transport.get_tensors(await find(transport, 0, 10.0))
                pulled = time.perf_counter() - begin
                assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
                if turn:  # turn 0 is warm-up
                    times["collect", way.name].append(max(collected for collected, _ in seconds_of_ranks))
                    times["push", way.name].append(max(pushed for _, pushed in seconds_of_ranks))
                    times["pull", way.name].append(pulled)
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
    larger = replace(ModelConfig(), num_hidden_layers=num_layers, vocab_size=vocab_size)
    return {"tiny": tiny().trainer.model, f"{num_layers} blocks of a Qwen3 0.6B": larger}


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="timed pushes of each way")
    parser.add_argument("--processes", type=int, default=1, help="ranks that share the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="dtype of the generator")
    parser.add_argument("--layers", type=int, default=28 if on_gpu else 4, help="blocks of the larger model")
    parser.add_argument(
        "--vocab-size", type=int, default=151_936 if on_gpu else 8192, help="vocabulary of the larger model"
    )
    arguments = parser.parse_args()
    options = {"processes": arguments.processes, "dtype": arguments.dtype, "rounds": arguments.rounds}
    for name, model in models(arguments.layers, arguments.vocab_size).items():
        asyncio.run(measure(name, model, **options))


if __name__ == "__main__":
    main()
