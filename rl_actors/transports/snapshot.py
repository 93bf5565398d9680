"""`DoubleBuffer`: the memory in which a trainer's rank keeps its newest weights for readers."""

import itertools
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_actors.processes.threads import one_thread
from rl_actors.transports import cuda_ipc
from rl_actors.transports.base import published_dtype
from rl_actors.transports.placement import Place
from rl_actors.transports.slots import ALIGNMENT, Shard, Slot, SlotLayout, actor_name


class DoubleBuffer:
    """At most two slots, written in turn, so that the newest version is always readable, also after
    a failed write or while a changed layout replaces them. A single slot is overwritten.
    """

    def __init__(
        self, *, rank: int, timeout: float, choose_place: Callable[[int, torch.device], Place] | None = None
    ) -> None:
        """timeout: seconds of a write, including the wait for the slot's readers.
        choose_place: (bytes of a slot, device of the weights) -> place; None: the host's memory.
        """
        self.rank = rank
        self.timeout = timeout
        self.choose_place = choose_place or _on_the_host
        self.place = Place()  # of the newest layout's slots
        self.layout: SlotLayout | None = None  # of the newest write
        self.layout_made_for: dict[str, tuple[object, ...]] = {}
        self.slots: list[Slot] = []
        self.newest: Slot | None = None  # of the newest version
        self.before: Slot | None = None  # of the version before; `forget` goes back to it

    def write(self, key: str, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Slot:
        """Copy this rank's parts, cast to `dtype` if given, into the older slot."""
        slot = self._slot_for(self._layout_for(tensors, dtype), _device(tensors), key)
        deadline = time.monotonic() + self.timeout
        with slot.writing(key, self.timeout), cuda_ipc.copies_end(), one_thread():
            for name, tensor in tensors.items():
                if name in slot.views:
                    slot.views[name].copy_(local_part(tensor), non_blocking=True)
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"push of {key}: {actor_name()}, rank {self.rank}: write took longer than {self.timeout:g} s"
                    )
        self.before = self.newest
        self.newest = slot
        return slot

    def forget(self, key: str) -> None:
        """Undo a write whose version was not published. A single slot has lost the former version."""
        if self.newest is not None and self.newest.key == key:
            self.newest = self.before

    def find(self, token: bytes) -> Slot | None:
        """None if the slot was dropped."""
        return next((slot for slot in self.slots if slot.token == token), None)

    def _layout_for(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> SlotLayout:
        """The same object as long as only values change."""
        wanted = {name: _described(tensor, dtype) for name, tensor in tensors.items()}
        if self.layout is None or wanted != self.layout_made_for:
            self.layout = make_layout(tensors, dtype)
            self.layout_made_for = wanted
        return self.layout

    def _slot_for(self, layout: SlotLayout, device: torch.device, key: str) -> Slot:
        """The next write's slot. Drops those of a former layout but the newest version's."""
        alike = [slot for slot in self.slots if slot.layout is layout or slot.layout == layout]
        for slot in [*self.slots]:
            if slot not in alike and slot is not self.newest:
                slot.end(key, self.timeout)
                self.slots.remove(slot)
        for slot in alike:
            if slot is not self.newest or self.place.num_slots == 1:
                return slot
        if not alike:
            self.place = self.choose_place(layout.num_bytes, device)
        taken = {slot.number for slot in self.slots}
        number = next(number for number in itertools.count() if number not in taken)
        slot = Slot(layout, rank=self.rank, number=number, place=self.place, device=device)
        self.slots.append(slot)
        return slot


def _described(tensor: Tensor, dtype: torch.dtype | None) -> tuple[object, ...]:
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.dtype, dtype, tensor.placements, tensor.device_mesh
    return tensor.shape, tensor.dtype, dtype


def make_layout(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> SlotLayout:
    """The layout of this rank's slot. Only the first replica of a part has it."""
    shards: dict[str, Shard] = {}
    offset = 0
    for name, tensor in tensors.items():
        size = tuple(tensor.shape)
        start = (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            if not _is_first_replica(tensor):
                continue
            size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        shard = Shard(tuple(tensor.shape), tuple(start), tuple(size), published_dtype(tensor, dtype), offset)
        if shard.num_bytes == 0:  # uneven sharding may leave the last ranks nothing
            continue
        shards[name] = shard
        offset += -(-shard.num_bytes // ALIGNMENT) * ALIGNMENT
    return SlotLayout(shards, offset)


def _on_the_host(num_bytes: int, device: torch.device) -> Place:
    return Place(pinned=device.type == "cuda", reason="the host's memory")


def _device(tensors: Mapping[str, Tensor]) -> torch.device:
    return next((local_part(tensor).device for tensor in tensors.values()), torch.device("cpu"))


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _is_first_replica(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    pairs = zip(coordinate, tensor.placements, strict=True)
    return all(position == 0 for position, placement in pairs if placement.is_replicate())
