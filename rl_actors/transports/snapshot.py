"""The memory in which one rank of a trainer keeps its newest weights, so that generators can read them.

The memory consists of at most two slots. A slot holds this rank's part of one version of the weights. Writes alternate between the slots.
The layout of a slot gives the offset of every tensor in the slot. The layout is computed at the first write. It is computed again only if the
names, shapes, dtypes or shardings of the tensors change.
"""

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
from rl_actors.transports.slots import ALIGNMENT, Layout, Shard, Slot, actor_name


class Snapshot:
    """One rank's part of the newest two versions.

    A write goes into the slot of the older version. If the memory has room for only one slot, that slot is overwritten. If there are two
    slots, a write that fails loses only the older version. Both slots have the same layout, except after a change of the layout. Then the first
    write replaces the slot of the older version by a slot of the new layout, and the next write replaces the other slot. So with two slots the
    newest version is readable at any time.
    """

    def __init__(
        self, *, rank: int, timeout: float, choose_place: Callable[[int, torch.device], Place] | None = None
    ) -> None:
        """timeout: seconds that a write may take, including the wait for readers of the slot.

        choose_place: a function that takes the size of one slot in bytes and the device of the weights, and returns where to make the slots. None: the
        slots are in the host's memory.
        """
        self.rank, self.timeout = rank, timeout
        self.choose_place = choose_place or _on_the_host
        self.place = Place()  # where the slots of the newest layout are
        self.plan = Plan()
        self.slots: list[Slot] = []
        self.newest: Slot | None = None  # slot of the newest version
        self.before: Slot | None = None  # slot of the version before the newest; `forget` goes back to it

    def write(self, key: str, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Slot:
        """Copy this rank's parts of the tensors into the slot of the older version, cast to `dtype` if it is given.

        Raises TimeoutError if the wait for readers of the slot and the copy together take longer than the timeout.
        """
        layout = self.plan.layout(tensors, dtype)
        slot = self._slot_for(layout, _device(tensors), key)
        deadline = time.monotonic() + self.timeout
        with slot.writing(key, self.timeout), cuda_ipc.copies_end(), one_thread():
            for name, tensor in tensors.items():
                if name in slot.views:
                    slot.views[name].copy_(local_part(tensor), non_blocking=True)
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"push of {key}: {actor_name()}, rank {self.rank}: write took longer than {self.timeout:g} s"
                    )
        self.before, self.newest = self.newest, slot
        return slot

    def forget(self, key: str) -> None:
        """Undo a write whose version was not published because another rank failed.

        The version before that write is then the newest again, unless the write has overwritten it in the only slot.
        """
        if self.newest is not None and self.newest.key == key:
            self.newest = self.before

    def find(self, token: bytes) -> Slot | None:
        """The slot with this token. None if the slot has been dropped."""
        return next((slot for slot in self.slots if slot.token == token), None)

    def _slot_for(self, layout: Layout, device: torch.device, key: str) -> Slot:
        """The slot for the next write. If there are two slots of this layout, it is the slot that does not hold the newest version.

        Makes a new slot if this layout has fewer slots than it may have (Place.num_slots). Drops each slot of a former layout, unless the slot
        holds the newest version.
        """
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


class Plan:
    """The part of every tensor that this rank holds, and the offset of that part in a slot.

    The plan is made at the first write, and again if the names, shapes, dtypes or shardings of the tensors change.
    """

    def __init__(self) -> None:
        self._made_for: dict[str, tuple[object, ...]] = {}
        self._layout: Layout | None = None

    def layout(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Layout:
        """The layout for these tensors. The same object is returned as long as only the values of the tensors change."""
        wanted = {name: _described(tensor, dtype) for name, tensor in tensors.items()}
        if self._layout is None or wanted != self._made_for:
            self._layout, self._made_for = make_layout(tensors, dtype), wanted
        return self._layout


def _described(tensor: Tensor, dtype: torch.dtype | None) -> tuple[object, ...]:
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.dtype, dtype, tensor.placements, tensor.device_mesh
    return tensor.shape, tensor.dtype, dtype


def make_layout(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Layout:
    """The layout of this rank's slot. If several replicas hold the same part of a tensor, only the first replica has the part in its slot."""
    shards: dict[str, Shard] = {}
    offset = 0
    for name, tensor in tensors.items():
        size, start = tuple(tensor.shape), (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            if not _is_first_replica(tensor):
                continue
            size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        shard = Shard(tuple(tensor.shape), tuple(start), tuple(size), published_dtype(tensor, dtype), offset)
        if shard.num_bytes == 0:  # if a dimension does not divide evenly, the last ranks may hold nothing
            continue
        shards[name] = shard
        offset += -(-shard.num_bytes // ALIGNMENT) * ALIGNMENT
    return Layout(shards, offset)


def _on_the_host(num_bytes: int, device: torch.device) -> Place:
    return Place(pinned=device.type == "cuda", reason="the host's memory")


def _device(tensors: Mapping[str, Tensor]) -> torch.device:
    """The device of the weights."""
    return next((local_part(tensor).device for tensor in tensors.values()), torch.device("cpu"))


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _is_first_replica(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    pairs = zip(coordinate, tensor.placements, strict=True)
    return all(position == 0 for position, placement in pairs if placement.is_replicate())
