"""Attention kernels of a CUDA machine under packed rows, each with a backward."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata

from rl_actors.engine import flash4

BOUNDARIES_MULTIPLE = 64
"""Numbers of documents are rounded up, and the longest to a power of two, so that the blocks are compiled for few of them."""


class Flash4(VarlenAttention):
    """torchtitan's, whose own __init__ would ask for FlashAttention 3, which no registry has."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        """Raises ValueError where FlashAttention 4 cannot be."""
        nn.Module.__init__(self)
        self.window_size = config.window_size
        flash4.activate()


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
