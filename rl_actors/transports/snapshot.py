"""The versions that one rank of a trainer holds for its readers: a layout that is made once, and two slots that are written in turn."""

import time
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_actors.transports.base import published_dtype
from rl_actors.transports.slots import ALIGNMENT, Layout, Shard, Slot, actor_name

NUM_SLOTS = 2


class Snapshot:
    """One rank's part of the newest two versions.

    A write goes into the slot of the older version. The other slot keeps the newer one, so a push that fails loses no version but the
    older. Both slots have the same layout. If the tensors of a write need another one, the snapshot gets new slots. The former ones stay
    until a version is in a new slot.
    """

    def __init__(self, *, rank: int, timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        self.plan = Plan()
        self.slots: list[Slot] = []
        self.former: list[Slot] = []  # slots of another layout
        self.newest: Slot | None = None

    def write(self, key: str, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Slot:
        """Copy this rank's parts of the tensors into the older slot, cast to `dtype` if it is given.

        Raises TimeoutError if readers hold the slot, or if the copy takes longer than the timeout.
        """
        layout = self.plan.layout(tensors, dtype)
        if self.slots and self.slots[0].layout is not layout:
            self.former, self.slots = self.slots, []
        slot = self._older_slot(layout)
        deadline = time.monotonic() + self.timeout
        with slot.writing(key, self.timeout):
            for name, tensor in tensors.items():
                if name in slot.views:
                    slot.views[name].copy_(local_part(tensor))
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"push of {key}: {actor_name()}, rank {self.rank}: write took longer than {self.timeout:g} s"
                    )
        self.newest = slot
        if len(self.slots) == NUM_SLOTS:
            self.former = []
        return slot

    def forget(self, key: str) -> None:
        """A write whose version was not published. The next write takes the same slot again, so that the last published version stays."""
        if self.newest is not None and self.newest.key == key:
            others = [slot for slot in self.slots if slot is not self.newest and slot.key]
            self.newest = others[0] if others else None

    def _older_slot(self, layout: Layout) -> Slot:
        """A slot that does not hold the newest version. The first two writes make one each."""
        for slot in self.slots:
            if slot is not self.newest:
                return slot
        slot = Slot(layout, rank=self.rank, number=len(self.slots))
        self.slots.append(slot)
        return slot


class Plan:
    """Which part of every tensor this rank holds, and its place in a slot. It is made at the first write and kept while the tensors stay."""

    def __init__(self) -> None:
        self._made_for: dict[str, tuple[object, ...]] = {}
        self._layout: Layout | None = None

    def layout(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Layout:
        """The layout for these tensors. The same object is returned as long as nothing about the tensors but their values changes."""
        wanted = {name: _described(tensor, dtype) for name, tensor in tensors.items()}
        if self._layout is None or wanted != self._made_for:
            self._layout, self._made_for = make_layout(tensors, dtype), wanted
        return self._layout


def _described(tensor: Tensor, dtype: torch.dtype | None) -> tuple[object, ...]:
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.dtype, dtype, tensor.placements, tensor.device_mesh
    return tensor.shape, tensor.dtype, dtype


def make_layout(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Layout:
    """The places of this rank's parts in a slot. Of several replicas the first one holds a part; the others leave it out."""
    shards: dict[str, Shard] = {}
    offset = 0
    for name, tensor in tensors.items():
        size, start = tuple(tensor.shape), (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            if not _is_first_replica(tensor):
                continue
            size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        shard = Shard(tuple(tensor.shape), tuple(start), tuple(size), published_dtype(tensor, dtype), offset)
        if shard.num_bytes == 0:  # an uneven division leaves nothing to the last ranks
            continue
        shards[name] = shard
        offset += -(-shard.num_bytes // ALIGNMENT) * ALIGNMENT
    return Layout(shards, offset)


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _is_first_replica(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    pairs = zip(coordinate, tensor.placements, strict=True)
    return all(position == 0 for position, placement in pairs if placement.is_replicate())
