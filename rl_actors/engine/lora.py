"""Low-rank adapters (LoRA, arXiv 2106.09685): y = W x + (alpha / rank) B A x.

R rank, I and O inputs and outputs of a linear layer.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.qwen3 import Qwen3Model

from rl_actors import adapters
from rl_actors.config import LoRAConfig
from rl_actors.engine.initial_weights import assign

ToHF = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""torchtitan's names -> Hugging Face's."""
LORA_A = ".lora_a.weight"
LORA_B = ".lora_b.weight"


def convert(model_config: Qwen3Model.Config, config: LoRAConfig) -> Qwen3Model.Config:
    """The model's config with adapters as the only trained parameters, or unchanged for rank 0."""
    if not config.rank:
        return model_config
    converter = LoRAConverter.Config(
        rank=config.rank, alpha=config.alpha, target_modules=list(adapters.targets(config))
    )
    return converter.build().convert(model_config)


def require_found(model: nn.Module, config: LoRAConfig) -> None:
    """Raises RuntimeError if the trained parameters are not the adapters that are found by name.

    If torchtitan renamed them, a push would publish the weights without them.
    """
    if not config.rank:
        return
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = {name + part for name, _ in _layers(model) for part in (LORA_A, LORA_B)}
    if trained != found:
        raise RuntimeError(
            f"the trained parameters of the model are not the adapters; only one of the two sets has {sorted(trained ^ found)}"
        )


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """A as in peft (kaiming uniform, a = sqrt(5)), B zero, the same in every layout."""
    for name, layer in _layers(model):
        # a generator for each layer, so that a pipeline stage draws what a whole model would
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        whole = torch.empty(layer.lora_a.weight.shape)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        assign(layer.lora_a.weight, whole)
        layer.lora_b.weight.zero_()


def merged(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` with W + (alpha / rank) B A in the place of W, A and B."""
    state = dict(state)
    for name, layer in _layers(model):
        a_RI = state.pop(name + LORA_A)
        b_OR = state.pop(name + LORA_B)
        weight_OI = state[f"{name}.weight"]
        delta_OI = layer._lora_scaling * (b_OR.detach() @ a_RI.detach())
        if isinstance(delta_OI, DTensor):
            delta_OI = delta_OI.redistribute(weight_OI.device_mesh, weight_OI.placements)
        state[f"{name}.weight"] = weight_OI.detach() + delta_OI
    return state


def checkpointed(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds: the adapters, or without adapters the whole state."""
    state = model.state_dict()
    return {name: tensor for name, tensor in state.items() if name.endswith((LORA_A, LORA_B))} or state


def to_peft(state: Mapping[str, Tensor], to_hf: ToHF) -> dict[str, Tensor]:
    """The adapters of a model's state under peft's names."""
    found: dict[str, Tensor] = {}
    for name in state:
        if name.endswith(LORA_A):
            module = name.removesuffix(LORA_A)
            (hf_name,) = to_hf({f"{module}.weight": torch.empty(0)})
            a, b = adapters.names(hf_name)
            found |= {a: state[name], b: state[module + LORA_B]}
    return found


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((canonical_fqn(name), module) for name, module in model.named_modules() if hasattr(module, "lora_a"))
