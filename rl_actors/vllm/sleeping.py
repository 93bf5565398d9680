"""vLLM's sleep mode: an engine without requests frees the GPU memory of its weights and its cache, and allocates this memory again later.

Level 1 copies the weights to host memory and back. Level 2 drops the weights. After such a sleep the generator must pull a trainer's weights
before it can generate. Both levels drop the cached keys and values. vLLM's own allocator keeps the addresses of this memory, so CUDA graphs
stay valid. vLLM has no sleep mode on a CPU. A generator on a CPU releases no memory, but allows and refuses the same calls as on a GPU.
"""

from typing import TYPE_CHECKING

import torch

from rl_actors.config import GeneratorConfig

if TYPE_CHECKING:
    from vllm import LLMEngine

LEVELS = (1, 2)


def options(config: GeneratorConfig) -> dict[str, object]:
    """Arguments of vLLM's engine for the sleep mode. Empty if config.sleep_mode is False, and on a CPU, where vLLM
    would refuse them.
    """
    return {"enable_sleep_mode": True} if config.sleep_mode and torch.cuda.is_available() else {}


def require_possible(config: GeneratorConfig, level: int, *, has_transport: bool) -> None:
    """Raises ValueError naming the value and the reason if the generator cannot sleep at this level."""
    if level not in LEVELS:
        raise ValueError(f"sleep: level={level!r}; it must be 1 or 2")
    if not config.sleep_mode:
        raise ValueError("sleep is not possible with generator.sleep_mode=False: vLLM cannot release its memory then")
    if level == 2 and config.lora.syncs_adapter:
        raise ValueError(
            'sleep(level=2) would drop the base weights, and with lora.sync="adapter" a pull brings only the adapters; use level 1'
        )
    if level == 2 and not has_transport:
        raise ValueError(
            "sleep(level=2) would drop the weights, and without a transport no pull can bring them back; use level 1"
        )


def fall_asleep(engine: "LLMEngine", level: int) -> int:
    """Release the memory of weights and cache. Returns the number of released bytes, summed over all ranks (0 on a CPU)."""
    engine.reset_prefix_cache()
    num_bytes = _releasable_bytes(engine)
    if torch.cuda.is_available():
        engine.sleep(level=level)
    return num_bytes


def wake_up(engine: "LLMEngine") -> int:
    """Allocate the memory again. Returns the number of allocated bytes, summed over all ranks (0 on a CPU)."""
    if torch.cuda.is_available():
        engine.wake_up()
    return _releasable_bytes(engine)


def asleep(call: str) -> RuntimeError:
    """The error with which a sleeping generator refuses a call. call: name of the call."""
    return RuntimeError(f"{call} is not possible while the generator sleeps: call wake first")


def _releasable_bytes(engine: "LLMEngine") -> int:
    return sum(engine.collective_rpc("releasable_bytes"))
