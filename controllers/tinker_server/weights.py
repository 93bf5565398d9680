"""`HfDirectories`, the read-only transport from which a Tinker server's generator pulls whole weights.

export_hf of a trainer writes the directories. The generator loads adapters without a transport.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rl_actors.transports.base import Manifest, Source, Transport
from rl_actors.transports.files import VersionInDirectory

STREAM = "samplers"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by their names in safetensors


class HfDirectories(Transport):
    """Version N is <folder>/N, a Hugging Face directory or a link to one."""

    kind = "files"

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    async def put_tensors(
        self, key: str, tensors: Mapping[str, Tensor], rank: int, dtype: torch.dtype | None = None
    ) -> None:
        raise RuntimeError("the versions of HfDirectories are written by export_hf")

    async def source(self, manifest: Manifest) -> Source:
        return HfDirectory(directory=self.folder / str(manifest.version), manifest=manifest)

    async def put_object(self, key: str, value: object) -> None:
        """Does nothing: no trainer pushes in the dtype that generators announce."""

    async def get_object(self, key: str) -> object | None:
        if key == "latest":
            return STREAM, 0  # 0: only for `find`'s error text
        stream, _, rest = key.partition("/")
        version, _, name = rest.partition("/")
        directory = self.folder / version
        if stream != STREAM or name != "manifest" or not directory.is_dir():
            return None
        return Manifest(stream=STREAM, version=int(version), tensors=tensors_of(directory))

    async def delete(self, manifest: Manifest) -> None:
        """Does nothing: the server deletes the directories."""


def tensors_of(directory: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """{name: (shape, dtype)}, without a tied lm_head.weight."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                header = opened.get_slice(name)
                found[name] = (tuple(header.get_shape()), DTYPES[header.get_dtype()])
    if json.loads((directory / "config.json").read_text()).get("tie_word_embeddings", False):
        found.pop("lm_head.weight", None)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HfDirectory(VersionInDirectory):
    """The tensors of one Hugging Face directory."""

    reason: str = "a sampler's weights are a directory"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for file in sorted(self.directory.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a mapping)
                    if name in self.manifest.tensors:
                        yield name, opened.get_tensor(name)
