"""FlashAttention 4, of the package flash-attn-4, in the place of torch's own FlashAttention: its kernels use what Hopper brought.

torch 2.13 calls the two functions at the end and takes two values of the forward pass, of which the package returns five.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
)
from torch.nn.attention._fa4 import register_flash_attention_fa4

NAME = "FA4"
CAPABILITIES = (9, 10)
"""Major ones, on which torch calls it."""


def activate() -> None:
    """Make it the FlashAttention of this process. Raises ValueError on another GPU, and without the package."""
    if current_flash_attention_impl() == NAME:
        return
    if (capability := torch.cuda.get_device_capability())[0] not in CAPABILITIES:
        raise ValueError(
            f'trainer.attention="flash4" on a GPU of compute capability {".".join(map(str, capability))}; '
            f'torch calls FlashAttention 4 on {" and ".join(map(str, CAPABILITIES))}.x alone, attention="flex" runs everywhere'
        )
    try:
        _interface()
    except ImportError as error:
        raise ValueError(
            f'trainer.attention="flash4" needs the package flash-attn-4, which the lock for CUDA has (`make setup`): {error}'
        ) from error
    register_flash_attention_impl(NAME, register_fn=partial(register_flash_attention_fa4, module_path=__name__))
    activate_flash_attention_impl(NAME)


def _interface() -> Any:
    from flash_attn.cute import interface

    return interface


def _flash_attn_fwd(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return _interface()._flash_attn_fwd(*args, **kwargs)[:2]


def _flash_attn_bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return _interface()._flash_attn_bwd(*args, **kwargs)
