"""The simplest transport, for tests and as an example: dictionaries of one actor.

Slow, because every byte goes through a Monarch message.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping

import torch
from monarch.actor import Actor, endpoint
from torch import Tensor

from rl_actors.processes.spawn import ProcessMesh, spawn_processes
from rl_actors.transports.base import LoadedTensors, Manifest, Source, Transport, assemble, local_shard


class MemoryStore(Actor):
    """Objects by key, and shards by tensor key and offset."""

    def __init__(self) -> None:
        self.objects: dict[str, object] = {}
        self.shards: dict[str, dict[tuple[int, ...], Tensor]] = defaultdict(dict)

    @endpoint
    async def put_shards(self, shards: dict[str, tuple[Tensor, tuple[int, ...]]]) -> None:
        for key, (shard, offset) in shards.items():
            self.shards[key][offset] = shard

    @endpoint
    async def get_shards(self, keys: list[str]) -> dict[str, dict[tuple[int, ...], Tensor]]:
        return {key: self.shards.get(key, {}) for key in keys}

    @endpoint
    async def put_object(self, key: str, value: object) -> None:
        self.objects[key] = value

    @endpoint
    async def get_object(self, key: str) -> object | None:
        return self.objects.get(key)

    @endpoint
    async def delete(self, keys: list[str]) -> None:
        for key in keys:
            self.shards.pop(key, None)
            self.objects.pop(key, None)


class MemoryTransport(Transport):
    """Keeps weights in a MemoryStore, which `open` starts in a process of its own."""

    # a mesh of one; Monarch types a mesh as its actor
    store: MemoryStore

    kind = "memory"

    def __init__(self) -> None:
        self._processes: ProcessMesh | None = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_processes": None}

    async def open(self) -> None:
        if self._processes is None:
            self._processes = await spawn_processes("memory", 1)
            self.store = self._processes.mesh.spawn("memory_store", MemoryStore)
            await self.store.initialized

    async def close(self) -> None:
        if self._processes is not None:
            await self._processes.stop()
            self._processes = None

    async def death(self, silent_after: float) -> str:
        if self._processes is None:
            return await super().death(silent_after)
        end = asyncio.ensure_future(self._processes.wait_any_exit())
        silence = asyncio.ensure_future(self._processes.first_silent(silent_after))
        try:
            await asyncio.wait((end, silence), return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                return f"store: the process of {end.result()} ended"
            for process in silence.result():
                process.kill()  # otherwise `close` would wait for its answer
            return f"store: {', '.join(map(str, silence.result()))} did not answer for {silent_after:g} s"
        finally:
            end.cancel()
            silence.cancel()

    async def put_tensors(
        self, key: str, tensors: Mapping[str, Tensor], rank: int, dtype: torch.dtype | None = None
    ) -> None:
        shards = {f"{key}/{name}": local_shard(tensor, dtype) for name, tensor in tensors.items()}
        await self.store.put_shards.call_one(shards)

    async def source(self, manifest: Manifest) -> Source:
        shards = await self.store.get_shards.call_one([f"{manifest.key}/{name}" for name in manifest.tensors])
        tensors: dict[str, Tensor] = {}
        for name, (shape, dtype) in manifest.tensors.items():
            tensors[name] = assemble(name, shape, dtype, shards[f"{manifest.key}/{name}"])
        return LoadedTensors(tensors, key=manifest.key, reason="the config says so")

    async def put_object(self, key: str, value: object) -> None:
        await self.store.put_object.call_one(key, value)

    async def get_object(self, key: str) -> object | None:
        return await self.store.get_object.call_one(key)

    async def delete(self, manifest: Manifest) -> None:
        keys = [f"{manifest.key}/{name}" for name in ("manifest", *manifest.tensors)]
        await self.store.delete.call_one(keys)
