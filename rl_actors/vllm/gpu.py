"""vLLM's options on a GPU, such as CUDA graphs, and the limits of its GPU kernels. This module and cpu.py implement `Machine` in start.py."""

import contextlib
from typing import TYPE_CHECKING

import torch

from rl_actors.config import GeneratorConfig
from rl_actors.processes import threads

if TYPE_CHECKING:
    from torch import nn

# FlashInfer's sampler is off, because its first use compiles it for minutes and needs nvcc.
ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
BATCHED_TOKENS = 8192
"""Largest number of tokens in one step of vLLM, unless max_num_seqs is larger. In a larger step vLLM would process more tokens
of new prompts, and running requests would wait longer for their next token."""
BATCH_INVARIANT_CAPABILITY = (9, 0)
"""Lowest compute capability of a GPU on which vLLM's batch-invariant kernels run."""


def require_possible(config: GeneratorConfig) -> None:
    """Raises ValueError naming the value and the reason if vLLM 0.32 cannot run this config on this GPU."""
    if config.has_adapters and config.dtype == "float32":
        other = 'lora.sync="merged"' if config.lora.syncs_adapter else "generator.max_adapters=0"
        raise ValueError(
            f'generator.dtype="float32" with {config.adapters_field()} on a GPU: vLLM\'s kernels for adapters do not support '
            f'float32; set generator.dtype="bfloat16" or {other}'
        )
    if config.batch_invariant:
        capability = torch.cuda.get_device_capability()
        if capability < BATCH_INVARIANT_CAPABILITY:
            raise ValueError(
                f"generator.batch_invariant=True on a GPU of compute capability {'.'.join(map(str, capability))}; "
                f"vLLM's batch-invariant kernels need {'.'.join(map(str, BATCH_INVARIANT_CAPABILITY))} or later"
            )


def options(config: GeneratorConfig) -> dict[str, object]:
    """vLLM's arguments. Decoding runs in CUDA graphs, unless config.enforce_eager is True.

    The model is not compiled, because that would take minutes.
    The function also limits the number of processor cores that torch uses for operations of the calling thread. So call it on the thread that
    will run the engine.
    """
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

    threads.prepare_gpu_process()
    chosen: dict[str, object] = {
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "max_num_batched_tokens": batched_tokens(config),
        "enforce_eager": config.enforce_eager,
    }
    if not config.enforce_eager:
        chosen["compilation_config"] = CompilationConfig(
            mode=CompilationMode.NONE,
            cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
            cudagraph_capture_sizes=graph_sizes(config.max_num_seqs),
        )
    return chosen


def batched_tokens(config: GeneratorConfig) -> int:
    """Largest number of tokens in one step of vLLM.

    The number is at most max_num_seqs * max_model_len. vLLM warns of a larger number, which can also make its engine core fail. An example
    on an H200: with max_num_seqs=4, max_model_len=130 and the number 8,192, the core ended at its start with "illegal memory access".
    """
    return min(max(config.max_num_seqs, BATCHED_TOKENS), config.max_num_seqs * config.max_model_len)


def prepare_worker() -> None:
    """Does nothing: vLLM's own kernels apply adapters on a GPU."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences for which a CUDA graph is captured. A batch of another size is padded to the next larger number.

    graph_sizes(200) -> [1, 2, 4, …, 32, 64, 128, 192, 200]
    """
    powers = [1 << exponent for exponent in range(6)]
    multiples = list(range(64, max_num_seqs, 64))
    return sorted({min(size, max_num_seqs) for size in [*powers, *multiples, max_num_seqs]})


def reloading(model: "nn.Module") -> contextlib.AbstractContextManager[None]:
    """Context manager for a reload of all weights. It does nothing, because on a GPU vLLM's own reload is enough."""
    return contextlib.nullcontext()
