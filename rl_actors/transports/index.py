"""The transport of a caller who names none, and the one without torchstore: its index is an actor."""

import logging
import uuid
from importlib.util import find_spec

from monarch.actor import Actor, endpoint, this_proc

from rl_actors.config import WeightsConfig
from rl_actors.processes.spawn import start_here
from rl_actors.transports.indexed import IndexedTransport

logger = logging.getLogger(__name__)


def default_transport(weights: WeightsConfig | None = None) -> IndexedTransport:
    """Its index is in a torchstore, or in an actor if torchstore is not installed."""
    if find_spec("torchstore") is None:
        logger.info("torchstore is not installed: a small actor keeps the index of the weights' versions")
        return IndexTransport(weights)
    from rl_actors.transports.torchstore import TorchStoreTransport

    return TorchStoreTransport(weights=weights)


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
