"""A transport whose index of versions is in a small actor, for installations without torchstore."""

import uuid

from monarch.actor import Actor, endpoint, this_proc

from rl_actors.config import WeightsConfig
from rl_actors.processes.spawn import start_here
from rl_actors.transports.indexed import IndexedTransport


class Index(Actor):
    """Objects by key."""

    def __init__(self) -> None:
        self.objects: dict[str, object] = {}

    @endpoint
    async def put(self, key: str, value: object) -> None:
        self.objects[key] = value

    @endpoint
    async def get(self, key: str) -> object | None:
        return self.objects.get(key)

    @endpoint
    async def delete(self, key: str) -> None:
        self.objects.pop(key, None)


class IndexTransport(IndexedTransport):
    """A transport whose index is an Index actor in the process that calls `open`."""

    # a mesh of one; Monarch types a mesh as its actor
    index: Index

    def __init__(self, weights: WeightsConfig | None = None) -> None:
        super().__init__(weights)
        self._is_open_here = False  # only in the process of `open`

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_is_open_here": False}

    async def open(self) -> None:
        if not self._is_open_here:
            start_here()
            self.index = this_proc().spawn(f"index_{uuid.uuid4().hex[:12]}", Index)
            await self.index.initialized
            self._is_open_here = True

    async def close(self) -> None:
        if self._is_open_here:
            self._is_open_here = False
            await self.index.stop()

    async def put_object(self, key: str, value: object) -> None:
        await self.index.put.call_one(key, value)

    async def get_object(self, key: str) -> object | None:
        return await self.index.get.call_one(key)

    async def delete_object(self, key: str) -> None:
        await self.index.delete.call_one(key)
