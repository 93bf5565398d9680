"""`MemoryTransport`, for tests: every byte goes through a Monarch message."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping

import torch
from monarch.actor import endpoint
from torch import Tensor

from rl_actors.processes.spawn import ProcessMesh, spawn_processes
from rl_actors.transports.base import LoadedTensors, Manifest, Piece, Source, Transport, assemble, local_shard
from rl_actors.transports.index import Index


class MemoryStore(Index):
    """Objects by key, and shards by tensor key and offset."""

    def __init__(self) -> None:
        super().__init__()
        self.shards: dict[str, dict[tuple[int, ...], Piece]] = defaultdict(dict)

    @endpoint
    async def put_shards(self, key: str, shards: dict[str, Piece]) -> None:
        for name, shard in shards.items():
            self.shards[f"{key}/{name}"][shard.start] = shard

    @endpoint
    async def get_tensors(self, manifest: Manifest) -> dict[str, Tensor]:
        tensors = {}
        for name, (shape, dtype) in manifest.tensors.items():
            tensors[name] = assemble(name, shape, dtype, self.shards[f"{manifest.key}/{name}"].values())
        return tensors

    @endpoint
    async def delete_version(self, manifest: Manifest) -> None:
        self.objects.pop(f"{manifest.key}/manifest", None)
        for name in manifest.tensors:
            self.shards.pop(f"{manifest.key}/{name}", None)


class MemoryTransport(Transport):
    """Keeps weights in a MemoryStore, which `open` starts in a process of its own."""

    # a mesh of one; Monarch types a mesh as its actor
    store: MemoryStore

    kind = "memory"

    def __init__(self) -> None:
        self._processes: ProcessMesh | None = None

    def __getstate__(self) -> dict[str, object]:
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
        shards = {name: local_shard(tensor, dtype) for name, tensor in tensors.items()}
        await self.store.put_shards.call_one(key, shards)

    async def source(self, manifest: Manifest) -> Source:
        tensors = await self.store.get_tensors.call_one(manifest)
        return LoadedTensors(tensors, manifest.stream, manifest.version, reason="the config says so")

    async def put_object(self, key: str, value: object) -> None:
        await self.store.put.call_one(key, value)

    async def get_object(self, key: str) -> object | None:
        return await self.store.get.call_one(key)

    async def delete(self, manifest: Manifest) -> None:
        await self.store.delete_version.call_one(manifest)
