"""Everything of the generator's vLLM that only a GPU needs: decoding in CUDA graphs, kernels that some options want. cpu.py has the same names."""

import contextlib
from typing import Any

import torch

from rl_actors.config import GeneratorConfig
from rl_actors.processes import threads

ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # whose first use compiles for minutes, and needs nvcc
BATCHED_TOKENS = 8192
"""Prompt tokens of one step; what runs beside them waits for it."""
BATCH_INVARIANT_CAPABILITY = (9, 0)


def require_possible(config: GeneratorConfig) -> None:
    """Raises ValueError naming the value and the reason for what vLLM 0.32 cannot do on this GPU."""
    if config.lora.syncs_adapter and config.dtype == "float32":
        raise ValueError(
            'generator.dtype="float32" with lora.sync="adapter" on a GPU: vLLM\'s kernels for adapters take no float32; '
            "set bfloat16, or sync them merged"
        )
    if config.batch_invariant and (capability := torch.cuda.get_device_capability()) < BATCH_INVARIANT_CAPABILITY:
        raise ValueError(
            f"generator.batch_invariant=True on a GPU of compute capability {'.'.join(map(str, capability))}; "
            f"vLLM's batch-invariant kernels want {'.'.join(map(str, BATCH_INVARIANT_CAPABILITY))} or later"
        )


def options(config: GeneratorConfig) -> dict[str, Any]:
    """vLLM's arguments: decoding in CUDA graphs, without the minutes that compiling the model takes. Call it on the thread that is to run the engine."""
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

    threads.prepare_gpu_process()
    chosen: dict[str, Any] = {
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "max_num_batched_tokens": max(config.max_num_seqs, BATCHED_TOKENS),
        "enforce_eager": config.enforce_eager,
    }
    if not config.enforce_eager:
        chosen["compilation_config"] = CompilationConfig(
            mode=CompilationMode.NONE,
            cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
            cudagraph_capture_sizes=graph_sizes(config.max_num_seqs),
        )
    return chosen


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences that a graph is captured for; others run in the next larger one. graph_sizes(200) -> [1, 2, 4, …, 64, 128, 192, 200]"""
    small = [1 << i for i in range(6)]
    return sorted({min(size, max_num_seqs) for size in (*small, *range(64, max_num_seqs, 64), max_num_seqs)})


def reloading(engine: Any) -> contextlib.AbstractContextManager[None]:
    """Around a reload of all weights: nothing to add."""
    return contextlib.nullcontext()
