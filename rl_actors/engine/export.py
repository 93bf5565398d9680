"""Exports a trainer's checkpoint as a Hugging Face directory, in one process without a trainer.

In memory are one block of the checkpoint and one file of the export; of a checkpoint of adapters,
all of them and one tensor of the base.
"""

import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rl_actors import adapters
from rl_actors.config import LoRAConfig, ModelConfig, TrainerConfig
from rl_actors.engine import hf
from rl_actors.engine.checkpoint import difference, is_checkpoint, plain_errors, read_metadata
from rl_actors.finite import require_finite
from rl_actors.trusted_files import require_trusted
from rl_actors.types import MAX_NAMES_REPORTED, NonFiniteError

LAYER = re.compile(r"\.(\d+)\.")
LORA_A = ".lora_a.weight"
LORA_B = ".lora_b.weight"


def export_checkpoint(
    checkpoint: str,
    config: TrainerConfig,
    path: str,
    *,
    dtype: str = "float32",
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write what TrainEngine.export_hf would write. `path` appears only when it is complete.

    With adapters, they are merged into the weights of config.hf_path. texts: further files by name,
    which replace tokenizer files of the checkpoint.
    Raises ValueError for a checkpoint of another model or that other users can write, a `path` that
    is not free, an unknown dtype, or a model that Hugging Face's format cannot express. Raises
    NonFiniteError, and writes nothing, if a weight is not finite.
    """
    config.require_hf("export")
    shapes = _require_checkpoint(checkpoint, config)
    hf.require_free(path, dtype)
    target = Path(path)
    temporary = Path(f"{path}.partial")
    hf.begin_directory(temporary, config.model, source=checkpoint, dtype=dtype)
    files = hf.SafetensorsWriter(temporary)
    tensors = _merged(checkpoint, shapes, config) if config.lora.rank else _whole(checkpoint, shapes, config.model)
    for name, tensor in tensors:
        _require_finite(checkpoint, {name: tensor}, temporary)
        files.add({name: tensor.to(hf.DTYPES[dtype])})
    files.finish()
    _write_texts(temporary, texts)
    temporary.rename(target)


def export_adapters(
    checkpoint: str, config: TrainerConfig, path: str, *, texts: Mapping[str, str] | None = None
) -> None:
    """Write what TrainEngine.export_lora would write, and tokenizer files. texts: as above."""
    if not config.lora.rank:
        raise ValueError("lora.rank=0: the run trained no adapters; export the whole weights")
    shapes = _require_checkpoint(checkpoint, config)
    hf.require_free(path, "float32")
    tensors = _adapters(_read(checkpoint, shapes), config.model)
    target = Path(path)
    temporary = Path(f"{path}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    _require_finite(checkpoint, tensors, temporary)
    temporary.mkdir(parents=True)
    adapters.write(temporary, tensors, config.lora, base=config.hf_path)
    for file in hf.tokenizer_files(checkpoint):
        shutil.copyfile(file, temporary / file.name)
    _write_texts(temporary, texts)
    temporary.rename(target)


def _require_finite(checkpoint: str, tensors: Mapping[str, Tensor], temporary: Path) -> None:
    """Raises NonFiniteError after removing the partial export."""
    try:
        require_finite(f"export of {checkpoint}", tensors)
    except NonFiniteError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def policy_version(checkpoint: str) -> int:
    state = {"policy_version": torch.tensor(0)}
    _load(checkpoint, state)
    return int(state["policy_version"])


def _write_texts(directory: Path, texts: Mapping[str, str] | None) -> None:
    for name, text in (texts or {}).items():
        (directory / name).write_text(text)


def _require_checkpoint(checkpoint: str, config: TrainerConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the checkpoint's model, by torchtitan's names.

    Raises ValueError if it is no checkpoint of this model, or if other users can write its files.
    """
    if not is_checkpoint(checkpoint):
        raise ValueError(f"{checkpoint} is not a checkpoint of a trainer")
    require_trusted(checkpoint)
    saved = read_metadata(checkpoint)
    there = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in saved.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    here = _expected(config)
    differing = [
        difference(name, there.get(name), here.get(name), "the config")
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    if differing:
        raise ValueError(f"{checkpoint} holds another model: {'; '.join(differing[:MAX_NAMES_REPORTED])}")
    return there


def _expected(config: TrainerConfig) -> dict[str, tuple[int, ...]]:
    """The shapes that a checkpoint with this config has."""
    weights = {name: tuple(tensor.shape) for name, tensor in hf.whole_state(config.model).items()}
    if not config.lora.rank:
        return weights
    wanted = adapters.modules(config.lora)
    found: dict[str, tuple[int, ...]] = {}
    for name, hf_name in _hf_names(weights, config.model).items():
        if hf_name.split(".")[-2] in wanted:
            outputs, inputs = weights[name]
            module = name.removesuffix(".weight")
            found |= {module + LORA_A: (config.lora.rank, inputs), module + LORA_B: (outputs, config.lora.rank)}
    return found


def _hf_names(names: Mapping[str, object], model: ModelConfig) -> dict[str, str]:
    """torchtitan's names -> Hugging Face's, without experts, which are several tensors there."""
    adapter = hf.hf_adapter(model)
    found = {}
    for name in names:
        if ".inner_experts." not in name:
            for hf_name in adapter.to_hf({name: torch.empty(0, device="meta")}):
                found[name] = hf_name
    return found


def _read(checkpoint: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
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


def _whole(checkpoint: str, shapes: Mapping[str, tuple[int, ...]], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    adapter = hf.hf_adapter(model)
    for block in _blocks(shapes).values():
        yield from adapter.to_hf(_read(checkpoint, block)).items()


def _blocks(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes by transformer block. A tensor outside the blocks is a group of its own."""
    blocks: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        layer = LAYER.search(name)
        blocks.setdefault(layer[1] if layer else name, {})[name] = shape
    return blocks


def _merged(
    checkpoint: str, shapes: Mapping[str, tuple[int, ...]], config: TrainerConfig
) -> Iterator[tuple[str, Tensor]]:
    """The weights of config.hf_path as W + (alpha / rank) B A."""
    pairs = _adapters(_read(checkpoint, shapes), config.model)
    for name, weight in _tensors_of(config.hf_path, hf.tensor_shapes(config.model)):
        a, b = adapters.names(name)
        weight = weight.float()
        if a in pairs:
            weight = weight + _scale(config.lora) * (pairs[b] @ pairs[a])
        yield name, weight


def _scale(config: LoRAConfig) -> float:
    return config.alpha / config.rank


def _adapters(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """torchtitan's names of adapters -> peft's."""
    weights = {name.removesuffix(LORA_A) + ".weight": None for name in tensors if name.endswith(LORA_A)}
    found: dict[str, Tensor] = {}
    for name, hf_name in _hf_names(weights, model).items():
        module = name.removesuffix(".weight")
        a, b = adapters.names(hf_name)
        found |= {a: tensors[module + LORA_A], b: tensors[module + LORA_B]}
    return found


def _tensors_of(path: str, wanted: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """The wanted tensors of a directory's safetensors files, one at a time."""
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - `tensors` is not a dict
                if name in wanted:
                    yield name, tensors.get_tensor(name)
