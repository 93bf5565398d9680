"""Moves weights, gradients and optimizer state of a rank to host memory and back, bit for bit.

Storages are resized to 0 bytes and back, so views (DTensors' local tensors, FSDP's shards) and
parameters, which are the keys of the optimizer's state, stay valid.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rl_actors.engine.build import BuiltModel
from rl_actors.engine.gpu import this_machine
from rl_actors.engine.gradients import local
from rl_actors.parts import PARTS, HostMove, Part

ALIGNMENT = 512  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A storage on the device, and host memory for its bytes."""

    storage: torch.UntypedStorage
    host: Tensor  # uint8


class Offload:
    """The parts of a trainer on the device or the host."""

    def __init__(self, built: BuiltModel) -> None:
        self.built = built
        self.buffers: dict[Part, Tensor] = {}  # kept for later offloads
        self.away: dict[Part, list[Place]] = {}  # the parts on the host
        # totals since the trainer was built
        self.offloaded = HostMove()
        self.onloaded = HostMove()

    def offload(self, parts: Collection[Part] = PARTS) -> HostMove:
        """Copy the parts to the host, and free them on the device. Parts on the host stay."""
        begin = time.perf_counter()
        num_bytes = 0
        buffer_seconds = 0.0
        this_machine().wait()  # FSDP's streams may still read weights or write gradients
        wanted = [part for part in PARTS if part in parts and part not in self.away]
        if "weights" in wanted:
            drop_gathered_weights(self.built.model)
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
        """Bring the parts back. After torch's error for too little memory, call again for the rest."""
        if not any(part in self.away for part in parts):
            return HostMove()
        begin = time.perf_counter()
        num_bytes = 0
        this_machine().release_memory()  # torch's cached blocks may not fit the storages
        try:
            for part in [part for part in PARTS if part in parts and part in self.away]:
                places = self.away[part]
                while places:
                    num_bytes += _to_device(places[-1])
                    places.pop()
                del self.away[part]
        finally:
            this_machine().wait()  # another offload may overwrite the copied host memory
        move = HostMove(num_bytes=num_bytes, seconds=time.perf_counter() - begin)
        self.onloaded = self.onloaded.then(move)
        return move

    def forget_gradients(self) -> None:
        """Drop the host's copy of the gradients."""
        self.away.pop("gradients", None)

    def num_bytes(self) -> dict[str, int]:
        """Bytes of each part on the host."""
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

    def _make_buffer(self, part: Part, storages: Sequence[torch.UntypedStorage]) -> float:
        """Make host memory for the storages if the part's is too small. Returns the seconds."""
        begin = time.perf_counter()
        size = sum(_aligned(storage.nbytes()) for storage in storages)
        if part not in self.buffers or self.buffers[part].numel() < size:
            self.buffers.pop(part, None)  # frees the former one first
            self.buffers[part] = this_machine().host_buffer(size)
        return time.perf_counter() - begin


def drop_gathered_weights(model: nn.Module) -> None:
    """Free weights that FSDP keeps gathered; the parameters are then the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _distinct(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """The tensors' storages on the device, each once: FSDP puts several gradients into one."""
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
    """Copy the storages to the host, and resize them to 0. Returns the bytes."""
    for place in places:
        place.host.copy_(_bytes_of(place.storage), non_blocking=True)
    this_machine().wait()
    for place in places:
        place.storage.resize_(0)
    return sum(place.host.numel() for place in places)


def _to_device(place: Place) -> int:
    """Begin to copy a storage back. Returns the bytes."""
    place.storage.resize_(place.host.numel())
    _bytes_of(place.storage).copy_(place.host, non_blocking=True)
    return place.host.numel()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """A storage's bytes, as a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
