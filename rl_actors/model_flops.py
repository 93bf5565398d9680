"""FLOPs: how many a model needs, and how many a GPU can do in a second. Measures nothing."""

from collections.abc import Iterable

from rl_actors.config import TrainerConfig
from rl_actors.model_config import ModelConfig

PEAKS = {"H100 80GB HBM3": 989e12, "H200": 989e12}
"""Part of the GPU's name -> peak in dense bfloat16, FLOPs per second. float8: twice as many."""


def product_parameters(model: ModelConfig) -> int:
    """Parameters that multiply one token: routed experts only, with the output head, without the
    embedding (a lookup).
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
    """FLOPs of forward and backward per token of a document of this length, without recomputation.

    6 per parameter of a matrix product (4 if the weights are not trained, as with adapters), and 12
    per block, head and head dimension for each position attended to, on average half the document.
    """
    heads = model.num_attention_heads * model.head_dim
    per_parameter = 6 if trains_weights else 4
    return per_parameter * product_parameters(model) + 12 * model.num_hidden_layers * heads * document / 2


def training_flops(config: TrainerConfig, lengths: Iterable[int]) -> float:
    """FLOPs of one training pass over samples of these lengths, one document each."""
    trains_weights = config.lora.rank == 0
    flops = 0.0
    for length in lengths:
        flops += length * flops_per_token(config.model, length, trains_weights=trains_weights)
    return flops


def peak_flops(device_name: str, *, float8: bool = False) -> float | None:
    """FLOPs per second; None if PEAKS lacks the device, as any CPU."""
    for name, peak in PEAKS.items():
        if name in device_name:
            return peak * 2 if float8 else peak
    return None
