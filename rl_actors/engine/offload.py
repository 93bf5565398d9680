"""Move weights, gradients and optimizer state of one rank from its device to host memory and back, bit for bit.

`offload` copies each tensor's storage to the host, and resizes the storage to 0 bytes. `onload` resizes the same storage again, and copies
the bytes back. So every view of the storage is valid again, such as the local tensors of DTensors, and the views that FSDP keeps of its
shards. The parameters stay the same objects. They are the keys of the optimizer's state, so this state stays valid, too.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rl_actors.engine.build import BuiltModel
from rl_actors.engine.gradients import local
from rl_actors.engine.machine import this_machine
from rl_actors.parts import PARTS, HostMove, Part

ALIGNMENT = 512  # every storage begins at a multiple of this number of bytes in host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A storage on the device, and the host memory for the bytes of this storage."""

    storage: torch.UntypedStorage
    host: Tensor  # uint8


class Offload:
    """Moves parts of a trainer (weights, gradients, optimizer state) to the host and back.

    At the start of each call to the trainer, the engine calls `onload` with the parts that this call needs.
    """

    def __init__(self, built: BuiltModel) -> None:
        self.built = built
        self.buffers: dict[Part, Tensor] = {}  # host memory of each part; it is kept for later offloads
        self.away: dict[Part, list[Place]] = {}  # the parts that are on the host
        # totals since the trainer was built
        self.offloaded = HostMove()
        self.onloaded = HostMove()

    def offload(self, parts: Collection[Part] = PARTS) -> HostMove:
        """Copy the parts to the host, and free their memory on the device. Does nothing for a part that is on the host already."""
        begin = time.perf_counter()
        num_bytes = 0
        buffer_seconds = 0.0
        this_machine().wait()  # FSDP's own streams may still read weights or write gradients
        wanted = [part for part in PARTS if part in parts and part not in self.away]
        if "weights" in wanted:
            self.drop_gathered_weights()
        for part in wanted:
            storages = _distinct(self._tensors(part), self.built.device)
            if storages:
                buffer_seconds += self._make_buffer(part, storages)
                self.away[part] = places = _places(storages, self.buffers[part])
                num_bytes += _to_host(places)
        this_machine().release_memory()
        seconds = time.perf_counter() - begin
        move = HostMove(num_bytes=num_bytes, seconds=seconds, buffer_seconds=buffer_seconds)
        self.offloaded = self.offloaded.then(move)
        return move

    def onload(self, parts: Collection[Part] = PARTS) -> HostMove:
        """Bring the parts back to the device. Does nothing for a part that is on the device already.

        If the device has too little memory, this method raises torch's error. Storages that were already brought back stay on the device,
        and another call brings back the remaining storages.
        """
        if not any(part in self.away for part in parts):
            return HostMove()
        begin = time.perf_counter()
        num_bytes = 0
        this_machine().release_memory()  # torch caches freed blocks of memory, but their sizes may not fit the storages
        try:
            for part in [part for part in PARTS if part in parts and part in self.away]:
                places = self.away[part]
                while places:
                    num_bytes += _to_device(places[-1])
                    places.pop()
                del self.away[part]
        finally:
            this_machine().wait()  # the copies read host memory that another offload may overwrite
        move = HostMove(num_bytes=num_bytes, seconds=time.perf_counter() - begin)
        self.onloaded = self.onloaded.then(move)
        return move

    def forget_gradients(self) -> None:
        """Forget the copy of the gradients on the host, because the gradients are no longer needed."""
        self.away.pop("gradients", None)

    def num_bytes(self) -> dict[str, int]:
        """Bytes of every part that is on the host."""
        return {part: sum(place.host.numel() for place in places) for part, places in self.away.items()}

    def _tensors(self, part: Part) -> Iterator[Tensor]:
        model = self.built.model
        if part == "weights":
            yield from model.parameters()
            yield from model.buffers()
        elif part == "gradients":
            for parameter in model.parameters():
                if parameter.grad is not None:
                    yield parameter.grad
        else:
            for optimizer in self.built.optimizers.optimizers:
                for state in optimizer.state.values():
                    yield from (value for value in state.values() if isinstance(value, Tensor))

    def drop_gathered_weights(self) -> None:
        """Free the weights that FSDP keeps gathered for the next call. The modules' parameters are then the shards."""
        for module in self.built.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _make_buffer(self, part: Part, storages: Sequence[torch.UntypedStorage]) -> float:
        """Make host memory for the storages, unless the part already has a buffer that is large enough. Returns the seconds that this took."""
        begin = time.perf_counter()
        size = sum(_aligned(storage.nbytes()) for storage in storages)
        if part not in self.buffers or self.buffers[part].numel() < size:
            self.buffers.pop(part, None)  # frees the former buffer before the new one is made
            self.buffers[part] = this_machine().host_buffer(size)
        return time.perf_counter() - begin


def _distinct(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """The storages of the tensors on the device. Each storage appears once, although FSDP puts several gradients into one storage."""
    found = {}
    for tensor in tensors:
        shard = local(tensor.detach())
        storage = shard.untyped_storage()
        if shard.device == device and storage.nbytes():
            found[storage.data_ptr()] = storage
    return list(found.values())


def _places(storages: Sequence[torch.UntypedStorage], buffer: Tensor) -> list[Place]:
    places = []
    offset = 0
    for storage in storages:
        places.append(Place(storage=storage, host=buffer[offset : offset + storage.nbytes()]))
        offset += _aligned(storage.nbytes())
    return places


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _to_host(places: Sequence[Place]) -> int:
    """Copy the storages to the host, and then resize them to 0 bytes. Returns the number of copied bytes."""
    for place in places:
        place.host.copy_(_bytes_of(place.storage), non_blocking=True)
    this_machine().wait()
    for place in places:
        place.storage.resize_(0)
    return sum(place.host.numel() for place in places)


def _to_device(place: Place) -> int:
    """Begin to copy a storage back to the device. Returns the number of bytes."""
    place.storage.resize_(place.host.numel())
    _bytes_of(place.storage).copy_(place.host, non_blocking=True)
    return place.host.numel()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All bytes of a storage, as a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
