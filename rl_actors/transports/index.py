"""A transport that keeps its index of the weights' versions in a small actor. It needs no torchstore. No tensor passes through the actor."""

import uuid

from monarch.actor import Actor, endpoint, this_proc

from rl_actors.config import WeightsConfig
from rl_actors.processes.spawn import start_here
from rl_actors.transports.indexed import IndexedTransport


class Index(Actor):
    """An actor that stores objects by key."""

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
    """A transport whose index is an Index actor. `open` starts the actor in this process."""

    # `open` sets this to a mesh of one Index actor. The annotation is the actor's class, because a mesh in Monarch has the
    # endpoints of its actors.
    index: Index

    def __init__(self, weights: WeightsConfig | None = None) -> None:
        super().__init__(weights)
        self._is_open_here = False  # True only in the process in which `open` started the actor

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
