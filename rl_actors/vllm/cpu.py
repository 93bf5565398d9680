"""vLLM on a CPU: options, setup of the process, reloads."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_actors.config import GeneratorConfig
from rl_actors.model_config import ModelConfig
from rl_actors.processes import threads

if TYPE_CHECKING:
    from torch import nn

ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # torch.compile would take twelve seconds for helper kernels
    "TORCH_COMPILE_DISABLE": "1",
    # by default oneDNN keeps 1,024 kernels (0.4 MiB), each for a layer and a number of rows
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
}
KV_CACHE_BYTES = 256 << 20
BATCHED_TOKENS = 4096
"""Of one step, unless max_model_len or max_num_seqs is larger, so as not to delay other requests."""

ADAPTERS = "rl_actors.vllm.cpu_adapters.GroupedAdapters"
"""Replaces vLLM's PunicaWrapperCPU."""

HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of a head with a kernel on a CPU in vLLM 0.32."""

SPARSE_MODEL_TYPE = "qwen3_moe"


def require_possible(config: GeneratorConfig) -> None:
    """Raises ValueError if vLLM 0.32 cannot run this config on a CPU."""
    model = ModelConfig.from_hf(config.hf_path) if config.hf_path else config.model
    if config.has_adapters and model.num_experts:
        raise ValueError(
            f"model.num_experts={model.num_experts} with {config.adapters_field()} on a CPU: "
            "with adapters vLLM runs the experts in a Triton kernel, which needs a GPU"
        )
    if model.head_dim not in HEAD_DIMS:
        raise ValueError(
            f"model.head_dim={model.head_dim} on a CPU: vLLM's attention on CPUs supports only head_dim {', '.join(map(str, HEAD_DIMS))}"
        )
    if config.quantization is not None:
        raise ValueError(
            f'generator.quantization="{config.quantization}" on a CPU: vLLM\'s float8 kernels need a GPU; leave it out'
        )
    if config.batch_invariant:
        raise ValueError(
            "generator.batch_invariant=True on a CPU: vLLM's batch-invariant mode computes in Triton kernels, which need a GPU"
        )


def options(config: GeneratorConfig) -> dict[str, object]:
    """vLLM's arguments. Then only the calling thread, the engine's, computes with several threads."""
    from vllm.platforms import current_platform

    threads.prepare_cpu_process()
    type(current_platform).simple_compile_backend = "eager"
    return {
        "kv_cache_memory_bytes": config.kv_cache_bytes or KV_CACHE_BYTES,
        # vLLM 0.32 fails in a split prompt of a seeded request: "CPU Generator does not use offset"
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(config.max_model_len, config.max_num_seqs, BATCHED_TOKENS),
        "enforce_eager": True,
    }


def prepare_worker() -> None:
    """Make this process's worker use cpu_adapters.py. Before it loads the model."""
    from vllm.platforms import current_platform

    type(current_platform).get_punica_wrapper = staticmethod(lambda: ADAPTERS)


@contextlib.contextmanager
def reloading(model: "nn.Module") -> Iterator[None]:
    """Makes a reload pack the weights again into the layouts of the CPU kernels."""
    _forget_packed_experts(model)
    yield
    _repack_tied_head(model)


def _forget_packed_experts(model: "nn.Module") -> None:
    """Drop the experts' kernels, because vLLM packs weights only when it builds one."""
    if model.config.model_type != SPARSE_MODEL_TYPE:
        return
    for experts in model.moe_layers:
        method = experts.routed_experts.quant_method
        if not hasattr(method, "moe_kernel"):
            raise AttributeError(f"{type(method).__name__} of vLLM has no moe_kernel that a reload could drop")
        method.moe_kernel = None


def _repack_tied_head(model: "nn.Module") -> None:
    """A reload leaves the old weights in a tied head's kernel."""
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
