"""vLLM on a GPU: options, CUDA graphs, limits of kernels."""

import contextlib
from typing import TYPE_CHECKING

import torch

from rl_actors import memory_estimate
from rl_actors.config import GeneratorConfig, TrainerConfig
from rl_actors.processes import mps, threads

if TYPE_CHECKING:
    from torch import nn

# compiles for minutes at its first use, and needs nvcc
ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
GIB = 1 << 30
LOGITS_BYTES = 14
"""For each logit of a step: in the model's dtype, and three copies in float32 while it samples."""
OVERHEAD_BYTES = 2 * GIB
"""CUDA context, kernels' workspaces and CUDA graphs of an engine."""
BATCHED_TOKENS = 8192
"""Of one step, unless max_num_seqs is larger. More would delay running requests."""
BATCH_INVARIANT_CAPABILITY = (9, 0)
"""Lowest compute capability for vLLM's batch-invariant kernels."""
FLOAT8_CAPABILITY = (8, 9)
"""Lowest compute capability with matrix products in float8."""
QUANTIZATIONS = {"fp8": "fp8_per_channel"}
"""vLLM's names. Per-channel scales of weights and per-token scales of activations."""


def require_possible(config: GeneratorConfig) -> None:
    """Raises ValueError if vLLM 0.32 cannot run this config on this GPU."""
    if config.has_adapters and config.dtype == "float32":
        other = 'lora.sync="merged"' if config.lora.syncs_adapter else "generator.max_adapters=0"
        raise ValueError(
            f'generator.dtype="float32" with {config.adapters_field()} on a GPU: vLLM\'s kernels for adapters do not support '
            f'float32; set generator.dtype="bfloat16" or {other}'
        )
    needed = {
        "generator.batch_invariant=True": (config.batch_invariant, BATCH_INVARIANT_CAPABILITY),
        f'generator.quantization="{config.quantization}"': (config.quantization is not None, FLOAT8_CAPABILITY),
    }
    for field, (is_set, lowest) in needed.items():
        if is_set and (capability := torch.cuda.get_device_capability()) < lowest:
            raise ValueError(
                f"{field} on a GPU of compute capability {'.'.join(map(str, capability))}; vLLM's kernels for it need "
                f"{'.'.join(map(str, lowest))} or later"
            )


def options(config: GeneratorConfig) -> dict[str, object]:
    """vLLM's arguments, without compilation, which would take minutes. Call it on the engine's thread."""
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

    threads.prepare_gpu_process()
    mps.join()
    chosen: dict[str, object] = {
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": kv_cache_bytes(config),
        "max_num_batched_tokens": batched_tokens(config),
        "enforce_eager": config.enforce_eager,
        "quantization": config.quantization and QUANTIZATIONS[config.quantization],
    }
    if not config.enforce_eager:
        chosen["compilation_config"] = CompilationConfig(
            mode=CompilationMode.NONE,
            cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
            cudagraph_capture_sizes=graph_sizes(config.max_num_seqs),
        )
    return chosen


def kv_cache_bytes(config: GeneratorConfig) -> int | None:
    """For vLLM; None: it measures what is left of its share.

    Processes that start on a GPU at the same time cannot measure. Raises ValueError if nothing is left.
    """
    if config.kv_cache_bytes is not None or not config.shares_gpu:
        return config.kv_cache_bytes
    from vllm.platforms import current_platform

    model = config.model
    share = round(config.gpu_memory_utilization * current_platform.get_device_total_memory())
    num_parameters = memory_estimate.num_parameters(TrainerConfig(model=model))
    weights = num_parameters * memory_estimate.BYTES[config.dtype] // config.tensor_parallel
    logits = LOGITS_BYTES * config.max_num_seqs * model.vocab_size
    hidden = 4 * batched_tokens(config) * (2 * model.intermediate_size + 8 * model.hidden_size)
    left = share - weights - logits - hidden - OVERHEAD_BYTES
    if left <= 0:
        raise ValueError(
            f"an engine's share of the GPU is {share / GIB:.1f} GiB, of which weights and activations take {(share - left) / GIB:.1f}; "
            "raise generator.gpu_memory_utilization, or lower generator.engines_per_gpu or max_num_seqs"
        )
    return left


def batched_tokens(config: GeneratorConfig) -> int:
    """Of one step: above max_num_seqs * max_model_len (4 * 130) an H200's core died of 8,192."""
    return min(max(config.max_num_seqs, BATCHED_TOKENS), config.max_num_seqs * config.max_model_len)


def prepare_worker() -> None:
    """Does nothing: vLLM's kernels apply adapters."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes with a CUDA graph. Others are padded to the next.

    graph_sizes(200) -> [1, 2, 4, …, 32, 64, 128, 192, 200]
    """
    powers = [1 << exponent for exponent in range(6)]
    multiples = list(range(64, max_num_seqs, 64))
    return sorted({min(size, max_num_seqs) for size in [*powers, *multiples, max_num_seqs]})


def reloading(model: "nn.Module") -> contextlib.AbstractContextManager[None]:
    """Does nothing: vLLM's reload is enough."""
    return contextlib.nullcontext()
