"""The versions that one rank of a trainer holds for its readers: a layout that is made once, and two slots that are written in turn."""

import itertools
import time
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_actors.transports.base import published_dtype
from rl_actors.transports.slots import ALIGNMENT, Layout, Shard, Slot, actor_name


class Snapshot:
    """One rank's part of the newest two versions.

    A write goes into the slot of the older version, so a push that fails costs no version but the older. Both slots have the same layout. If
    the tensors of a write need another one, the write makes a slot of that layout. Slots of the former layout are dropped when the
    second version of the new one begins.
    """

    def __init__(self, *, rank: int, timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        self.plan = Plan()
        self.slots: list[Slot] = []
        self.newest: Slot | None = None  # slot of the newest version
        self.before: Slot | None = None  # slot of the version before, while the newest may still fail on another rank

    def write(self, key: str, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Slot:
        """Copy this rank's parts of the tensors into the older slot, cast to `dtype` if it is given.

        Raises TimeoutError if readers hold the slot, or if the copy takes longer than the timeout.
        """
        layout = self.plan.layout(tensors, dtype)
        slot = self._slot_for(layout)
        deadline = time.monotonic() + self.timeout
        with slot.writing(key, self.timeout):
            for name, tensor in tensors.items():
                if name in slot.views:
                    slot.views[name].copy_(local_part(tensor))
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"push of {key}: {actor_name()}, rank {self.rank}: write took longer than {self.timeout:g} s"
                    )
        self.before, self.newest = self.newest, slot
        return slot

    def forget(self, key: str) -> None:
        """Drop a write whose version was not published. The version before is the newest again."""
        if self.newest is not None and self.newest.key == key:
            self.newest = self.before

    def find(self, token: bytes) -> Slot | None:
        """The slot with this token, if it is still here."""
        return next((slot for slot in self.slots if slot.token == token), None)

    def _slot_for(self, layout: Layout) -> Slot:
        """A slot of this layout that does not hold the newest version. The first two writes make one each."""
        alike = [slot for slot in self.slots if slot.layout is layout or slot.layout == layout]
        self.slots = [slot for slot in self.slots if slot in alike or slot is self.newest]
        for slot in alike:
            if slot is not self.newest:
                return slot
        taken = {slot.number for slot in self.slots}
        slot = Slot(layout, rank=self.rank, number=next(number for number in itertools.count() if number not in taken))
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
