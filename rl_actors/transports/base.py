"""A `Transport` brings weights from a trainer's ranks to generators. The functions of this module publish and find versions in a transport.

A version is the weights of one policy_version. It is published in two steps. First every rank puts its shards into the transport. After all
ranks have put their shards, rank 0 writes the manifest, which is the list of the version's tensors. A generator reads only tensors that a
manifest lists, so it never reads a version before all ranks have put their shards. A reader is a process that loads a version, for example a
worker of a generator's vLLM. A subclass of Transport decides where manifests and tensors are. In some transports the tensors are in slots. A
slot is the memory in which one rank keeps its shards of one version.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from rl_actors.finite import require_finite

if TYPE_CHECKING:
    from rl_actors.transports.slots import SlotAddress

POLL_SECONDS = 0.05
INDEX_TIMEOUT = 60.0
"""Seconds in which the store that holds the manifests must answer."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The dtypes in which generators may compute, widest first."""
LOAD_TIMEOUT = 600.0
"""Source.timeout, in seconds, if the transport has no setting for this timeout."""

Value = TypeVar("Value")


class Gather(Protocol):
    """A collective that gives every rank the values of all ranks, in the order of the ranks."""

    def __call__(self, value: Value, /) -> list[Value]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Names, shapes and dtypes of the tensors of one published version.

    A stream is a sequence of versions in one dtype, each trained from the version before it. A trainer that loads a checkpoint of version 6
    begins a new stream, because its next version 7 is not the version 7 of the former stream.
    """

    stream: str
    version: int
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape, dtype)
    parts: tuple["SlotAddress", ...] = ()  # the slots that hold the tensors, if the transport has slots

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
    """A part of a tensor, in memory that the reading process can address."""

    start: tuple[int, ...]  # offset of the part in the whole tensor
    values: Tensor

    @property
    def region(self) -> tuple[slice, ...]:
        """The slices of the whole tensor that this part fills."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.values.shape, strict=True))


class OpenVersion(ABC):
    """A version that a reader has opened. Its tensors are whole, even if the ranks published shards.

    The tensors may be views that are valid only while the version is open. They may be on the GPU of a trainer's rank.
    """

    path: str
    """The way by which the bytes come to this process, such as "shared_memory" or "tcp"."""
    reason: str
    """Why this path was chosen."""

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of all tensors."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) one at a time, in the order of the manifest."""

    def pieces(self) -> Iterator[tuple[str, list[Piece]]]:
        """(name of a tensor, its pieces) one tensor at a time. The pieces cover the tensor. They may be on a GPU."""
        for name, tensor in self.tensors():
            yield name, [Piece((0,) * tensor.ndim, tensor)]


class Source(ABC):
    """A picklable description of where one version's tensors are. A reader receives this description and opens it."""

    timeout: float
    """Seconds that each of two phases may take: opening the version, and then loading it."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Manifest.key of the version."""

    @abstractmethod
    def open(self) -> AbstractContextManager[OpenVersion]:
        """Open the version for as long as the context lasts."""


@dataclass(frozen=True, slots=True)
class LoadedTensors(Source, OpenVersion):
    """A Source that contains the tensors themselves. So this Source is also an open version."""

    loaded: Mapping[str, Tensor]
    key: str = "tensors"
    timeout: float = LOAD_TIMEOUT
    path: str = "memory"
    reason: str = "the reader was given the tensors"

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.loaded.items()}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.loaded.values())

    def open(self) -> AbstractContextManager[OpenVersion]:
        return nullcontext(self)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.loaded.items()


class Transport(ABC):
    """A picklable handle to a store of weights that trainer and generator actors share. `open` and `close` are called only by the
    process that made the transport.
    """

    training_bytes = 0
    """Bytes of a rank's GPU that training takes at its peak, as the trainer estimates them. Slots may take the rest of the GPU's memory."""
    kind: str = "other"
    """Name of the place in which the tensors of a version are. The metrics of a push report this name."""

    async def open(self) -> None:  # noqa: B027  (a transport may need none)
        """Start the processes or create the directories of the transport. Call it once, in the process that made the transport."""

    async def close(self) -> None:  # noqa: B027
        """Stop the processes and remove the directories of `open`."""

    async def death(self, silent_after: float) -> str:
        """Wait until one of the processes of `open` has ended, or has not answered for silent_after seconds. Returns a text that names the process.

        If `open` started no process, this waits for ever.
        """
        return await asyncio.get_running_loop().create_future()

    @abstractmethod
    async def put_tensors(
        self, key: str, tensors: Mapping[str, Tensor], rank: int, dtype: torch.dtype | None = None
    ) -> "SlotAddress | None":
        """Put this rank's shard of every DTensor, and every plain tensor as a whole.

        dtype: dtype of the floating-point tensors in this version. None: each tensor keeps its own dtype.
        Returns the address of the slot that holds the shards, or None if the transport has no slots.
        """

    async def discard_tensors(self, key: str, rank: int) -> None:  # noqa: B027
        """Discard the tensors that put_tensors has put under this key. `publish` calls this if a rank could not put its tensors."""

    @abstractmethod
    async def source(self, manifest: Manifest) -> Source:
        """A description of where the version's tensors are. A generator sends it to the processes of its engine."""

    async def get_tensors(self, manifest: Manifest) -> dict[str, Tensor]:
        """The tensors of a version, whole and on the CPU."""
        source = await self.source(manifest)
        return await asyncio.to_thread(_copies, source)

    @abstractmethod
    async def put_object(self, key: str, value: object) -> None:
        """Put a small picklable value. A reader gets either the former value or the new one, never a mixture."""

    @abstractmethod
    async def get_object(self, key: str) -> object | None:
        """The value of a key, or None if the key has no value."""

    @abstractmethod
    async def delete(self, manifest: Manifest) -> None:
        """Remove the tensors of a version."""


def _copies(source: Source) -> dict[str, Tensor]:
    with source.open() as version:
        return {name: tensor.clone() for name, tensor in version.tensors()}


async def announce(transport: Transport, dtype: str) -> None:
    """Tell the trainer that a generator which computes in this dtype will pull."""
    await transport.put_object(f"generators/{dtype}", True)


async def transfer_dtype(transport: Transport) -> torch.dtype:
    """The dtype of a push: the widest dtype that a generator has announced, or float32 if no generator has announced a dtype."""
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
    """Publish a version. All ranks must call this function together. Returns the version's manifest.

    dtype: dtype of the floating-point tensors in this version. None: each tensor keeps its own dtype.
    If this rank fails, raises its error. If only other ranks fail, raises RuntimeError naming these ranks and their errors. If a rank could
    not put its tensors, no manifest is written, so generators cannot read the version.
    Raises NonFiniteError on every rank, before any rank puts a tensor, if a tensor is not finite.
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
    for of_rank in gather(shapes):  # the stages of a pipeline have different tensors
        everywhere |= of_rank
    addresses = tuple(part for part in parts if part is not None)
    manifest = Manifest(stream=stream, version=version, tensors=everywhere, parts=addresses)
    await _on_all_ranks(_commit(transport, manifest, rank), version, gather)
    return manifest


def published_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is published. It is `dtype`, or the tensor's own dtype if `dtype` is None or the tensor holds no
    floating-point numbers.
    """
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


async def _commit(transport: Transport, manifest: Manifest, rank: int) -> None:
    """Make the version readable. Only rank 0 does something here."""
    if rank == 0:
        what = f"push of version {manifest.version}: commit by rank 0"
        await within(INDEX_TIMEOUT, transport.put_object(f"{manifest.key}/manifest", manifest), what)
        await within(INDEX_TIMEOUT, transport.put_object("latest", (manifest.stream, manifest.version)), what)


async def within(timeout: float, work: Awaitable[Value], what: str) -> Value:
    """Await the work. Raises TimeoutError naming `what` if the work takes longer than `timeout` seconds."""
    try:
        return await asyncio.wait_for(_awaited(work), timeout)
    except TimeoutError as error:
        if str(error):  # the work itself raised this TimeoutError
            raise
        raise TimeoutError(f"{what} was not done within {timeout:g} s") from None


async def _awaited(work: Awaitable[Value]) -> Value:
    """Wrap an awaitable, such as a future of Monarch, in a coroutine, for asyncio.wait_for."""
    return await work


async def _on_all_ranks(work: Awaitable[Value], version: int, gather: Gather) -> list[Value | None]:
    """Await this rank's work. Returns the results of all ranks. If the work of any rank failed, raises an error on every rank."""
    result: Value | None = None
    failure: Exception | None = None
    try:
        result = await work
    except Exception as error:
        failure = error
    results, failures = [], []
    for rank, (of_rank, text) in enumerate(gather((result, repr(failure) if failure else ""))):
        results.append(of_rank)
        if text:
            failures.append(f"rank {rank}: {text}")
    if failures:
        raise failure or RuntimeError(f"push of version {version} failed: {'; '.join(failures)}")
    return results


async def find(transport: Transport, version: int, timeout: float) -> Manifest:
    """Wait until `version` of the newest stream is published, with all its tensors, and return its manifest.

    If this takes longer than `timeout` seconds, raises TimeoutError naming this version and the newest version.
    Raises ValueError at once for a version older than the newest one that is not kept any more.
    """
    deadline = time.monotonic() + timeout
    what = f"pull of version {version}: question to the index"
    while True:
        newest = "nothing was published yet"
        latest = await within(INDEX_TIMEOUT, transport.get_object("latest"), what)
        if isinstance(latest, tuple):
            stream, newest_version = latest
            manifest = await within(INDEX_TIMEOUT, transport.get_object(f"{stream}/{version}/manifest"), what)
            if isinstance(manifest, Manifest):
                return manifest
            newest = f"the newest is {newest_version}"
            if version < newest_version:  # the versions of a stream only rise, and old ones are deleted
                raise ValueError(f"pull: version {version} cannot come any more; {newest}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"pull: version {version} was not published within {timeout:g} s; {newest}")
        await asyncio.sleep(POLL_SECONDS)


def local_shard(tensor: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a tensor, on the CPU and in the published dtype, and the offset of the part in the whole tensor."""
    # These imports take half a second. They are inside the function, because a program that only has clients does not call this function.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    where = {"device": "cpu", "dtype": published_dtype(tensor, dtype)}
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(**where), (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach().to(**where), tuple(offset)


def assemble(name: str, shape: tuple[int, ...], dtype: torch.dtype, shards: Mapping[tuple[int, ...], Tensor]) -> Tensor:
    """Put the shards of a tensor together. shards: offset in the whole tensor -> shard. All replicas of a shard have the same offset, so the
    mapping has only one of them.

    Raises RuntimeError if the shards do not cover the tensor.
    """
    whole = torch.empty(shape, dtype=dtype)
    for offset, shard in shards.items():
        region = tuple(slice(start, start + size) for start, size in zip(offset, shard.shape, strict=True))
        whole[region] = shard
    covered = sum(shard.numel() for shard in shards.values())
    if covered != whole.numel():
        raise RuntimeError(f"{name}: the shards hold {covered} of {whole.numel()} values")
    return whole
