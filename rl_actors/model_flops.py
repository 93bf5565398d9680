"""Formulas for floating-point operations (FLOPs): how many a model needs, and how many a GPU can do in a second.

This module measures nothing.
"""

from collections.abc import Iterable

from rl_actors.config import TrainerConfig
from rl_actors.model_config import ModelConfig

PEAKS = {"H100 80GB HBM3": 989e12, "H200": 989e12}
"""Peaks of GPUs in dense bfloat16, in FLOPs per second. The peak in float8 is twice as high. Key: a part of the GPU's
name."""


def product_parameters(model: ModelConfig) -> int:
    """Number of the parameters by which the model multiplies the hidden states of one token.

    An expert's parameters count only if the token is routed to this expert. The output head counts. The embedding
    does not count, because it is a lookup.
    """
    hidden = model.hidden_size
    heads = model.num_attention_heads * model.head_dim
    groups = model.num_key_value_heads * model.head_dim
    parameters = model.vocab_size * hidden
    for layer in range(model.num_hidden_layers):
        parameters += hidden * (heads + 2 * groups) + heads * hidden
        if model.has_experts(layer):
            parameters += hidden * model.num_experts
            parameters += model.num_experts_per_tok * 3 * hidden * model.moe_intermediate_size
        else:
            parameters += 3 * hidden * model.intermediate_size
    return parameters


def flops_per_token(model: ModelConfig, document: float, *, trains_weights: bool = True) -> float:
    """FLOPs of the forward and backward pass of one token. document: length in tokens of the document that the
    token is in. Recomputation does not count.

    Each parameter of a matrix product costs 6 FLOPs. Each position that the token attends to costs 12 FLOPs per block,
    per head and per dimension of the head. A token attends to itself and to the earlier positions of its document, on
    average to half of the document. With trains_weights=False, as in a run that trains adapters, the gradients of the
    weights are not computed, so a parameter costs 4 FLOPs.
    """
    heads = model.num_attention_heads * model.head_dim
    per_parameter = 6 if trains_weights else 4
    return per_parameter * product_parameters(model) + 12 * model.num_hidden_layers * heads * document / 2


def training_flops(config: TrainerConfig, lengths: Iterable[int]) -> float:
    """FLOPs of one training pass over samples of these lengths. Each sample is one document."""
    trains_weights = config.lora.rank == 0
    flops = 0.0
    for length in lengths:
        flops += length * flops_per_token(config.model, length, trains_weights=trains_weights)
    return flops


def peak_flops(device_name: str, *, float8: bool = False) -> float | None:
    """The peak of the device with this name, in FLOPs per second. None if PEAKS does not have the device, as for every CPU."""
    for name, peak in PEAKS.items():
        if name in device_name:
            return peak * 2 if float8 else peak
    return None
