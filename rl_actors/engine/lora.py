"""Low-rank adapters by torchtitan's converter: y = W x + (alpha / rank) B A x, with A and B trained and W frozen (arXiv 2106.09685).

Here: which layers, reproducible first values, merged weights, and a directory for peft. Nothing here trains.
"""

import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.qwen3 import Qwen3Model

from rl_actors.config import LoRAConfig
from rl_actors.engine.gather import whole_tensors

# torchtitan's config of a layer -> the modules that peft calls it; wk and wv are built from one config.
ATTENTION = {"wq": ("q_proj",), "wkv": ("k_proj", "v_proj"), "wo": ("o_proj",)}
MLP = {"w1": ("gate_proj",), "w2": ("down_proj",), "w3": ("up_proj",)}
UNEMBED = {"lm_head": ("lm_head",)}


def targets(config: LoRAConfig) -> dict[str, tuple[str, ...]]:
    """Which layers get adapters: torchtitan's names, and peft's."""
    parts = ((config.train_attn, ATTENTION), (config.train_mlp, MLP), (config.train_unembed, UNEMBED))
    return {name: peft_names for wanted, part in parts if wanted for name, peft_names in part.items()}


def convert(model_config: Qwen3Model.Config, config: LoRAConfig) -> Qwen3Model.Config:
    """The model's config with adapters, everything else frozen; unchanged when rank is 0."""
    if not config.rank:
        return model_config
    converter = LoRAConverter.Config(rank=config.rank, alpha=config.alpha, target_modules=list(targets(config)))
    return converter.build().convert(model_config)


def initialise(model: nn.Module, seed: int) -> None:
    """A uniform as peft draws it (kaiming, a = sqrt(5)), B zero; the same values in every layout."""
    for name, layer in _layers(model):
        # Of the layer's own, because a pipeline stage has some of the layers.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        weight = layer.lora_a.weight.detach()
        whole = torch.empty(weight.shape)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        whole = whole.to(weight.device)
        if isinstance(weight, DTensor):
            whole = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
        weight.copy_(whole)


def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """model.state_dict() with W + (alpha / rank) B A in the place of W and no adapters; itself when there are none."""
    state = model.state_dict()
    for name, layer in _layers(model):
        a_RI, b_OR = state.pop(f"{name}.lora_a.weight"), state.pop(f"{name}.lora_b.weight")
        weight_OI = state[f"{name}.weight"]
        delta_OI = layer._lora_scaling * (b_OR.detach() @ a_RI.detach())
        if isinstance(delta_OI, DTensor):
            delta_OI = delta_OI.redistribute(weight_OI.device_mesh, weight_OI.placements)
        state[f"{name}.weight"] = weight_OI.detach() + delta_OI
    return state


def checkpointed(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of the model holds: the adapters alone, when there are any."""
    state = model.state_dict()
    names = {f"{name}.{part}.weight" for name, _ in _layers(model) for part in ("lora_a", "lora_b")}
    return {name: tensor for name, tensor in state.items() if name in names} if names else state


def export(model: nn.Module, config: LoRAConfig, path: str, *, to_hf, base: str) -> Callable[[], None]:
    """Gather the adapters; returns what rank 0 is to call to write them as peft and vLLM read them over `base`: whole or not there."""
    target, partial = Path(path), Path(f"{path}.partial")
    tensors: dict[str, Tensor] = {}
    for name, whole in whole_tensors(checkpointed(model)):
        if whole is not None:
            layer, part, _ = name.rsplit(".", 2)
            (hf_name,) = to_hf({f"{layer}.weight": torch.empty(0)})
            peft_part = {"lora_a": "lora_A", "lora_b": "lora_B"}[part]
            tensors[f"base_model.model.{hf_name.removesuffix('.weight')}.{peft_part}.weight"] = whole.contiguous()
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
        "target_modules": [name for names in targets(config).values() for name in names],
    }

    def write() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "adapter_config.json").write_text(json.dumps(values, indent=2) + "\n")
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        partial.rename(target)

    return write


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((canonical_fqn(name), module) for name, module in model.named_modules() if hasattr(module, "lora_a"))
