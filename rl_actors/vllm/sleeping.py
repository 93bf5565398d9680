"""vLLM's sleep mode: an engine without requests gives the memory of its weights and its cache back to the device, and takes it again later.

Level 1 copies the weights to the host and back. Level 2 drops them, so the next pull must bring them. Both levels drop the cached keys and
values. vLLM takes this memory from an allocator of its own, which keeps the addresses. So CUDA graphs stay valid.
A CPU has no sleep mode. There the calls and their refusals are the same, but no memory is released.
"""

from typing import TYPE_CHECKING

import torch

from rl_actors.config import GeneratorConfig

if TYPE_CHECKING:
    from vllm import LLMEngine

LEVELS = (1, 2)


def options(config: GeneratorConfig) -> dict[str, object]:
    """vLLM's arguments. vLLM refuses a sleep mode on a CPU."""
    return {"enable_sleep_mode": True} if config.sleep_mode and torch.cuda.is_available() else {}


def require_possible(config: GeneratorConfig, level: int, *, has_transport: bool) -> None:
    """Raises ValueError naming the value and the reason if the generator cannot sleep at this level."""
    if level not in LEVELS:
        raise ValueError(f"sleep: level={level!r}; it must be 1 or 2")
    if not config.sleep_mode:
        raise ValueError("sleep is not possible with generator.sleep_mode=False: vLLM reserves its memory for good")
    if level == 2 and config.lora.syncs_adapter:
        raise ValueError(
            'sleep(level=2) would drop the weights under the adapters, which no pull brings (lora.sync="adapter"); use level 1'
        )
    if level == 2 and not has_transport:
        raise ValueError(
            "sleep(level=2) would drop the weights, and without a transport nothing brings them; use level 1"
        )


def fall_asleep(engine: "LLMEngine", level: int) -> int:
    """Release the memory. Returns the number of bytes over all ranks; 0 on a CPU."""
    engine.reset_prefix_cache()
    num_bytes = _releasable_bytes(engine)
    if torch.cuda.is_available():
        engine.sleep(level=level)
    return num_bytes


def wake_up(engine: "LLMEngine") -> int:
    """Take the memory back. Returns the number of bytes over all ranks; 0 on a CPU."""
    if torch.cuda.is_available():
        engine.wake_up()
    return _releasable_bytes(engine)


def asleep(call: str) -> RuntimeError:
    """The error of a call that comes while the generator sleeps."""
    return RuntimeError(f"{call} is not possible while the generator sleeps: call wake first")


def _releasable_bytes(engine: "LLMEngine") -> int:
    return sum(engine.collective_rpc("releasable_bytes"))
