"""How weights get from a trainer's ranks to generators: versions, commit and completeness. The bytes travel in the subclasses.

A version is published in two moments: every rank puts its shards, and only when all have, rank 0 writes the manifest.
What has no manifest cannot be read, so an interrupted push is never seen as whole.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

POLL_SECONDS = 0.05
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What generators compute in, widest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What was published under (stream, version); a stream is one lineage of versions, so that a rollback cannot meet an older 7."""

    stream: str
    version: int
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape, dtype)

    @property
    def key(self) -> str:
        return f"{self.stream}/{self.version}"


class Transport(ABC):
    """A picklable handle that trainer and generator actors share. Who makes it opens and closes it."""

    async def open(self) -> None:  # noqa: B027  (a transport may need none)
        """Start what the transport needs, once, from the process that owns it."""

    async def close(self) -> None:  # noqa: B027
        """Stop and remove what open made."""

    @abstractmethod
    async def put_tensors(self, key: str, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Put this rank's shards of DTensors, and whole plain tensors."""

    @abstractmethod
    async def get_tensors(self, manifest: Manifest) -> dict[str, Tensor]:
        """Whole tensors on the CPU."""

    @abstractmethod
    async def put_object(self, key: str, value: Any) -> None:
        """Put a small picklable value, replacing the former at once."""

    @abstractmethod
    async def get_object(self, key: str) -> Any | None:
        """The value, or None when there is none."""

    @abstractmethod
    async def delete(self, manifest: Manifest) -> None:
        """Remove the tensors of a version."""


async def announce(transport: Transport, dtype: str) -> None:
    """A generator of this dtype will pull."""
    await transport.put_object(f"generators/{dtype}", True)


async def transfer_dtype(transport: Transport) -> torch.dtype:
    """What pushes are cast to: the widest dtype that a generator announced, float32 before any has."""
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
    gather: Callable[[Any], list[Any]],
) -> Manifest:
    """Put this rank's part of a version; called on every rank. `gather` gives every rank's value to every rank.

    Raises RuntimeError naming the rank and its error when another rank failed; then the version stays unreadable.
    """
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    # Under pipeline parallelism the ranks of a stage have names of their own.
    everywhere = {name: spec for of_rank in gather(shapes) for name, spec in of_rank.items()}
    manifest = Manifest(stream=stream, version=version, tensors=everywhere)

    async def put_shards() -> None:
        await transport.put_tensors(manifest.key, tensors, rank)

    async def commit() -> None:
        if rank == 0:
            await transport.put_object(f"{manifest.key}/manifest", manifest)
            await transport.put_object("latest", (stream, version))

    for part in (put_shards, commit):
        failure: Exception | None = None
        try:
            await part()
        except Exception as error:
            failure = error
        failures = [f"rank {r}: {text}" for r, text in enumerate(gather(repr(failure) if failure else "")) if text]
        if failures:
            raise failure or RuntimeError(f"push of version {version}: nothing was published: {'; '.join(failures)}")
    return manifest


async def find(transport: Transport, version: int, timeout: float) -> Manifest:
    """Wait until `version` of the newest stream is published; its tensors are whole then.

    Raises TimeoutError naming the version and the newest one there is.
    """
    deadline = time.monotonic() + timeout
    while True:
        latest = await transport.get_object("latest")
        manifest = await transport.get_object(f"{latest[0]}/{version}/manifest") if latest else None
        if manifest is not None:
            return manifest
        if time.monotonic() > deadline:
            newest = f"the newest is {latest[1]}" if latest else "nothing was published yet"
            raise TimeoutError(f"pull: version {version} was not published within {timeout:g} s; {newest}")
        await asyncio.sleep(POLL_SECONDS)


def local_shard(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part on the CPU and its offset in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu(), (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach().cpu(), tuple(offset)


def assemble(name: str, shape: tuple[int, ...], dtype: torch.dtype, shards: Mapping[tuple[int, ...], Tensor]) -> Tensor:
    """Put shards together by offset; equal offsets are replicas and were given once.

    Raises RuntimeError when the shards do not cover the tensor.
    """
    whole = torch.empty(shape, dtype=dtype)
    for offset, shard in shards.items():
        whole[tuple(slice(o, o + n) for o, n in zip(offset, shard.shape, strict=True))] = shard
    covered = sum(shard.numel() for shard in shards.values())
    if covered != whole.numel():
        raise RuntimeError(f"{name}: the shards hold {covered} of {whole.numel()} values")
    return whole
