"""vLLM's sleep mode: an idle engine frees the GPU memory of weights and cache until `wake`.

Level 1 keeps the weights on the host, level 2 drops them, so a pull must follow. vLLM's allocator
keeps addresses, so CUDA graphs stay valid. On a CPU nothing is released; refusals are the same.
"""

import torch

from rl_actors.config import GeneratorConfig

LEVELS = (1, 2)


def options(config: GeneratorConfig) -> dict[str, object]:
    """vLLM's arguments, none on a CPU, which refuses them."""
    return {"enable_sleep_mode": True} if config.sleep_mode and torch.cuda.is_available() else {}


def require_possible(config: GeneratorConfig, level: int, *, has_transport: bool) -> None:
    """Raises ValueError if the generator cannot sleep at this level."""
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


def asleep(call: str) -> RuntimeError:
    return RuntimeError(f"{call} is not possible while the generator sleeps: call wake first")
