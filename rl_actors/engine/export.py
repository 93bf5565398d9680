"""Exports a trainer's checkpoint as a Hugging Face directory, in one process without a trainer.

In memory are one block of the checkpoint and one file of the export; of a checkpoint of adapters,
all of them and one tensor of the base.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rl_actors import adapters
from rl_actors.config import TrainerConfig
from rl_actors.engine import hf, lora
from rl_actors.engine.build import qwen3_config
from rl_actors.engine.checkpoint import Shapes, differences, is_checkpoint, plain_errors, read_metadata
from rl_actors.finite import require_finite
from rl_actors.trusted_files import require_trusted
from rl_actors.types import MAX_NAMES_REPORTED

LAYER = re.compile(r"\.(\d+)\.")


def export_checkpoint(
    checkpoint: str, config: TrainerConfig, path: str, *, dtype: str = "float32", texts: Mapping[str, str] | None = None
) -> None:
    """Write what TrainEngine.export_hf would write, and texts (see hf.write_model).

    With adapters, they are merged into the weights of config.hf_path.
    Raises ValueError for a checkpoint of another model or that other users can write, a `path` that
    is not free, an unknown dtype, or a model that Hugging Face's format cannot express. Raises
    NonFiniteError, and writes nothing, if a weight is not finite.
    """
    config.require_hf("export")
    shapes = _require_checkpoint(checkpoint, config)
    hf.require_free(path, dtype)

    def converted() -> Iterator[tuple[str, Tensor]]:
        merged = _merged if config.lora.rank else _whole
        for name, tensor in merged(checkpoint, shapes, config):
            require_finite(f"export of {checkpoint}", {name: tensor})
            yield name, tensor.to(hf.DTYPES[dtype])

    hf.write_model(path, config.model, converted(), source=checkpoint, dtype=dtype, texts=texts)


def export_adapters(
    checkpoint: str, config: TrainerConfig, path: str, *, texts: Mapping[str, str] | None = None
) -> None:
    """Write what TrainEngine.export_lora would write, tokenizer files, and texts as above."""
    if not config.lora.rank:
        raise ValueError("lora.rank=0: the run trained no adapters; export the whole weights")
    shapes = _require_checkpoint(checkpoint, config)
    hf.require_free(path, "float32")
    tensors = lora.to_peft(_read(checkpoint, shapes), hf.hf_adapter(config.model).to_hf)
    require_finite(f"export of {checkpoint}", tensors)
    with hf.new_directory(path) as directory:
        adapters.write(directory, tensors, config.lora, base=config.hf_path)
        hf.add_files(directory, checkpoint, texts)


def policy_version(checkpoint: str) -> int:
    state = {"policy_version": torch.tensor(0)}
    _load(checkpoint, state)
    return int(state["policy_version"])


def _require_checkpoint(checkpoint: str, config: TrainerConfig) -> Shapes:
    """The shapes of the checkpoint's model, by torchtitan's names.

    Raises ValueError if it is no checkpoint of this model, or if other users can write its files.
    """
    if not is_checkpoint(checkpoint):
        raise ValueError(f"{checkpoint} is not a checkpoint of a trainer")
    require_trusted(checkpoint)
    there = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in read_metadata(checkpoint).items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    with torch.device("meta"):
        model = lora.convert(qwen3_config(config.model, fuse_qkv=not config.lora.rank), config.lora).build()
    here = {name: tuple(tensor.shape) for name, tensor in lora.checkpointed(model).items()}
    if differing := differences(sorted(there.keys() | here.keys()), there, here, "the config"):
        raise ValueError(f"{checkpoint} holds another model: {'; '.join(differing[:MAX_NAMES_REPORTED])}")
    return there


def _read(checkpoint: str, shapes: Shapes) -> dict[str, Tensor]:
    """These tensors of the checkpoint, in float32."""
    state: dict[str, dict[str, Tensor]] = {"model": {name: torch.empty(shape) for name, shape in shapes.items()}}
    _load(checkpoint, state)
    return state["model"]


def _load(checkpoint: str, state: Mapping[str, object]) -> None:
    """Fill `state` from the checkpoint. Raises ValueError if other users can write its files."""
    require_trusted(checkpoint)
    with plain_errors(f"reading {checkpoint}"), warnings.catch_warnings():
        # torch warns that this process is not part of a distributed job
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(dict(state), checkpoint_id=checkpoint, no_dist=True)


def _whole(checkpoint: str, shapes: Shapes, config: TrainerConfig) -> Iterator[tuple[str, Tensor]]:
    adapter = hf.hf_adapter(config.model)
    for block in _blocks(shapes).values():
        yield from adapter.to_hf(_read(checkpoint, block)).items()


def _blocks(shapes: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes by transformer block. A tensor outside the blocks is a group of its own."""
    blocks: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        layer = LAYER.search(name)
        blocks.setdefault(layer[1] if layer else name, {})[name] = shape
    return blocks


def _merged(checkpoint: str, shapes: Shapes, config: TrainerConfig) -> Iterator[tuple[str, Tensor]]:
    """The weights of config.hf_path as W + (alpha / rank) B A."""
    pairs = lora.to_peft(_read(checkpoint, shapes), hf.hf_adapter(config.model).to_hf)
    scale = config.lora.alpha / config.lora.rank
    for name, weight in _tensors_of(config.hf_path, hf.tensor_shapes(config.model)):
        a, b = adapters.names(name)
        weight = weight.float()
        if a in pairs:
            weight = weight + scale * (pairs[b] @ pairs[a])
        yield name, weight


def _tensors_of(path: str, wanted: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """The wanted tensors of a directory's safetensors files, one at a time."""
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - `tensors` is not a dict
                if name in wanted:
                    yield name, tensors.get_tensor(name)
