"""Support for vLLM on a CPU: its options, the setup of its process, and a context manager for a reload of weights.

gpu.py has functions of the same names for a GPU.
"""

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
    # torch.compile is off. It would compile vLLM's helper kernels at their first use, which takes twelve seconds.
    "TORCH_COMPILE_DISABLE": "1",
    # oneDNN builds a kernel for each layer and each number of input rows, and keeps it. A kernel takes about 0.4 MiB.
    # oneDNN keeps up to 1,024 kernels by default, so the memory of the process would grow over many thousand requests.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
}
KV_CACHE_BYTES = 256 << 20
BATCHED_TOKENS = 4096
"""Largest number of tokens in one step of vLLM, unless max_model_len or max_num_seqs is larger. In a larger step vLLM would
process more tokens of new prompts, and running requests would wait longer for their next token."""

ADAPTERS = "rl_actors.vllm.cpu_adapters.GroupedAdapters"
"""Class that applies LoRA adapters. It replaces vLLM's PunicaWrapperCPU."""

HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of an attention head for which vLLM 0.32 has a kernel on a CPU."""

SPARSE_MODEL_TYPE = "qwen3_moe"
"""model_type in the config.json of a mixture of experts."""


def require_possible(config: GeneratorConfig) -> None:
    """Raises ValueError naming the value and the reason if vLLM 0.32 cannot run this config on a CPU."""
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
    if config.batch_invariant:
        raise ValueError(
            "generator.batch_invariant=True on a CPU: vLLM's batch-invariant mode computes in Triton kernels, which need a GPU"
        )


def options(config: GeneratorConfig) -> dict[str, object]:
    """vLLM's arguments.

    This function also sets up the process. Call it on the thread that will run the engine, because afterwards only the
    calling thread computes with several threads.
    """
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


def prepare_worker() -> None:
    """Make vLLM's worker in this process apply adapters with cpu_adapters.py.

    Must be called before the worker loads the model.
    """
    from vllm.platforms import current_platform

    type(current_platform).get_punica_wrapper = staticmethod(lambda: ADAPTERS)


@contextlib.contextmanager
def reloading(model: "nn.Module") -> Iterator[None]:
    """Context manager for a reload of all weights.

    vLLM's CPU kernels compute with packed weights, which means that the weights are in the kernel's own memory layout.
    The context manager makes vLLM pack the new weights, too.
    """
    _forget_packed_experts(model)
    yield
    _repack_tied_head(model)


def _forget_packed_experts(model: "nn.Module") -> None:
    """Drop the kernels of the experts, so that a reload builds them again.

    vLLM packs expert weights only when it builds the kernel. If the old kernel stayed, a reload would write unpacked
    weights into the memory from which the kernel reads packed weights. Or the reload would fail, because packed weights
    are padded.
    """
    if model.config.model_type != SPARSE_MODEL_TYPE:
        return
    for experts in model.moe_layers:
        method = experts.routed_experts.quant_method
        if not hasattr(method, "moe_kernel"):
            raise AttributeError(f"{type(method).__name__} of vLLM has no moe_kernel that a reload could drop")
        method.moe_kernel = None


def _repack_tied_head(model: "nn.Module") -> None:
    """Pack the weights of a tied head again, because a reload leaves the old weights in the head's kernel."""
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
