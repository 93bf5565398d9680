"""The part of the generator's vLLM that only a CPU needs: threads, options, repairs after a reload.

gpu.py defines the same names for a GPU.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_actors.config import GeneratorConfig
from rl_actors.model_config import ModelConfig
from rl_actors.processes import threads

if TYPE_CHECKING:
    from torch import nn
    from vllm import LLMEngine

# torch.compile is off, because compiling helper kernels at their first use would take twelve seconds.
ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
KV_CACHE_BYTES = 256 << 20
BATCHED_TOKENS = 4096
"""Limit of the tokens in one vLLM step, raised if the config needs more. Running requests wait until a step with prompt tokens is done."""

HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of a head for which vLLM 0.32 has an attention kernel on a CPU."""

SPARSE_MODEL_TYPE = "qwen3_moe"
"""model_type in the config.json of a mixture of experts."""


def require_possible(config: GeneratorConfig) -> None:
    """Raises ValueError naming the value and the reason if vLLM 0.32 cannot run this config on a CPU."""
    if config.lora.syncs_adapter and config.model.num_experts:
        raise ValueError(
            f'model.num_experts={config.model.num_experts} with lora.sync="adapter" on a CPU: '
            "vLLM then runs experts in a Triton kernel, which needs a GPU"
        )
    model = ModelConfig.from_hf(config.hf_path) if config.hf_path else config.model
    if model.head_dim not in HEAD_DIMS:
        raise ValueError(
            f"model.head_dim={model.head_dim} on a CPU: vLLM's attention there supports only widths of {', '.join(map(str, HEAD_DIMS))}"
        )
    if config.batch_invariant:
        raise ValueError(
            "generator.batch_invariant=True on a CPU: vLLM's batch-invariant mode computes in Triton kernels, which need a GPU"
        )


def options(config: GeneratorConfig) -> dict[str, object]:
    """vLLM's arguments. Call it on the thread that will run the engine, since it also sets up the process."""
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
def reloading(engine: "LLMEngine") -> Iterator[None]:
    """Context manager for a reload of all weights. vLLM's CPU kernels compute with packed copies of the weights, which it renews."""
    engine.apply_model(_forget_packed_experts)
    yield
    engine.apply_model(_repack_tied_head)


def _forget_packed_experts(model: "nn.Module") -> None:
    """Drop the expert kernels, so that a reload rebuilds them.

    vLLM packs expert weights only when it builds the kernel. With an old kernel in place a reload would write unpacked weights where
    packed ones are read, or fail on their padding.
    """
    if model.config.model_type != SPARSE_MODEL_TYPE:
        return
    for experts in model.moe_layers:
        method = experts.routed_experts.quant_method
        if not hasattr(method, "moe_kernel"):
            raise AttributeError(f"{type(method).__name__} of vLLM has no moe_kernel that a reload could drop")
        method.moe_kernel = None


def _repack_tied_head(model: "nn.Module") -> None:
    """Pack a tied head again. A reload leaves its kernel with the weights from before."""
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
