"""Low-rank adapters under peft's names: which modules, which tensors, and the directory that peft and vLLM load. Knows no model.

R rank, I inputs and O outputs of a linear layer.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rl_actors.config import LoRAConfig

# torchtitan's config of a layer -> the modules that peft calls it; wk and wv are built from one config.
ATTENTION = {"wq": ("q_proj",), "wkv": ("k_proj", "v_proj"), "wo": ("o_proj",)}
MLP = {"w1": ("gate_proj",), "w2": ("down_proj",), "w3": ("up_proj",)}
UNEMBED = {"lm_head": ("lm_head",)}


def targets(config: LoRAConfig) -> dict[str, tuple[str, ...]]:
    """Which layers get adapters: torchtitan's names, and peft's."""
    parts = ((config.train_attn, ATTENTION), (config.train_mlp, MLP), (config.train_unembed, UNEMBED))
    return {name: peft_names for wanted, part in parts if wanted for name, peft_names in part.items()}


def modules(config: LoRAConfig) -> list[str]:
    """The same in peft's names alone: ["q_proj", "k_proj", ...]"""
    return [name for names in targets(config).values() for name in names]


def names(weight: str) -> tuple[str, str]:
    """names("lm_head.weight") -> ("base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"): [R, I] and [O, R]"""
    module = weight.removesuffix(".weight")
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def shapes(config: LoRAConfig, weights: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the adapters, given those of the weights under their Hugging Face names."""
    wanted = modules(config)
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in weights.items():
        if name.endswith(".weight") and name.split(".")[-2] in wanted:
            num_outputs, num_inputs = shape
            a, b = names(name)
            found |= {a: (config.rank, num_inputs), b: (num_outputs, config.rank)}
    return found


def write(directory: Path, tensors: Mapping[str, Tensor], config: LoRAConfig, *, base: str) -> None:
    """Write whole tensors into an existing directory, as peft and vLLM read them over the weights of `base`."""
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
