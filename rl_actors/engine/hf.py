"""Reads and writes Hugging Face directories: config.json, safetensors and tokenizer files.

All ranks call load, load_whole, state_dict, require_exportable, export and export_lora together.
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
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.qwen3 import Qwen3StateDictAdapter

from rl_actors.config import LoRAConfig, ModelConfig
from rl_actors.engine import lora
from rl_actors.engine.build import BuiltModel, qwen3_config
from rl_actors.engine.checkpoint import HEAD, plain_errors
from rl_actors.engine.collectives import by_rank, on_all_ranks, together, whole_tensors
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
    """Raises ValueError if the tensors in `path` have other names or shapes than this config's.
    Reads headers only.
    """
    if not any(Path(path).glob("*.safetensors")):
        raise ValueError(f"{path} holds no *.safetensors")
    for file in Path(path).glob("*.safetensors"):
        require_whole(file)
    metadata = HuggingFaceStorageReader(path).read_metadata().state_dict_metadata
    there = {name: tuple(entry.size) for name, entry in metadata.items()}
    require_same_shapes(config, there, path, "its config.json")


def require_whole(file: Path) -> None:
    """Raises ValueError if a safetensors file is cut off or corrupt. Reads its header only."""
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
    other_shapes = []
    for name, shape in known.items():
        if there.get(name, shape) != shape:
            other_shapes.append(f"{name} ({list(there[name])}, expected {list(shape)})")
    findings = {
        "missing": [name for name in here if name not in there],
        "unexpected": [name for name in there if name not in known and not name.endswith("rotary_emb.inv_freq")],
        "of another shape": other_shapes,
    }
    texts = [f"{len(names)} {kind}: {_first(names)}" for kind, names in findings.items() if names]
    if texts:
        raise ValueError(f"the tensors of {where} do not fit {what}: {'; '.join(texts)}")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The whole model's shapes, by Hugging Face's names."""
    return {name: tuple(tensor.shape) for name, tensor in hf_adapter(config).to_hf(whole_state(config)).items()}


def whole_state(config: ModelConfig) -> dict[str, Tensor]:
    """The whole model under torchtitan's names, query, key and value apart, on the meta device."""
    with torch.device("meta"):
        return qwen3_config(config).build().state_dict()


def load(built: BuiltModel, path: str) -> None:
    """Load safetensors into the sharded model. Each rank reads its own shards.

    Adapters, expert biases and a value head, which a directory lacks, keep their values.
    """
    with _to_fill(built) as tensors, plain_errors(f"loading {path}"):
        dcp.load(tensors, storage_reader=built.hf_adapter.get_hf_storage_reader(path))


def load_whole(built: BuiltModel, whole: Iterable[tuple[str, Tensor]]) -> None:
    """Copy whole tensors under Hugging Face's names into the sharded model, one after another.

    Raises ValueError if this rank misses a tensor. Joined parameters then keep their old values,
    the others that were there have their new ones.
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
    """The weights under Hugging Face names, sharded, with adapters merged and without a tied head.

    In a pipeline only this rank's. dtype: that of tensors split from joined ones (hf_names.py);
    transports convert the others when they copy them.
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
    if not source:
        return []
    files = [Path(source) / name for name in TOKENIZER_FILES]
    return [file for file in files if file.is_file()]


def adapter_state_dict(built: BuiltModel, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The adapters under peft's names, sharded as in the model."""
    state = lora.peft_state_dict(built.model, built.hf_adapter.to_hf)
    return {name: tensor.detach().to(dtype) for name, tensor in state.items()}


def export(built: BuiltModel, config: ModelConfig, path: str, *, source: str = "", dtype: str = "float32") -> None:
    """Write a directory that transformers and vLLM load. `path` appears only when it is complete.

    Rank 0 holds at most MAX_FILE_BYTES and one tensor. source: directory of the tokenizer files.
    Raises NonFiniteError on every rank, and writes nothing, if a weight is not finite.
    """
    target = Path(path)
    temporary = Path(f"{path}.partial")
    weights = lora.merged(built.model, _parameters(built.model))
    require_finite("export_hf", weights, by_rank)

    _on_first_rank(lambda: begin_directory(temporary, config, source=source, dtype=dtype))
    files = SafetensorsWriter(temporary)
    # new, because the model's adapter may know how experts are sharded, and these are whole
    adapter = hf_adapter(config)
    failure: Exception | None = None
    for name, whole in whole_tensors(weights):
        if whole is not None and failure is None:
            try:
                files.add(to_hf_names(adapter, {name: whole.to(DTYPES[dtype])}))
            except Exception as error:
                # Any error, also SafetensorError for a full disk. Raised in `commit`, because the
                # other ranks wait for rank 0 in the next gather.
                failure = error

    def commit() -> None:
        if failure is not None:
            raise failure
        files.finish()
        temporary.rename(target)

    _on_first_rank(commit)


def begin_directory(directory: Path, config: ModelConfig, *, source: str, dtype: str) -> None:
    """Make the directory anew, with config.json, and tokenizer files and stop tokens of `source`."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    stops = list(stop_token_ids(source)) if source else []
    values = config.to_hf() | {"torch_dtype": dtype, "eos_token_id": stops or None}
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    for file in tokenizer_files(source):
        shutil.copyfile(file, directory / file.name)


def export_lora(built: BuiltModel, config: LoRAConfig, path: str, *, base: str) -> None:
    """Write the adapters for peft and vLLM. `path` appears only when it is complete.

    base: path or name of the base model.
    Raises NonFiniteError on every rank, and writes nothing, if a weight is not finite.
    """
    require_finite("export_lora", lora.peft_state_dict(built.model, built.hf_adapter.to_hf), by_rank)
    tensors = lora.gather(built.model, built.hf_adapter.to_hf)

    def write() -> None:
        lora.write(tensors, config, path, base=base)

    _on_first_rank(write)


def require_exportable(path: str, dtype: str) -> None:
    """Raises ValueError on every rank for an unknown dtype, or if `path` is not free on any rank."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}; it must be one of {', '.join(DTYPES)}")
    if not on_all_ranks(_is_free(path)):
        raise ValueError(f"{path} exists and is not an empty directory; an export never replaces files")


def require_free(path: str, dtype: str) -> None:
    """require_exportable for a process that is no rank."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}; it must be one of {', '.join(DTYPES)}")
    if not _is_free(path):
        raise ValueError(f"{path} exists and is not an empty directory; an export never replaces files")


def _is_free(path: str) -> bool:
    target = Path(path)
    return not target.exists() or (target.is_dir() and not any(target.iterdir()))


class SafetensorsWriter:
    """Writes model.safetensors, or above MAX_FILE_BYTES an index and several files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = self.total_bytes = 0
        self.written: list[list[str]] = []  # names of the tensors in each file

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Collect tensors for the next file. A full file is written."""
        for name, tensor in tensors.items():
            num_bytes = tensor.numel() * tensor.element_size()
            if self.pending and self.pending_bytes + num_bytes > MAX_FILE_BYTES:
                self._write()
            self.pending[name] = tensor.contiguous()
            self.pending_bytes += num_bytes
            self.total_bytes += num_bytes

    def finish(self) -> None:
        """Write the last file, and give all files their final names."""
        self._write()
        count = len(self.written)
        if count == 1:
            (self.directory / "1.safetensors").rename(self.directory / "model.safetensors")
            return
        weight_map = {}
        for number, names in enumerate(self.written, start=1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            (self.directory / f"{number}.safetensors").rename(self.directory / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        number = len(self.written) + 1
        save_file(self.pending, self.directory / f"{number}.safetensors", metadata={"format": "pt"})
        self.written.append(list(self.pending))
        self.pending = {}
        self.pending_bytes = 0


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """This rank's shards of the parameters.

    model.state_dict() would gather query, key and value of every block on every rank.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {name: parameter.detach() for name, parameter in named_parameters(model)}


def hf_adapter(config: ModelConfig) -> Qwen3StateDictAdapter:
    return Qwen3StateDictAdapter(qwen3_config(config), None)


def _first(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMES_REPORTED]) + (", …" if len(names) > MAX_NAMES_REPORTED else "")


def _on_first_rank(work: Callable[[], None]) -> None:
    """Call `work` on rank 0. Its error is raised on every rank; all must call this."""
    together(lambda: work() if dist.get_rank() == 0 else None)
