"""Transports that keep only an index of versions in one place. The bytes go from the slots of the trainer's ranks straight to the readers."""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_actors.config import WeightsConfig
from rl_actors.transports.base import Manifest, Source, Transport
from rl_actors.transports.reader import SlotSource
from rl_actors.transports.slots import SlotAddress
from rl_actors.transports.snapshot import Snapshot


class IndexedTransport(Transport):
    """Versions in an index, which a subclass keeps, and their tensors in the slots of the processes that put them."""

    def __init__(self, weights: WeightsConfig | None = None) -> None:
        self.weights = WeightsConfig() if weights is None else weights
        self._snapshots: dict[int, Snapshot] = {}  # of this process, by rank

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_snapshots": {}}

    async def put_tensors(
        self, key: str, tensors: Mapping[str, Tensor], rank: int, dtype: torch.dtype | None = None
    ) -> SlotAddress:
        if rank not in self._snapshots:
            self._snapshots[rank] = Snapshot(rank=rank, timeout=self.weights.timeout)
        return self._snapshots[rank].write(key, tensors, dtype).address(None)

    async def discard_tensors(self, key: str, rank: int) -> None:
        if rank in self._snapshots:
            self._snapshots[rank].forget(key)

    async def source(self, manifest: Manifest) -> Source:
        return SlotSource(manifest=manifest, path=self.weights.path, timeout=self.weights.timeout)

    async def delete(self, manifest: Manifest) -> None:
        """Remove the manifest. The next version but one takes the slot."""
        await self.delete_object(f"{manifest.key}/manifest")

    @abstractmethod
    async def delete_object(self, key: str) -> None:
        """Remove a value of put_object."""
