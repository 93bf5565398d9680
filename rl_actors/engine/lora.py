"""Low-rank adapters (LoRA, arXiv 2106.09685): y = W x + (alpha / rank) B A x. A and B are trained, and W is frozen.

torchtitan's converter puts the adapters into the model. This module gives them reproducible initial values, merges them into the weights, and
writes them as a directory for peft.

In shapes, R is the rank of an adapter, and I and O are the numbers of inputs and outputs of a linear layer.
"""

import math
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.qwen3 import Qwen3Model

from rl_actors import adapters
from rl_actors.config import LoRAConfig
from rl_actors.engine.collectives import whole_tensors
from rl_actors.engine.initial_weights import assign

ToHF = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Function that renames tensors from torchtitan's names to Hugging Face's names."""


def convert(model_config: Qwen3Model.Config, config: LoRAConfig) -> Qwen3Model.Config:
    """The model's config with adapters. All parameters but the adapters are frozen. If config.rank is 0, the model's config is returned unchanged."""
    if not config.rank:
        return model_config
    converter = LoRAConverter.Config(
        rank=config.rank, alpha=config.alpha, target_modules=list(adapters.targets(config))
    )
    return converter.build().convert(model_config)


def require_found(model: nn.Module, config: LoRAConfig) -> None:
    """Raises RuntimeError if the model has adapters and the trained parameters are not exactly the adapters that this module finds.

    This module finds adapters by the names that torchtitan gives them. If torchtitan used other names, this module would find no adapters, and
    a push would publish the frozen weights without the adapters.
    """
    if not config.rank:
        return
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = {f"{name}.{part}.weight" for name, _ in _layers(model) for part in ("lora_a", "lora_b")}
    if trained != found:
        raise RuntimeError(
            f"the trained parameters of the model are not the adapters; only one of the two sets has {sorted(trained ^ found)}"
        )


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Draw A uniformly as peft does (kaiming, a = sqrt(5)), and set B to zero. The values are the same in every parallel layout."""
    for name, layer in _layers(model):
        # Each layer has a random generator of its own, seeded with `seed` and the layer's name. So a pipeline stage that draws only for its own
        # layers gets the same values as a process that draws for all layers.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        whole = torch.empty(layer.lora_a.weight.shape)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        assign(layer.lora_a.weight, whole)
        layer.lora_b.weight.zero_()


def merged(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` with W + (alpha / rank) B A instead of W, A and B. If the model has no adapters, the state is returned unchanged."""
    state = dict(state)
    for name, layer in _layers(model):
        a_RI = state.pop(f"{name}.lora_a.weight")
        b_OR = state.pop(f"{name}.lora_b.weight")
        weight_OI = state[f"{name}.weight"]
        delta_OI = layer._lora_scaling * (b_OR.detach() @ a_RI.detach())
        if isinstance(delta_OI, DTensor):
            delta_OI = delta_OI.redistribute(weight_OI.device_mesh, weight_OI.placements)
        state[f"{name}.weight"] = weight_OI.detach() + delta_OI
    return state


def checkpointed(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a checkpoint holds: the adapters if there are any, otherwise the whole state of the model."""
    state = model.state_dict()
    names = {f"{name}.{part}.weight" for name, _ in _layers(model) for part in ("lora_a", "lora_b")}
    return {name: tensor for name, tensor in state.items() if name in names} if names else state


def peft_state_dict(model: nn.Module, to_hf: ToHF) -> dict[str, Tensor]:
    """The adapters under peft's names, sharded as in the model. to_hf: the method `to_hf` of torchtitan's state-dict adapter."""
    state = model.state_dict()
    found: dict[str, Tensor] = {}
    for name, _ in _layers(model):
        (hf_name,) = to_hf({f"{name}.weight": torch.empty(0)})
        a, b = adapters.names(hf_name)
        found |= {a: state[f"{name}.lora_a.weight"], b: state[f"{name}.lora_b.weight"]}
    return found


def gather(model: nn.Module, to_hf: ToHF) -> dict[str, Tensor]:
    """The whole adapters under peft's names, on the CPU of rank 0. Other ranks get an empty dict. All ranks must call this together."""
    gathered = whole_tensors(peft_state_dict(model, to_hf))
    return {name: whole.contiguous() for name, whole in gathered if whole is not None}


def write(tensors: dict[str, Tensor], config: LoRAConfig, path: str, *, base: str) -> None:
    """Write gathered adapters in the form that peft and vLLM load for the model in `base`. `path` appears only when it is complete."""
    target = Path(path)
    partial = Path(f"{path}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    adapters.write(partial, tensors, config, base=base)
    partial.rename(target)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((canonical_fqn(name), module) for name, module in model.named_modules() if hasattr(module, "lora_a"))
