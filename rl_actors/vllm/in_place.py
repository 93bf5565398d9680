"""Copies a version of the weights straight into the parameters of a running vLLM model.

The first pull plans which slice each tensor fills. Where that is not possible, vLLM reloads.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rl_actors.transports.base import OpenVersion, Piece

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Target:
    """A part of a version's tensor, and the memory that gets it."""

    start: tuple[int, ...]  # of the part in the whole tensor
    values: Tensor  # a view of a parameter


Plan = Mapping[str, Target]
"""By name of the version's tensor."""


MODEL_TYPES = ("qwen3", "llama", "mistral")
"""model_type of the dense models that make_plan handles."""


def is_possible(model: nn.Module, config: "VllmConfig") -> bool:
    """True if vLLM computes with parameters in the form of the version."""
    return (
        next(model.parameters()).is_cuda
        and config.model_config.hf_config.model_type in MODEL_TYPES
        and config.model_config.quantization is None
        and config.lora_config is None
    )


def make_plan(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Plan:
    """Raises ValueError if a tensor has no place, or they do not fill every parameter exactly."""
    modules = dict(model.named_modules())
    plan = {name: _target(model, modules, name, shape) for name, shape in shapes.items()}
    filled: dict[int, int] = {}
    for target in plan.values():
        storage = target.values.untyped_storage().data_ptr()
        filled[storage] = filled.get(storage, 0) + target.values.numel()
    wrong = []
    for name, parameter in model.named_parameters():
        num_filled = filled.get(parameter.untyped_storage().data_ptr(), 0)
        if num_filled != parameter.numel() - _num_padded(modules[name.rpartition(".")[0]], parameter):
            wrong.append(f"{name}: {num_filled} of {parameter.numel()} values")
    if wrong:
        raise ValueError(f"the plan does not fill {len(wrong)} parameters, such as {wrong[0]}")
    return plan


@torch.no_grad()
def load_in_place(plan: Plan, version: OpenVersion) -> None:
    """Copy the version into the targets. Returns when all bytes have arrived."""
    for name, pieces in version.pieces():
        copy_pieces(plan[name], pieces)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def copy_pieces(target: Target, pieces: list[Piece]) -> None:
    """Copy what the pieces and the target have in common."""
    for piece in pieces:
        into: list[slice] = []
        out_of: list[slice] = []
        for target_start, target_size, start, size in zip(
            target.start, target.values.shape, piece.start, piece.values.shape, strict=True
        ):
            first = max(target_start, start)
            last = min(target_start + target_size, start + size)
            into.append(slice(first - target_start, last - target_start))
            out_of.append(slice(first - start, last - start))
        if all(part.stop > part.start for part in into):
            target.values[tuple(into)].copy_(piece.values[tuple(out_of)], non_blocking=True)


def _target(model: nn.Module, modules: Mapping[str, nn.Module], name: str, shape: tuple[int, ...]) -> Target:
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    module_name, _, parameter_name = name.rpartition(".")
    layer, part = _layer(model, modules, module_name)
    if not hasattr(layer, parameter_name):
        raise ValueError(f"the model's {type(layer).__name__} {module_name} has no {parameter_name}")
    parameter: Tensor = getattr(layer, parameter_name).data
    if part is not None:
        offset, start, size = _fused_rows(layer, part)
        return Target((start, *[0] * (len(shape) - 1)), parameter[offset : offset + size])
    if isinstance(layer, VocabParallelEmbedding):
        rows = layer.shard_indices
        start = rows.org_vocab_start_index
        end = rows.org_vocab_end_index
        return Target((start, 0), parameter[: end - start])
    if isinstance(layer, ColumnParallelLinear):
        return Target((layer.tp_rank * len(parameter), *[0] * (len(shape) - 1)), parameter)
    if isinstance(layer, RowParallelLinear) and parameter_name == "weight":
        return Target((0, layer.tp_rank * parameter.shape[1]), parameter)
    if tuple(parameter.shape) != shape:
        raise ValueError(
            f"{name} has the shape {shape}, but the model's {type(layer).__name__} has {tuple(parameter.shape)}"
        )
    return Target((0,) * len(shape), parameter)


def _layer(model: nn.Module, modules: Mapping[str, nn.Module], name: str) -> tuple[nn.Module, int | None]:
    """(vLLM's layer, index in a fused one or None) of Hugging Face's model.layers.0.self_attn.q_proj."""
    parent, _, leaf = name.rpartition(".")
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        if leaf in parts and f"{parent}.{fused}" in modules:
            return modules[f"{parent}.{fused}"], parts.index(leaf)
    if name not in modules:
        raise ValueError(f"the model has no module {name}")
    return modules[name], None


def _fused_rows(layer: nn.Module, part: int) -> tuple[int, int, int]:
    """(first row in this worker's parameter, first row in the version's tensor, number)."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

    if isinstance(layer, QKVParallelLinear):
        sizes = [layer.num_heads * layer.head_size, *[layer.num_kv_heads * layer.head_size] * 2]
        # with more workers than key-value heads several have the same
        rank = layer.tp_rank if part == 0 else layer.tp_rank // layer.num_kv_head_replicas
    elif isinstance(layer, MergedColumnParallelLinear):
        sizes = [size // layer.tp_size for size in layer.output_sizes]
        rank = layer.tp_rank
    else:
        raise ValueError(f"no plan for the fused layer {type(layer).__name__}")
    return sum(sizes[:part]), rank * sizes[part], sizes[part]


def _num_padded(layer: nn.Module, parameter: Tensor) -> int:
    """vLLM pads the vocabulary, a version does not."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if not isinstance(layer, VocabParallelEmbedding):
        return 0
    rows = layer.shard_indices
    num_rows = rows.org_vocab_end_index - rows.org_vocab_start_index
    return (len(parameter) - num_rows) * math.prod(parameter.shape[1:])
