"""Low-rank adapters in peft's format: names of modules and tensors, and the directory that peft and
vLLM load.

R rank, I inputs and O outputs of a linear layer.
"""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_actors.config import LoRAConfig
from rl_actors.finite import require_finite
from rl_actors.json_files import read_object
from rl_actors.model_config import ModelConfig

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"

# torchtitan's layer config -> peft's names of the layers that it builds
ATTENTION = {"wq": ("q_proj",), "wkv": ("k_proj", "v_proj"), "wo": ("o_proj",)}
MLP = {"w1": ("gate_proj",), "w2": ("down_proj",), "w3": ("up_proj",)}
UNEMBED = {"lm_head": ("lm_head",)}


def targets(config: LoRAConfig) -> dict[str, tuple[str, ...]]:
    """The layers that get adapters: torchtitan's name -> peft's names."""
    attention = ATTENTION if config.train_attn else {}
    mlp = MLP if config.train_mlp else {}
    return attention | mlp | (UNEMBED if config.train_unembed else {})


def modules(config: LoRAConfig) -> list[str]:
    """By peft's names."""
    return list(chain.from_iterable(targets(config).values()))


def served(model: ModelConfig) -> list[str]:
    """The layers on which adapters can be trained and served, by peft's names."""
    return modules(LoRAConfig(rank=1, train_mlp=not model.num_experts, train_unembed=not model.tie_word_embeddings))


def names(weight: str) -> tuple[str, str]:
    """Names of A [R, I] and B [O, R] of a weight.

    names("lm_head.weight") -> ("base_model.model.lm_head.lora_A.weight",
    "base_model.model.lm_head.lora_B.weight")
    """
    module = weight.removesuffix(".weight")
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def shapes(config: LoRAConfig, weights: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the adapters. weights: shapes by Hugging Face names."""
    return _shapes(modules(config), config.rank, weights)


def _shapes(layers: list[str], rank: int, weights: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in weights.items():
        if name.endswith(".weight") and name.split(".")[-2] in layers:
            num_outputs, num_inputs = shape
            a, b = names(name)
            found |= {a: (rank, num_inputs), b: (num_outputs, rank)}
    return found


def write(directory: Path, tensors: Mapping[str, Tensor], config: LoRAConfig, *, base: str) -> None:
    """Write whole (unsharded) tensors into an existing directory, in peft's format. base: directory
    of the base model.
    """
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": modules(config),
    }
    (directory / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n")
    save_file(dict(tensors), directory / TENSORS_FILE, metadata={"format": "pt"})


def is_adapter(directory: Path) -> bool:
    """False for a whole model."""
    return (directory / CONFIG_FILE).is_file()


def rank_of(directory: Path) -> int:
    """The adapter's rank. Raises ValueError naming a directory that is not in peft's format."""
    for file in (CONFIG_FILE, TENSORS_FILE):
        if not (directory / file).is_file():
            raise ValueError(
                f"{directory} has no {file}; it must be a directory in peft's format, such as export_lora writes"
            )
    values = read_object(directory / CONFIG_FILE)
    if values.get("peft_type") != "LORA" or not isinstance(values.get("r"), int):
        raise ValueError(
            f"{directory / CONFIG_FILE} has peft_type={values.get('peft_type')!r}, r={values.get('r')!r}; it must have peft_type='LORA' and "
            "an integer r, which is the rank"
        )
    return int(values["r"])


def require_possible(directory: Path, *, max_adapters: int, max_rank: int) -> None:
    """Raises ValueError naming value and limit if a generator cannot load the adapter."""
    if not max_adapters:
        raise ValueError(
            "generator.max_adapters=0, so no adapters can be loaded; "
            "set it to the number of adapters that the requests of one step of vLLM may use"
        )
    if (rank := rank_of(directory)) > max_rank:
        raise ValueError(f"the adapter in {directory} has rank {rank}, but generator.max_adapter_rank={max_rank}")


def require_fits(directory: Path, weights: Mapping[str, tuple[int, ...]], layers: list[str]) -> None:
    """Raises ValueError if a tensor fits no layer or lacks its A or B, NonFiniteError if one is not
    finite. weights: shapes by Hugging Face names. layers: that may have adapters, by peft's names.
    """
    possible = _shapes(layers, rank_of(directory), weights)
    tensors = _load(directory / TENSORS_FILE)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, shape in found.items():
        if name not in possible:
            raise ValueError(
                f"the adapter in {directory} has the tensor {name}; this model can have adapters only on {', '.join(layers)}"
            )
        if shape != possible[name]:
            raise ValueError(
                f"the adapter in {directory} has {name} of shape {shape}; the model needs {possible[name]}"
            )
        other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")
        if other not in found:
            raise ValueError(f"the adapter in {directory} has {name}, but not {other}")
    require_finite(f"the adapter in {directory}", tensors)


def _load(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is cut off or no safetensors file: {error}") from None
