"""The way of weights from a trainer's ranks to generators: versions, and how one is published and found. Subclasses of Transport move bytes.

A version is published in two steps. First every rank puts its shards. When all ranks have done so, rank 0 writes the manifest. A generator
reads only tensors that a manifest lists, so it never reads half a push.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

POLL_SECONDS = 0.05
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The dtypes in which generators may compute, widest first."""

Value = TypeVar("Value")


class Gather(Protocol):
    """A collective that gives every rank the values of all ranks, in the order of the ranks."""

    def __call__(self, value: Value, /) -> list[Value]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Names, shapes and dtypes of the tensors of one published version.

    A stream is one lineage of versions. A trainer that goes back to version 6 begins a new stream, because its next version 7 is not the
    former one.
    """

    stream: str
    version: int
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape, dtype)

    @property
    def key(self) -> str:
        return f"{self.stream}/{self.version}"


class OpenVersion(ABC):
    """A version that a reader has opened. Its tensors are whole and on the CPU. They may be views that end with the reading."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) one at a time, in the order of the manifest."""


class Source(ABC):
    """The place of one version. It is picklable, and is opened in the process that reads the tensors."""

    @abstractmethod
    def open(self) -> AbstractContextManager[OpenVersion]:
        """Open the version for as long as the context lasts."""


@dataclass(frozen=True, slots=True)
class LoadedTensors(Source, OpenVersion):
    """The tensors themselves, as a source and as an open version."""

    loaded: Mapping[str, Tensor]

    def open(self) -> AbstractContextManager[OpenVersion]:
        return nullcontext(self)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.loaded.items()


class Transport(ABC):
    """A picklable handle to a place for weights, which trainer and generator actors share. The process that made it opens and closes it."""

    async def open(self) -> None:  # noqa: B027  (a transport may need none)
        """Start the processes or create the directories of the transport. Call it once, in the process that made the transport."""

    async def close(self) -> None:  # noqa: B027
        """Stop the processes and remove the directories of `open`."""

    @abstractmethod
    async def put_tensors(self, key: str, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Put this rank's shards of the DTensors, and all of a plain tensor."""

    @abstractmethod
    async def source(self, manifest: Manifest) -> Source:
        """The place of a version, which a generator sends to the processes of its engine."""

    async def get_tensors(self, manifest: Manifest) -> dict[str, Tensor]:
        """The tensors of a version, whole and on the CPU."""
        source = await self.source(manifest)
        return await asyncio.to_thread(_copies, source)

    @abstractmethod
    async def put_object(self, key: str, value: object) -> None:
        """Put a small picklable value. A reader sees the former value or this one, nothing between."""

    @abstractmethod
    async def get_object(self, key: str) -> object | None:
        """The value, or None if there is none."""

    @abstractmethod
    async def delete(self, manifest: Manifest) -> None:
        """Remove the tensors of a version."""


def _copies(source: Source) -> dict[str, Tensor]:
    with source.open() as version:
        return {name: tensor.clone() for name, tensor in version.tensors()}


async def announce(transport: Transport, dtype: str) -> None:
    """Say that a generator that computes in this dtype will pull."""
    await transport.put_object(f"generators/{dtype}", True)


async def transfer_dtype(transport: Transport) -> torch.dtype:
    """The dtype of a push: the widest that a generator announced, or float32 if none has announced one."""
    for name, dtype in DTYPES.items():
        if await transport.get_object(f"generators/{name}"):
            return dtype
    return torch.float32


async def publish(
    transport: Transport, tensors: Mapping[str, Tensor], *, stream: str, version: int, rank: int, gather: Gather
) -> Manifest:
    """Put this rank's part of a version. Every rank calls it.

    Raises the error of this rank, or RuntimeError naming the other ranks that failed and their errors. Nobody can then read the version.
    """
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    everywhere: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for of_rank in gather(shapes):  # in a pipeline the ranks of different stages have different names
        everywhere |= of_rank
    manifest = Manifest(stream=stream, version=version, tensors=everywhere)
    await _on_all_ranks(transport.put_tensors(manifest.key, tensors, rank), version, gather)
    await _on_all_ranks(_commit(transport, manifest, rank), version, gather)
    return manifest


async def _commit(transport: Transport, manifest: Manifest, rank: int) -> None:
    """Rank 0 makes the version readable."""
    if rank == 0:
        await transport.put_object(f"{manifest.key}/manifest", manifest)
        await transport.put_object("latest", (manifest.stream, manifest.version))


async def _on_all_ranks(work: Awaitable[None], version: int, gather: Gather) -> None:
    """Await this rank's work, then raise on every rank if the work of any rank failed."""
    failure: Exception | None = None
    try:
        await work
    except Exception as error:
        failure = error
    failures = []
    for rank, text in enumerate(gather(repr(failure) if failure else "")):
        if text:
            failures.append(f"rank {rank}: {text}")
    if failures:
        raise failure or RuntimeError(f"push of version {version}: nothing was published: {'; '.join(failures)}")


async def find(transport: Transport, version: int, timeout: float) -> Manifest:
    """Wait until `version` of the newest stream is published, with all its tensors, and return its manifest.

    Raises TimeoutError naming this version and the newest one.
    """
    deadline = time.monotonic() + timeout
    while True:
        newest = "nothing was published yet"
        latest = await transport.get_object("latest")
        if isinstance(latest, tuple):
            stream, newest_version = latest
            manifest = await transport.get_object(f"{stream}/{version}/manifest")
            if isinstance(manifest, Manifest):
                return manifest
            newest = f"the newest is {newest_version}"
        if time.monotonic() > deadline:
            raise TimeoutError(f"pull: version {version} was not published within {timeout:g} s; {newest}")
        await asyncio.sleep(POLL_SECONDS)


def local_shard(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """(this rank's part of a tensor, on the CPU; its offset in the whole tensor)."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu(), (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach().cpu(), tuple(offset)


def assemble(name: str, shape: tuple[int, ...], dtype: torch.dtype, shards: Mapping[tuple[int, ...], Tensor]) -> Tensor:
    """Put shards together by their offsets. `shards` has only one of several replicas, because they have the same offset.

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
