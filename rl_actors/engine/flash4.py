"""FlashAttention 4 (the package flash-attn-4) as an attention kernel for packed rows on a GPU.

torch 2.13 expects two values from its forward function, and the package returns five, so torch
takes forward and backward from this module.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

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
"""Their number is rounded up to this, because every new number compiles the blocks again."""
NAME = "FA4"
CAPABILITIES = (9, 10)
"""Major compute capabilities for which torch calls FlashAttention 4."""


class Flash4(VarlenAttention):
    """VarlenAttention without its __init__, which on Hopper requires FlashAttention 3."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        """Raises ValueError on a machine that cannot run FlashAttention 4."""
        nn.Module.__init__(self)
        self.window_size = config.window_size
        activate()


CONFIGS: dict[str, type[FlexAttention.Config] | type[VarlenAttention.Config]] = {
    "flex": FlexAttention.Config,
    "flash4": Flash4.Config,
}


def documents(num_rows: int, row_length: int, spans: Iterable[tuple[int, int, int, int]]) -> VarlenMetadata:
    """The boundaries of the documents, on the host: samples, and the padding of each row.

    spans: (sample, row, start in the row, end in the row).
    """
    found = set(range(0, num_rows * row_length + 1, row_length))
    for _, row, start, end in spans:
        found |= {row * row_length + start, row * row_length + end}
    edges = sorted(found)
    edges += edges[-1:] * (-len(edges) % BOUNDARIES_MULTIPLE)
    starts = torch.tensor(edges, dtype=torch.int32)
    # only a bound, for the same reason: on Hopper no kernel takes longer for it
    return VarlenMetadata(cu_seq_q=starts, cu_seq_k=starts, max_q=row_length, max_k=row_length)


def activate() -> None:
    """Make FlashAttention 4 the FlashAttention of this process."""
    if current_flash_attention_impl() == NAME:
        return
    major, minor = torch.cuda.get_device_capability()
    if major not in CAPABILITIES:
        raise ValueError(
            f'trainer.attention="flash4" on a GPU of compute capability {major}.{minor}; torch calls FlashAttention 4 only on '
            f'{" and ".join(f"{known}.x" for known in CAPABILITIES)}; attention="flex" runs everywhere'
        )
    try:
        _interface()
    except ImportError as error:
        raise ValueError(
            f'trainer.attention="flash4" needs the package flash-attn-4, which `make setup` installs on a machine with CUDA: {error}'
        ) from error
    register_flash_attention_impl(NAME, register_fn=partial(register_flash_attention_fa4, module_path=__name__))
    activate_flash_attention_impl(NAME)


def _interface() -> ModuleType:
    from flash_attn.cute import interface

    return interface


def _flash_attn_fwd(*args: object, **kwargs: object) -> tuple[Tensor, ...]:
    return _interface()._flash_attn_fwd(*args, **kwargs)[:2]


def _flash_attn_bwd(*args: object, **kwargs: object) -> tuple[Tensor, ...]:
    return _interface()._flash_attn_bwd(*args, **kwargs)
