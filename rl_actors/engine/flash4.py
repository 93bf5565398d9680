"""Attention kernels of a CUDA machine for packed rows: flex attention, or FlashAttention 4 from the package flash-attn-4.

FlashAttention 4 takes the place of torch's own FlashAttention, and its kernels use the features of Hopper. torch 2.13 calls the two
functions at the end of this file. It takes two values of the forward pass; the package returns five.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
)
from torch.nn.attention._fa4 import register_flash_attention_fa4
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata

BOUNDARIES_MULTIPLE = 64
"""Numbers of documents are rounded up, and the longest to a power of two, so that the blocks are compiled for few of them."""
NAME = "FA4"
CAPABILITIES = (9, 10)
"""Major ones, on which torch calls it."""


class Flash4(VarlenAttention):
    """torchtitan's, whose own __init__ would ask for FlashAttention 3, which no registry has."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        """Raises ValueError where FlashAttention 4 cannot be."""
        nn.Module.__init__(self)
        self.window_size = config.window_size
        activate()


CONFIGS: dict[str, Callable[[], Any]] = {"flex": FlexAttention.Config, "flash4": Flash4.Config}


def documents(num_rows: int, row_length: int, spans: Iterable[tuple[int, int, int, int]]) -> VarlenMetadata:
    """Where the documents of rows begin, from (sample, row, start, end) of each; padding behind them is a document of its own.

    On the host, where it is known without waiting for the device.
    """
    ends = {row * row_length + position for _, row, start, end in spans for position in (start, end)}
    edges = sorted(ends | set(range(0, num_rows * row_length + 1, row_length)))
    longest = max(end - start for start, end in zip(edges, edges[1:], strict=False))
    edges += edges[-1:] * (-len(edges) % BOUNDARIES_MULTIPLE)
    starts = torch.tensor(edges, dtype=torch.int32)
    longest = 1 << (longest - 1).bit_length()
    return VarlenMetadata(cu_seq_q=starts, cu_seq_k=starts, max_q=longest, max_k=longest)


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
