"""Reads a version of the weights from the slots of a trainer's ranks, by WeightsConfig.path or,
with "auto", by a path that is possible.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rl_actors.transports import cuda_ipc, point_to_point, tcp
from rl_actors.transports.base import Manifest, OpenVersion, Piece, Source
from rl_actors.transports.slots import MAPPINGS, Layout, MappedSlot, actor_name, machine

RECEIVED = {"tcp": tcp.received, "point_to_point": point_to_point.received}
"""By path."""
CONFIG = "the config says so"


class ReadableSlot(Protocol):
    """A MappedSlot or a ReceivedSlot."""

    layout: Layout
    views: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSource(Source):
    """The Source of a version in slots. path: WeightsConfig.path. secret: signs requests to the
    ranks' servers.
    """

    manifest: Manifest
    path: str
    timeout: float
    secret: bytes = field(default=b"", repr=False)

    @property
    def key(self) -> str:
        return self.manifest.key

    def open(self) -> AbstractContextManager[OpenVersion]:
        return self._open()

    @contextmanager
    def _open(self) -> Iterator[OpenVersion]:
        with ExitStack() as stack:
            slots: Sequence[ReadableSlot]
            mapped, reason = self._map()
            if mapped:
                path = "cuda_ipc" if mapped[0].on_gpu is not None else "shared_memory"
                for slot in mapped:
                    stack.enter_context(slot.reading(self.manifest.key, self.timeout))
                slots = mapped
            else:
                self._require_servers(reason)
                path, reason = self._served_path(reason)
                receive = RECEIVED[path]
                reading = receive(self.manifest.parts, self.manifest.key, secret=self.secret, timeout=self.timeout)
                slots = stack.enter_context(reading)
            # before the slots are unlocked, because a GPU may still copy out of them
            stack.enter_context(cuda_ipc.copies_end())
            yield OpenSlots(self, slots, path, reason)

    def _map(self) -> tuple[list[MappedSlot], str]:
        """(mapped slots, reason). Empty if the config asks for a served path, or says "auto" and
        mapping is impossible.

        Raises ValueError if the config asks for shared_memory or cuda_ipc and mapping is
        impossible.
        """
        if self.path in RECEIVED:
            return [], CONFIG
        here = machine()
        reason = ""
        for address in self.manifest.parts:
            if address.machine != here:
                reason = f"{address} is on another host or in another container than {actor_name()}"
        if not reason:
            try:
                return MAPPINGS.of(self.manifest.parts), "the trainer is on this host"
            except PermissionError as error:
                reason = f"{actor_name()} may not open the memory of the trainer: {error}"
                if any(address.handle for address in self.manifest.parts):
                    reason += '; weights.path="shared_memory" would be faster than tcp'
        if self.path in ("shared_memory", "cuda_ipc"):
            raise ValueError(f'weights.path="{self.path}": {reason}')
        return [], reason

    def _served_path(self, reason: str) -> tuple[str, str]:
        """(path by which the ranks' servers send the slots, reason)."""
        backend = point_to_point.backend_for(self.manifest.parts)
        if self.path == "point_to_point":
            return self.path, f"{reason}, by {backend}"
        elsewhere = any(address.machine != machine() for address in self.manifest.parts)
        if self.path == "auto" and elsewhere and backend == "nccl":
            return "point_to_point", f"{reason}, and both have GPUs"
        return "tcp", reason

    def _require_servers(self, reason: str) -> None:
        for address in self.manifest.parts:
            if address.address is None:
                raise ValueError(
                    f"{reason}, and no server of the trainer sends {address}: set weights.address to an address of the "
                    "trainer's host that the generators reach"
                )


class OpenSlots(OpenVersion):
    """An open version in slots, which do not change while it is open."""

    def __init__(self, source: SlotSource, slots: Sequence[ReadableSlot], path: str, reason: str) -> None:
        self.manifest = source.manifest
        self.timeout = source.timeout
        self.path = path
        self.reason = reason
        # keep one replica of each part
        self._pieces: Mapping[str, dict[tuple[int, ...], Piece]] = defaultdict(dict)
        for slot in slots:
            for name, shard in slot.layout.shards.items():
                self._pieces[name].setdefault(shard.start, Piece(shard.start, slot.views[name]))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.manifest.shapes

    @property
    def num_bytes(self) -> int:
        return self.manifest.num_bytes

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) one at a time: a view if one rank holds the whole tensor, else a new
        tensor.
        """
        for name, pieces in self.pieces():
            shape, dtype = self.manifest.tensors[name]
            yield name, whole(name, shape, dtype, pieces)

    def pieces(self) -> Iterator[tuple[str, list[Piece]]]:
        deadline = time.monotonic() + self.timeout
        for name in self.manifest.tensors:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"pull of {self.manifest.key}: {actor_name()}: {name} was not read within {self.timeout:g} s"
                )
            yield name, list(self._pieces[name].values())


def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype, pieces: list[Piece]) -> Tensor:
    """Raises RuntimeError if the pieces do not cover the tensor."""
    if len(pieces) == 1 and pieces[0].values.shape == shape:
        return pieces[0].values
    tensor = torch.empty(shape, dtype=dtype)
    covered = 0
    for piece in pieces:
        tensor[piece.region] = piece.values
        covered += piece.values.numel()
    if covered != tensor.numel():
        raise RuntimeError(f"{name}: the slots hold {covered} of {tensor.numel()} values")
    return tensor
