"""Reads a version from a trainer's slots by WeightsConfig.path, with "auto" by a possible path."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from rl_actors.transports import cuda_ipc, point_to_point, tcp
from rl_actors.transports.base import Manifest, OpenVersion, Piece, Source, assemble
from rl_actors.transports.slots import MAPPINGS, MappedSlot, SlotLayout, actor_name, host_id

RECEIVED = {"tcp": tcp.received, "point_to_point": point_to_point.received}
"""By path."""
CONFIG = "the config says so"


class ReadableSlot(Protocol):
    """A MappedSlot or a ReceivedSlot."""

    layout: SlotLayout
    views: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSource(Source):
    """path: WeightsConfig.path. secret: signs requests to the ranks' servers."""

    manifest: Manifest
    path: str
    timeout: float
    secret: bytes = field(default=b"", repr=False)

    @contextmanager
    def open(self) -> Iterator[OpenVersion]:
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
            yield OpenSlots(manifest=self.manifest, timeout=self.timeout, slots=slots, path=path, reason=reason)

    def _map(self) -> tuple[list[MappedSlot], str]:
        """(mapped slots, reason). Empty if the config asks for a served path, or says "auto" and
        mapping is impossible. Raises ValueError if it asks for mapping, which is impossible.
        """
        if self.path in RECEIVED:
            return [], CONFIG
        here = host_id()
        reason = ""
        for address in self.manifest.parts:
            if address.host_id != here:
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
        elsewhere = any(address.host_id != host_id() for address in self.manifest.parts)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSlots(OpenVersion):
    """An open version in slots, which do not change while it is open."""

    manifest: Manifest
    timeout: float
    slots: Sequence[ReadableSlot]
    path: str
    reason: str

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """A view if one rank holds the whole tensor, else a new tensor."""
        for name, pieces in self.pieces():
            yield name, assemble(name, *self.manifest.tensors[name], pieces)

    def pieces(self) -> Iterator[tuple[str, list[Piece]]]:
        # keep one replica of each part
        pieces: dict[str, dict[tuple[int, ...], Piece]] = defaultdict(dict)
        for slot in self.slots:
            for name, shard in slot.layout.shards.items():
                pieces[name].setdefault(shard.start, Piece(shard.start, slot.views[name]))
        deadline = time.monotonic() + self.timeout
        for name in self.manifest.tensors:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"pull of {self.manifest.key}: {actor_name()}: {name} was not read within {self.timeout:g} s"
                )
            yield name, list(pieces[name].values())
