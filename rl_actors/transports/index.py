"""The index of versions in a small actor, for programs without torchstore. No tensor passes through it."""

from monarch.actor import Actor, endpoint

from rl_actors.config import WeightsConfig
from rl_actors.processes.spawn import ProcessMesh, spawn_processes
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
    """Versions in an Index, which `open` starts in a process of its own."""

    index: Index  # from `open` on: a mesh of one actor; Monarch gives a mesh the type of its actor

    def __init__(self, weights: WeightsConfig | None = None) -> None:
        super().__init__(weights)
        self._processes: ProcessMesh | None = None

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_processes": None}

    async def open(self) -> None:
        if self._processes is None:
            self._processes = await spawn_processes("index", 1)
            self.index = self._processes.mesh.spawn("index", Index)
            await self.index.initialized

    async def close(self) -> None:
        if self._processes is not None:
            await self._processes.stop()
            self._processes = None

    async def put_object(self, key: str, value: object) -> None:
        await self.index.put.call_one(key, value)

    async def get_object(self, key: str) -> object | None:
        return await self.index.get.call_one(key)

    async def delete_object(self, key: str) -> None:
        await self.index.delete.call_one(key)
