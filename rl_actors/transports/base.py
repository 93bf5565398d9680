"""`Transport` brings weights from a trainer's ranks to generators.

Every rank puts its shards, then rank 0 writes the manifest. Generators read only tensors that a
manifest lists, so they never see a half-pushed version.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from rl_actors.finite import require_finite
from rl_actors.processes.races import awaited

if TYPE_CHECKING:
    from rl_actors.transports.slots import SlotAddress

POLL_SECONDS = 0.05
INDEX_TIMEOUT = 60.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes in which generators may compute, widest first."""
LOAD_TIMEOUT = 600.0
"""Source.timeout in seconds, for transports without a setting."""

Value = TypeVar("Value")


class Gather(Protocol):
    """All-gather of one value per rank."""

    def __call__(self, value: Value, /) -> list[Value]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Names, shapes and dtypes of the tensors of one published version.

    A stream is a sequence of versions in one dtype, each trained from the one before. Loading a
    checkpoint begins a new stream.
    """

    stream: str
    version: int
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape, dtype)
    parts: tuple["SlotAddress", ...] = ()  # slots that hold the tensors, if any

    @property
    def key(self) -> str:
        return f"{self.stream}/{self.version}"

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for name, (shape, _) in self.tensors.items()}

    @property
    def num_bytes(self) -> int:
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor, in memory that this process can address."""

    start: tuple[int, ...]  # offset of the part in the whole tensor
    values: Tensor

    @property
    def region(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.values.shape, strict=True))


class OpenVersion(ABC):
    """A version that a reader has opened: whole tensors, even if the ranks published shards.

    They may be views, valid only while the version is open, and may be on a trainer's GPU.
    """

    path: str
    """How the bytes come to this process, such as "shared_memory" or "tcp"."""
    reason: str

    @property
    @abstractmethod
    def manifest(self) -> Manifest: ...

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) one at a time, in the order of the manifest."""

    def pieces(self) -> Iterator[tuple[str, list[Piece]]]:
        """(name, pieces that cover the tensor), one tensor at a time. Pieces may be on a GPU."""
        for name, tensor in self.tensors():
            yield name, [Piece((0,) * tensor.ndim, tensor)]


class Source(ABC):
    """A picklable description of where one version's tensors are."""

    timeout: float
    """Seconds for opening the version, and again for loading it."""

    @property
    @abstractmethod
    def manifest(self) -> Manifest: ...

    @abstractmethod
    def open(self) -> AbstractContextManager[OpenVersion]:
        """Open the version for as long as the context lasts."""


@dataclass(frozen=True, slots=True)
class LoadedTensors(Source, OpenVersion):
    loaded: Mapping[str, Tensor]
    stream: str = "tensors"
    version: int = 0
    timeout: float = LOAD_TIMEOUT
    path: str = "memory"
    reason: str = "the reader was given the tensors"

    @property
    def manifest(self) -> Manifest:
        tensors = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.loaded.items()}
        return Manifest(stream=self.stream, version=self.version, tensors=tensors)

    def open(self) -> AbstractContextManager[OpenVersion]:
        return nullcontext(self)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.loaded.items()


class Transport(ABC):
    """A picklable handle to a store of weights. Only its maker calls `open` and `close`."""

    training_bytes = 0
    """Estimated peak GPU bytes of training; slots may take the rest."""
    kind: str = "other"
    """Where the tensors of a version are, as the metrics of a push name it."""
    _is_open_here = False
    """This process has called `open`; a copy in another process must not close."""

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_is_open_here": False}

    async def open(self) -> None:  # noqa: B027  (a transport may need none)
        """Start the transport's processes or create its directories."""

    async def close(self) -> None:  # noqa: B027
        """Undo `open`."""

    async def death(self, silent_after: float) -> str:
        """Wait until a process of `open` has ended or been silent for silent_after seconds, if
        there is one. Returns a text that names it.
        """
        return await asyncio.get_running_loop().create_future()

    @abstractmethod
    async def put_tensors(
        self, key: str, tensors: Mapping[str, Tensor], rank: int, dtype: torch.dtype | None = None
    ) -> "SlotAddress | None":
        """Put this rank's shard of every DTensor, and every plain tensor as a whole.

        dtype: of the floating-point tensors in this version; None keeps their own.
        """

    async def discard_tensors(self, key: str, rank: int) -> None:  # noqa: B027
        """Discard what put_tensors has put under this key, after a failed put."""

    @abstractmethod
    async def source(self, manifest: Manifest) -> Source:
        """Where the version's tensors are, for the processes of a generator's engine."""

    @abstractmethod
    async def put_object(self, key: str, value: object) -> None:
        """Put a small picklable value, atomically."""

    @abstractmethod
    async def get_object(self, key: str) -> object | None:
        """The value of a key, None if it has none."""

    @abstractmethod
    async def delete(self, manifest: Manifest) -> None:
        """Remove the tensors of a version."""


async def announce(transport: Transport, dtype: str) -> None:
    """Announce a generator that will pull in this dtype."""
    await transport.put_object(f"generators/{dtype}", True)


async def transfer_dtype(transport: Transport) -> torch.dtype:
    """The dtype of a push: the widest that a generator has announced, float32 if none has."""
    for name, dtype in DTYPES.items():
        if await transport.get_object(f"generators/{name}"):
            return dtype
    return torch.float32


async def publish(
    transport: Transport,
    tensors: Mapping[str, Tensor],
    *,
    stream: str,
    version: int,
    rank: int,
    gather: Gather,
    dtype: torch.dtype | None = None,
) -> Manifest:
    """Publish a version and return its manifest. A collective. dtype: as in `put_tensors`.

    Raises NonFiniteError on every rank, before any put, if a tensor is not finite. If a rank fails,
    no manifest is written: it raises its own error, the others RuntimeError naming it.
    """
    require_finite(f"push of version {version}", tensors, gather)
    key = f"{stream}/{version}"
    shapes = {name: (tuple(tensor.shape), published_dtype(tensor, dtype)) for name, tensor in tensors.items()}
    try:
        parts = await _on_all_ranks(transport.put_tensors(key, tensors, rank, dtype), version, gather)
    except Exception:
        await transport.discard_tensors(key, rank)
        raise
    everywhere: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for of_rank in gather(shapes):  # pipeline stages have different tensors
        everywhere |= of_rank
    addresses = tuple(part for part in parts if part is not None)
    manifest = Manifest(stream=stream, version=version, tensors=everywhere, parts=addresses)
    await _on_all_ranks(_commit(transport, manifest, rank), version, gather)
    return manifest


def published_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """`dtype`, or the tensor's own dtype if that is None or the tensor is not floating point."""
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


async def _commit(transport: Transport, manifest: Manifest, rank: int) -> None:
    if rank == 0:
        what = f"push of version {manifest.version}: commit by rank 0"
        await with_timeout(INDEX_TIMEOUT, transport.put_object(f"{manifest.key}/manifest", manifest), what)
        await with_timeout(INDEX_TIMEOUT, transport.put_object("latest", (manifest.stream, manifest.version)), what)


async def with_timeout(timeout: float, work: Awaitable[Value], what: str) -> Value:
    """Raises TimeoutError naming `what` after `timeout` seconds."""
    try:
        return await asyncio.wait_for(awaited(work), timeout)
    except TimeoutError as error:
        if str(error):  # raised by the work itself
            raise
        raise TimeoutError(f"{what} was not done within {timeout:g} s") from None


async def _on_all_ranks(work: Awaitable[Value], version: int, gather: Gather) -> list[Value | None]:
    """The results of all ranks. Raises on every rank if one failed."""
    result: Value | None = None
    failure: Exception | None = None
    try:
        result = await work
    except Exception as error:
        failure = error
    answers = gather((result, repr(failure) if failure else ""))
    failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
    if failures:
        raise failure or RuntimeError(f"push of version {version} failed: {'; '.join(failures)}")
    return [of_rank for of_rank, _ in answers]


async def wait_for_manifest(transport: Transport, version: int, timeout: float) -> Manifest:
    """Wait until `version` of the newest stream is published. Raises TimeoutError."""
    deadline = time.monotonic() + timeout
    what = f"pull of version {version}: question to the index"
    while True:
        newest = "nothing was published yet"
        latest = await with_timeout(INDEX_TIMEOUT, transport.get_object("latest"), what)
        if isinstance(latest, tuple):
            stream, newest_version = latest
            manifest = await with_timeout(INDEX_TIMEOUT, transport.get_object(f"{stream}/{version}/manifest"), what)
            if isinstance(manifest, Manifest):
                return manifest
            newest = f"the newest is {newest_version}"
        if time.monotonic() > deadline:
            raise TimeoutError(f"pull: version {version} was not published within {timeout:g} s; {newest}")
        await asyncio.sleep(POLL_SECONDS)


def local_shard(tensor: Tensor, dtype: torch.dtype | None) -> Piece:
    """This rank's part on the CPU, in the published dtype."""
    # half a second that clients need not pay
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    where = {"device": "cpu", "dtype": published_dtype(tensor, dtype)}
    if not isinstance(tensor, DTensor):
        return Piece((0,) * tensor.ndim, tensor.detach().to(**where))
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Piece(tuple(offset), tensor.to_local().detach().to(**where))


def assemble(name: str, shape: tuple[int, ...], dtype: torch.dtype, pieces: Collection[Piece]) -> Tensor:
    """A view if one piece is the whole. Raises RuntimeError if the pieces do not cover the tensor."""
    whole = torch.empty(shape, dtype=dtype)
    for piece in pieces:
        if piece.values.shape == shape:
            return piece.values
        whole[piece.region] = piece.values
    covered = sum(piece.values.numel() for piece in pieces)
    if covered != whole.numel():
        raise RuntimeError(f"{name}: the shards hold {covered} of {whole.numel()} values")
    return whole
