"""Everything of the generator's vLLM that only a CPU needs: its threads, its options, what a reload of weights leaves out. gpu.py has the same names."""

import contextlib
from collections.abc import Iterator
from typing import Any

from rl_actors.config import GeneratorConfig
from rl_actors.processes import threads

# Helper kernels compiled at first use would cost twelve seconds.
ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
KV_CACHE_BYTES = 256 << 20
BATCHED_TOKENS = 4096
"""Prompt tokens of one step; what runs beside them waits for it."""

SPARSE_MODEL_TYPE = "qwen3_moe"
"""model_type in the config.json of a mixture of experts."""


def require_possible(config: GeneratorConfig) -> None:
    """Raises ValueError naming the value and the reason for what vLLM 0.32 cannot do on a CPU."""
    if config.lora.syncs_adapter and config.model.num_experts:
        raise ValueError(
            f'model.num_experts={config.model.num_experts} with lora.sync="adapter" on a CPU: '
            "vLLM then runs experts in a Triton kernel, which needs a GPU"
        )
    if config.batch_invariant:
        raise ValueError(
            "generator.batch_invariant=True on a CPU: vLLM's batch-invariant mode computes in Triton kernels, which need a GPU"
        )


def options(config: GeneratorConfig) -> dict[str, Any]:
    """vLLM's arguments; call it on the thread that is to run the engine."""
    from vllm.platforms import current_platform

    threads.prepare_cpu_process()
    type(current_platform).simple_compile_backend = "eager"
    return {
        "kv_cache_memory_bytes": config.kv_cache_bytes or KV_CACHE_BYTES,
        # vLLM 0.32 fails in a step that splits the prompt of a seeded request: "CPU Generator does not use offset".
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(config.max_model_len, config.max_num_seqs, BATCHED_TOKENS),
        "enforce_eager": True,
    }


@contextlib.contextmanager
def reloading(engine: Any) -> Iterator[None]:
    """Around a reload of all weights: kernels compute with weights packed from the model's."""
    engine.apply_model(_forget_packed_experts)
    yield
    engine.apply_model(_repack_tied_head)


def _forget_packed_experts(model: Any) -> None:
    """vLLM packs the experts of a block only while it makes their kernel; without one a reload makes it again.

    With one it puts the weights unpacked where the kernel reads packed ones, or fails where packing had padded them.
    """
    if model.config.model_type != SPARSE_MODEL_TYPE:
        return
    for experts in model.moe_layers:
        method = experts.routed_experts.quant_method
        if not hasattr(method, "moe_kernel"):
            raise AttributeError(f"{type(method).__name__} of vLLM has no moe_kernel that a reload could drop")
        method.moe_kernel = None


def _repack_tied_head(model: Any) -> None:
    """A reload leaves the kernel of a tied head with the weights it was packed from at start."""
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
