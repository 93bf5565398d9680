"""Reading a version from the slots of all ranks of a trainer, over the path that reader and trainer share."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_actors.transports.base import Manifest, OpenVersion, Source
from rl_actors.transports.slots import MAPPINGS, Shard, SlotAddress, actor_name, machine


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's part of a tensor, where the reader can see it."""

    shard: Shard
    values: Tensor  # of shard.size


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSource(Source):
    """The slots of one version. `path` is the way of the bytes that the config asks for."""

    manifest: Manifest
    path: str
    timeout: float

    def open(self) -> AbstractContextManager[OpenVersion]:
        return self._open()

    @contextmanager
    def _open(self) -> Iterator[OpenVersion]:
        begin = time.perf_counter()
        path, reason = choose_path(self.path, self.manifest.parts)
        with ExitStack() as stack:
            pieces: dict[str, dict[tuple[int, ...], Piece]] = defaultdict(dict)
            for slot in MAPPINGS.of(self.manifest.parts):
                stack.enter_context(slot.reading(self.manifest.key, self.timeout))
                for name, shard in slot.layout.shards.items():
                    pieces[name].setdefault(shard.start, Piece(shard, slot.views[name]))
            yield OpenSlots(self.manifest, pieces, path, reason, time.perf_counter() - begin, self.timeout)


class OpenSlots(OpenVersion):
    """A version whose slots are locked against their writer."""

    def __init__(
        self,
        manifest: Manifest,
        pieces: dict[str, dict[tuple[int, ...], Piece]],
        path: str,
        reason: str,
        open_seconds: float,
        timeout: float,
    ) -> None:
        self.manifest, self.pieces, self.timeout = manifest, pieces, timeout
        self.path, self.reason, self.open_seconds = path, reason, open_seconds

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """A tensor that one rank holds whole is a view of the slot. Another one is put together when it is its turn."""
        deadline = time.monotonic() + self.timeout
        for name, (shape, dtype) in self.manifest.tensors.items():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"pull of {self.manifest.key}: {actor_name()}: read of {name} came after {self.timeout:g} s"
                )
            yield name, whole(name, shape, dtype, list(self.pieces[name].values()))


def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype, pieces: list[Piece]) -> Tensor:
    """The tensor of these pieces. Raises RuntimeError if they do not cover it."""
    if len(pieces) == 1 and pieces[0].shard.is_whole:
        return pieces[0].values
    tensor = torch.empty(shape, dtype=dtype)
    covered = 0
    for piece in pieces:
        tensor[region(piece.shard)] = piece.values
        covered += piece.values.numel()
    if covered != tensor.numel():
        raise RuntimeError(f"{name}: the slots hold {covered} of {tensor.numel()} values")
    return tensor


def region(shard: Shard) -> tuple[slice, ...]:
    """The place of a part in the whole tensor."""
    return tuple(slice(start, start + size) for start, size in zip(shard.start, shard.size, strict=True))


def choose_path(path: str, addresses: tuple[SlotAddress, ...]) -> tuple[str, str]:
    """(path of the bytes, the reason for it). Raises ValueError if the config forces a path that these two do not share."""
    here = machine()
    others = [address for address in addresses if address.machine != here]
    if not others:
        return "shared_memory", "trainer and generator are on one host" if path == "auto" else "the config says so"
    raise ValueError(f"weights.path={path!r}: {others[0]} is on another host than {actor_name()}")
