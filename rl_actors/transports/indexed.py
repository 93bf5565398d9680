"""Base of the transports that store only an index: readers copy the tensors from the ranks' slots."""

import logging
import secrets
import socket
from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_actors.config import WeightsConfig
from rl_actors.transports.base import Manifest, Source, Transport
from rl_actors.transports.placement import Place, choose, room_for_slots
from rl_actors.transports.reader import SlotSource
from rl_actors.transports.server import SlotServer
from rl_actors.transports.slots import Slot, SlotAddress
from rl_actors.transports.snapshot import DoubleBuffer

LOOPBACK = "127.0.0.1"
logger = logging.getLogger(__name__)


class IndexedTransport(Transport):
    """Tensors stay in slots of the ranks that called `put_tensors`. A subclass stores the index."""

    kind = "slots"

    def __init__(self, weights: WeightsConfig | None = None) -> None:
        self.weights = WeightsConfig() if weights is None else weights
        # signs the requests of readers to the ranks' servers
        self.secret = secrets.token_bytes(32)
        # by rank, for the ranks of this process
        self._snapshots: dict[int, DoubleBuffer] = {}
        self._servers: dict[int, SlotServer] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_snapshots": {}, "_servers": {}}

    async def put_tensors(
        self, key: str, tensors: Mapping[str, Tensor], rank: int, dtype: torch.dtype | None = None
    ) -> SlotAddress:
        if rank not in self._snapshots:
            self._snapshots[rank] = DoubleBuffer(
                rank=rank, timeout=self.weights.timeout, choose_place=self._choose_place
            )
        slot = self._snapshots[rank].write(key, tensors, dtype)
        if rank not in self._servers and self._needs_server(slot):
            self._serve(rank)
        return slot.address(self._servers[rank].address if rank in self._servers else None)

    def _choose_place(self, num_bytes: int, device: torch.device) -> Place:
        room = 0
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            room = room_for_slots(free, torch.cuda.memory_reserved(device), self.training_bytes)
        place = choose(num_bytes, weights_on_gpu=device.type == "cuda", path=self.weights.path, room=room)
        where = "on the GPU" if place.on_gpu else "in memory of the host"
        logger.info(
            "slots for the weights: %d %s, each of %.3f GB, because %s",
            place.num_slots,
            where,
            num_bytes / 1e9,
            place.reason,
        )
        return place

    def _needs_server(self, slot: Slot) -> bool:
        """By path, from other hosts, or without access to a slot on the GPU."""
        return (
            self.weights.path in ("tcp", "point_to_point")
            or bool(self.weights.address)
            or (slot.on_gpu is not None and self.weights.path == "auto")
        )

    def _serve(self, rank: int) -> None:
        host = self.weights.address or LOOPBACK
        host = socket.gethostname() if host == "hostname" else host
        find = self._snapshots[rank].find
        timeout = self.weights.timeout
        self._servers[rank] = SlotServer(find, host=host, secret=self.secret, timeout=timeout)

    async def discard_tensors(self, key: str, rank: int) -> None:
        if rank in self._snapshots:
            self._snapshots[rank].forget(key)

    async def source(self, manifest: Manifest) -> Source:
        weights = self.weights
        return SlotSource(manifest=manifest, path=weights.path, timeout=weights.timeout, secret=self.secret)

    async def delete(self, manifest: Manifest) -> None:
        """Remove the manifest. The slots stay for later versions."""
        await self.delete_object(f"{manifest.key}/manifest")

    @abstractmethod
    async def delete_object(self, key: str) -> None:
        """Remove the value of put_object."""
