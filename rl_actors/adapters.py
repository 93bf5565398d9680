"""Low-rank adapters in peft's format: the names of modules and tensors, and the directory that peft and vLLM load. Needs no model.

R rank, I inputs and O outputs of a linear layer.
"""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rl_actors.config import LoRAConfig

# torchtitan's name of a layer's config -> peft's names of its modules. torchtitan builds wk and wv from one config, wkv.
ATTENTION = {"wq": ("q_proj",), "wkv": ("k_proj", "v_proj"), "wo": ("o_proj",)}
MLP = {"w1": ("gate_proj",), "w2": ("down_proj",), "w3": ("up_proj",)}
UNEMBED = {"lm_head": ("lm_head",)}


def targets(config: LoRAConfig) -> dict[str, tuple[str, ...]]:
    """The layers that get adapters: torchtitan's name -> peft's names."""
    found: dict[str, tuple[str, ...]] = {}
    if config.train_attn:
        found |= ATTENTION
    if config.train_mlp:
        found |= MLP
    if config.train_unembed:
        found |= UNEMBED
    return found


def modules(config: LoRAConfig) -> list[str]:
    """The layers that get adapters, by peft's names: ["q_proj", "k_proj", ...]"""
    return list(chain.from_iterable(targets(config).values()))


def names(weight: str) -> tuple[str, str]:
    """Names of the adapters A [R, I] and B [O, R] of a weight.

    names("lm_head.weight") -> ("base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight")
    """
    module = weight.removesuffix(".weight")
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def shapes(config: LoRAConfig, weights: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the adapters. weights: shapes of the weights by their Hugging Face names."""
    wanted = modules(config)
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in weights.items():
        if name.endswith(".weight") and name.split(".")[-2] in wanted:
            num_outputs, num_inputs = shape
            a, b = names(name)
            found |= {a: (config.rank, num_inputs), b: (num_outputs, config.rank)}
    return found


def write(directory: Path, tensors: Mapping[str, Tensor], config: LoRAConfig, *, base: str) -> None:
    """Write the adapters into an existing directory, in peft's format, which vLLM also loads.

    tensors: whole tensors, not the shards of a rank. base: directory of the model to which the adapters belong.
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
    (directory / "adapter_config.json").write_text(json.dumps(values, indent=2) + "\n")
    save_file(dict(tensors), directory / "adapter_model.safetensors", metadata={"format": "pt"})
