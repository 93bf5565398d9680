"""Reads and writes Hugging Face directories: config.json, safetensors and tokenizer files.

All ranks call load, load_whole, state_dict, export and export_lora together.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torchtitan.models.qwen3 import Qwen3StateDictAdapter

from rl_actors import adapters
from rl_actors.config import LoRAConfig, ModelConfig
from rl_actors.engine import lora
from rl_actors.engine.build import BuiltModel, qwen3_config
from rl_actors.engine.checkpoint import HEAD, plain_errors
from rl_actors.engine.collectives import by_rank, together, whole_tensors
from rl_actors.engine.hf_names import (
    FUSED,
    empty_split_over_rows,
    is_joined,
    join_qkv,
    split_over_rows,
    split_qkv,
    to_hf_names,
)
from rl_actors.engine.initial_weights import assign
from rl_actors.engine.offload import drop_gathered_weights
from rl_actors.engine.optimizer import named_parameters
from rl_actors.finite import require_finite
from rl_actors.texts import stop_token_ids
from rl_actors.types import MAX_NAMES_REPORTED

MAX_FILE_BYTES = 4 << 30
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def require_same_tensors(config: ModelConfig, path: str) -> None:
    """Raises ValueError if the tensors in `path` are not this config's. Reads headers only."""
    if not any(Path(path).glob("*.safetensors")):
        raise ValueError(f"{path} holds no *.safetensors")
    for file in Path(path).glob("*.safetensors"):
        _require_header(file)
    metadata = HuggingFaceStorageReader(path).read_metadata().state_dict_metadata
    there = {name: tuple(entry.size) for name, entry in metadata.items()}
    require_same_shapes(config, there, path, "its config.json")


def _require_header(file: Path) -> None:
    try:
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{file} is cut off or no safetensors file: {error}") from None


def require_same_shapes(config: ModelConfig, there: Mapping[str, tuple[int, ...]], where: str, what: str) -> None:
    """Raises ValueError listing the tensors in which `there` differs from a model of this config."""
    here = tensor_shapes(config)
    # published directories may also hold a tied head, or the rotary embedding's table
    known = dict(here)
    if config.tie_word_embeddings:
        known["lm_head.weight"] = here["model.embed_tokens.weight"]
    findings = {
        "missing": [name for name in here if name not in there],
        "unexpected": [name for name in there if name not in known and not name.endswith("rotary_emb.inv_freq")],
        "of another shape": [
            f"{name} ({list(there[name])}, expected {list(shape)})"
            for name, shape in known.items()
            if there.get(name, shape) != shape
        ],
    }
    texts = [f"{len(names)} {kind}: {_first(names)}" for kind, names in findings.items() if names]
    if texts:
        raise ValueError(f"the tensors of {where} do not fit {what}: {'; '.join(texts)}")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The whole model's shapes, by Hugging Face's names."""
    with torch.device("meta"):
        state = qwen3_config(config).build().state_dict()  # query, key and value apart
    return {name: tuple(tensor.shape) for name, tensor in hf_adapter(config).to_hf(state).items()}


def load(built: BuiltModel, path: str) -> None:
    """Load safetensors into the sharded model. Each rank reads its own shards.

    Adapters, expert biases and a value head, which a directory lacks, keep their values.
    """
    with _to_fill(built) as tensors, plain_errors(f"loading {path}"):
        dcp.load(tensors, storage_reader=built.hf_adapter.get_hf_storage_reader(path))


def load_whole(built: BuiltModel, whole: Iterable[tuple[str, Tensor]]) -> None:
    """Copy whole tensors under Hugging Face's names into the sharded model, one after another.

    Raises ValueError if this rank misses a tensor, and leaves a mixture.
    """
    with _to_fill(built) as tensors:
        missing = set(tensors)
        for name, tensor in whole:
            if name in tensors:
                assign(tensors[name], tensor)
                missing.discard(name)
        if missing:
            raise ValueError(f"{len(missing)} tensors are missing: {_first(sorted(missing))}")


@contextmanager
def _to_fill(built: BuiltModel) -> Iterator[dict[str, Tensor]]:
    """The model's tensors under Hugging Face names, sharded, to be filled in the body.

    Joined parameters (hf_names.py) are temporary tensors, copied into the parameter after the body.
    """
    parameters = _parameters(built.model)
    if built.has_value_head:
        parameters.pop(HEAD, None)  # absent from most pipeline stages
    joined = {name: empty_split_over_rows(tensor) for name, tensor in parameters.items() if is_joined(name)}
    fused = {name: split_qkv(built.hf_adapter, name, tensor) for name, tensor in joined.items() if FUSED in name}
    apart: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        if name in fused:
            apart |= fused[name]
        else:
            apart[name] = joined.get(name, tensor)
    yield to_hf_names(built.hf_adapter, apart)
    for name, tensor in joined.items():
        if name in fused:
            tensor = join_qkv(built.hf_adapter, list(fused[name].values()))
        parameter = parameters[name]
        parameter.copy_(tensor.redistribute(placements=parameter.placements))


def state_dict(built: BuiltModel, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """This rank's weights under Hugging Face names, with adapters merged and without a tied head.

    dtype: of tensors split from joined ones (hf_names.py); transports convert the others.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in lora.merged(built.model, _parameters(built.model)).items():
        state[name] = split_over_rows(tensor.to(dtype)) if is_joined(name) else tensor
    return to_hf_names(built.hf_adapter, state)


def require_tokenizer(path: str) -> None:
    if not (Path(path) / "tokenizer_config.json").is_file():
        raise ValueError(
            f"tokenizer_path={path!r} holds no tokenizer_config.json, so it is not a tokenizer's directory"
        )


def tokenizer_files(source: str) -> list[Path]:
    """The tokenizer files in `source`; [] for ""."""
    files = [Path(source) / name for name in TOKENIZER_FILES] if source else []
    return [file for file in files if file.is_file()]


def adapter_state_dict(built: BuiltModel, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The adapters under peft's names, sharded as in the model."""
    state = lora.to_peft(built.model.state_dict(), built.hf_adapter.to_hf)
    return {name: tensor.detach().to(dtype) for name, tensor in state.items()}


def export(built: BuiltModel, config: ModelConfig, path: str, *, source: str, dtype: str) -> None:
    """write_model on rank 0, which holds at most MAX_FILE_BYTES and one tensor.

    Raises NonFiniteError on every rank, and writes nothing, if a weight is not finite.
    """
    weights = lora.merged(built.model, _parameters(built.model))
    require_finite("export_hf", weights, by_rank)
    # new, because the model's adapter may know how experts are sharded, and these are whole
    adapter = hf_adapter(config)
    gathered = whole_tensors(weights)

    def converted() -> Iterator[tuple[str, Tensor]]:
        for name, whole in gathered:
            assert whole is not None
            yield from to_hf_names(adapter, {name: whole.to(DTYPES[dtype])}).items()

    def write() -> None:
        try:
            if dist.get_rank() == 0:
                write_model(path, config, converted(), source=source, dtype=dtype)
        finally:
            for _ in gathered:  # also after an error of rank 0, for which the others would wait
                pass

    together(write)


def export_lora(built: BuiltModel, config: LoRAConfig, path: str, *, base: str) -> None:
    """Write the adapters for peft and vLLM. base: path or name of the base model.

    Raises NonFiniteError on every rank, and writes nothing, if a weight is not finite.
    """
    state = lora.to_peft(built.model.state_dict(), built.hf_adapter.to_hf)
    require_finite("export_lora", state, by_rank)
    tensors = {name: whole.contiguous() for name, whole in whole_tensors(state) if whole is not None}

    def write() -> None:
        if dist.get_rank() == 0:
            with new_directory(path) as directory:
                adapters.write(directory, tensors, config, base=base)

    together(write)


def require_free(path: str, dtype: str, agree: Callable[[bool], bool] = bool) -> None:
    """Raises ValueError for a `path` that is not free or an unknown dtype. agree: a rank's on_all_ranks."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}; it must be one of {', '.join(DTYPES)}")
    target = Path(path)
    if not agree(not target.exists() or (target.is_dir() and not any(target.iterdir()))):
        raise ValueError(f"{path} exists and is not an empty directory; an export never replaces files")


@contextmanager
def new_directory(path: str) -> Iterator[Path]:
    """A directory to fill in the body. `path` appears only when it is complete."""
    temporary = Path(f"{path}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_model(
    path: str,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    source: str,
    dtype: str,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write a directory that transformers and vLLM load.

    tensors: in `dtype`, by Hugging Face's names. source: directory of the tokenizer files and stop
    tokens. texts: further files by name, which replace those.
    """
    with new_directory(path) as directory:
        stops = list(stop_token_ids(source)) if source else []
        values = config.to_hf() | {"torch_dtype": dtype, "eos_token_id": stops or None}
        (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
        add_files(directory, source, texts)
        write_safetensors(directory, tensors)


def add_files(directory: Path, source: str, texts: Mapping[str, str] | None) -> None:
    for file in tokenizer_files(source):
        shutil.copyfile(file, directory / file.name)
    for name, text in (texts or {}).items():
        (directory / name).write_text(text)


def write_safetensors(directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write model.safetensors, or above MAX_FILE_BYTES several files and an index."""
    names: list[list[str]] = []  # of the tensors in each file
    total_bytes = 0
    for file in _files(tensors):
        save_file(file, directory / f"{len(names) + 1}.safetensors", metadata={"format": "pt"})
        names.append(list(file))
        total_bytes += sum(tensor.nbytes for tensor in file.values())
        file.clear()  # free before the next is gathered
    if len(names) == 1:
        (directory / "1.safetensors").rename(directory / "model.safetensors")
        return
    weight_map = {}
    for number, names_of_file in enumerate(names, start=1):
        name = f"model-{number:05d}-of-{len(names):05d}.safetensors"
        (directory / f"{number}.safetensors").rename(directory / name)
        weight_map.update(dict.fromkeys(names_of_file, name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _files(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The tensors of each file."""
    file: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        if file and num_bytes + tensor.nbytes > MAX_FILE_BYTES:
            yield file
            file = {}
            num_bytes = 0
        file[name] = tensor.contiguous()
        num_bytes += tensor.nbytes
    yield file


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """This rank's shards. model.state_dict() would gather query, key and value of every block."""
    drop_gathered_weights(model)
    return {name: parameter.detach() for name, parameter in named_parameters(model)}


def hf_adapter(config: ModelConfig) -> Qwen3StateDictAdapter:
    return Qwen3StateDictAdapter(qwen3_config(config), None)


def _first(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMES_REPORTED]) + (", …" if len(names) > MAX_NAMES_REPORTED else "")
