"""Attention kernels of a CUDA machine under packed rows, each with a backward: which is fastest depends on the documents' lengths.

B rows, L row length, T = B L positions, N heads, H head width.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, restore_flash_attention_impl, sdpa_kernel
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata

from rl_actors.engine import flash4

FLEX_KERNEL_OPTIONS: dict[str, Any] = {}
"""Of flex attention, such as {"fwd_num_warps": 4}; empty: what inductor takes for the chip."""

ONE_DOCUMENT_A_ROW = "one document a row"
"""In the place of the documents' boundaries: a causal mask is enough, also with padding behind the document."""

BOUNDARIES_MULTIPLE = 64
"""Numbers of documents are rounded up, and the longest to a power of two, so that the blocks are compiled for few of them."""


class Varlen(VarlenAttention):
    """torchtitan's, whose own __init__ would ask for FlashAttention 3, which no registry has."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        activate: Callable[[], None]
        """Makes the kernels the FlashAttention of this process. May raise ValueError."""

    def __init__(self, config: Config) -> None:
        nn.Module.__init__(self)
        self.window_size = config.window_size
        config.activate()


class CudnnWholeRows(Varlen):
    """cuDNN's attention over rows that hold one document each, FlashAttention 2 over others.

    cuDNN's own for ragged documents, as torch 2.13 calls it, gave wrong values: benchmarks/results/attention.jsonl has the errors.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Varlen.Config):
        pass

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata | str,
        scale: float | None = None,
        **options: Any,
    ) -> Tensor:
        if isinstance(attention_masks, str):
            return _causal(q_BLNH, k_BLNH, v_BLNH, scale)
        return super().forward(q_BLNH, k_BLNH, v_BLNH, attention_masks=attention_masks, scale=scale, **options)


def _causal(q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, scale: float | None) -> Tensor:
    q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        out_BNLH = F.scaled_dot_product_attention(q_BNLH, k_BNLH, v_BNLH, is_causal=True, scale=scale, enable_gqa=True)
    return out_BNLH.transpose(1, 2)


_flash2 = partial(restore_flash_attention_impl, _raise_warn=False)  # torch's own

CONFIGS: dict[str, Callable[[], Any]] = {
    "flex": lambda: FlexAttention.Config(kernel_options=dict(FLEX_KERNEL_OPTIONS)),
    "varlen": partial(Varlen.Config, activate=_flash2),
    "flash4": partial(Varlen.Config, activate=flash4.activate),
    "cudnn": partial(CudnnWholeRows.Config, activate=_flash2),
}


def one_document_a_row(spans: Iterable[tuple[int, int, int, int]]) -> bool:
    """Whether no row holds two documents."""
    rows = [row for _, row, _, _ in spans]
    return len(set(rows)) == len(rows)


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
