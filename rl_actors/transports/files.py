"""`FilesTransport`: weights in safetensors files, for debugging and hosts that share a disk."""

import asyncio
import json
import pickle
import shutil
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_actors.transports.base import (
    LOAD_TIMEOUT,
    Manifest,
    OpenVersion,
    Piece,
    Source,
    Transport,
    assemble,
    local_shard,
)
from rl_actors.trusted_files import require_trusted


class FilesTransport(Transport):
    """One file per rank and version, with each shard's offset in the whole tensor as metadata."""

    kind = "files"

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).absolute()

    async def open(self) -> None:
        if not self.directory.exists():
            self.directory.mkdir(parents=True)
            self._is_open_here = True

    async def close(self) -> None:
        if self._is_open_here:
            await asyncio.to_thread(shutil.rmtree, self.directory)
            self._is_open_here = False

    async def put_tensors(
        self, key: str, tensors: Mapping[str, Tensor], rank: int, dtype: torch.dtype | None = None
    ) -> None:
        shards = {name: local_shard(tensor, dtype) for name, tensor in tensors.items()}
        offsets = {name: json.dumps(shard.start) for name, shard in shards.items()}
        file = self.directory / key / f"rank{rank}.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        # clone: safetensors refuses tensors that share storage, as tied or sliced ones may
        copies = {name: shard.values.clone(memory_format=torch.contiguous_format) for name, shard in shards.items()}
        await asyncio.to_thread(save_file, copies, file, metadata=offsets)

    async def source(self, manifest: Manifest) -> Source:
        return FilesOfVersion(directory=self.directory / manifest.key, manifest=manifest)

    async def put_object(self, key: str, value: object) -> None:
        file = self.directory / f"{key}.pickle"
        file.parent.mkdir(parents=True, exist_ok=True)
        # a name of its own, because two processes may put the same key
        partial = file.with_suffix(f".{uuid.uuid4().hex}.partial")
        partial.write_bytes(pickle.dumps(value))
        partial.rename(file)  # atomic

    async def get_object(self, key: str) -> object | None:
        file = self.directory / f"{key}.pickle"
        if not file.is_file():
            return None
        require_trusted(file)
        return pickle.loads(file.read_bytes())

    async def delete(self, manifest: Manifest) -> None:
        shutil.rmtree(self.directory / manifest.key, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInDirectory(Source, OpenVersion):
    """A version in files of one directory, its own OpenVersion. A subclass reads the files."""

    directory: Path
    manifest: Manifest
    timeout: float = LOAD_TIMEOUT
    path: str = "files"
    reason: str

    def open(self) -> AbstractContextManager[OpenVersion]:
        return nullcontext(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesOfVersion(VersionInDirectory):
    """A version of FilesTransport, one file per rank."""

    reason: str = "the config says so"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        with ExitStack() as stack:
            files: dict[str, dict[tuple[int, ...], safe_open]] = defaultdict(dict)  # name -> offset -> file
            for path in sorted(self.directory.glob("rank*.safetensors")):
                file = stack.enter_context(safe_open(path, framework="pt"))
                for name, offset in file.metadata().items():
                    files[name][tuple(json.loads(offset))] = file
            for name, (shape, dtype) in self.manifest.tensors.items():
                shards = [Piece(offset, file.get_tensor(name)) for offset, file in files[name].items()]
                yield name, assemble(name, shape, dtype, shards)
