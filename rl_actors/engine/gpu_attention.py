"""Attention kernels of a CUDA machine under packed rows, each with a backward: which is fastest depends on the documents' lengths.

B rows, L row length, T = B L positions, N heads, H head width.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata

FLEX_KERNEL_OPTIONS: dict[str, Any] = {}
"""Of flex attention, such as {"fwd_num_warps": 4}; empty: what inductor takes for the chip."""

CUDNN_REPEATS_KEYS = False
"""Whether cuDNN gets keys and values of ragged documents once for every query head."""

ONE_DOCUMENT_A_ROW = "one document a row"
"""In the place of the documents' boundaries: a causal mask is enough, also with padding behind the document."""

BOUNDARIES_MULTIPLE = 64
"""Numbers of documents are rounded up, and the longest to a power of two, so that the blocks are compiled for few of them."""


class FlashVarlen(VarlenAttention):
    """torch's own FlashAttention 2; torchtitan's module would ask for FlashAttention 3, which no registry has."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        nn.Module.__init__(self)
        self.window_size = config.window_size


class CudnnVarlen(FlashVarlen):
    """cuDNN's attention: over ragged documents, or over whole rows where each holds one."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlashVarlen.Config):
        pass

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata | str,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        if isinstance(attention_masks, str):
            return _causal(q_BLNH, k_BLNH, v_BLNH, scale)
        q_TNH, k_TNH, v_TNH = (x.flatten(0, 1).to(torch.bfloat16) for x in (q_BLNH, k_BLNH, v_BLNH))
        if CUDNN_REPEATS_KEYS:
            k_TNH, v_TNH = (x.repeat_interleave(q_TNH.shape[1] // x.shape[1], dim=1) for x in (k_TNH, v_TNH))
        scale = q_TNH.shape[-1] ** -0.5 if scale is None else scale
        out_TNH, _ = cudnn_varlen(q_TNH, k_TNH, v_TNH, attention_masks.cu_seq_q, attention_masks.max_q, scale)
        return out_TNH.view(q_BLNH.shape).to(q_BLNH.dtype)


def _causal(q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, scale: float | None) -> Tensor:
    q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        out_BNLH = F.scaled_dot_product_attention(q_BNLH, k_BNLH, v_BNLH, is_causal=True, scale=scale, enable_gqa=True)
    return out_BNLH.transpose(1, 2)


@torch.library.custom_op("rl_actors::cudnn_varlen", mutates_args=())
def cudnn_varlen(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, starts: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(causal attention within documents [T, N, H], log-sum-exp [T, N, 1] float32); starts [documents + 1] int32."""
    lengths = (None, starts, starts, longest, longest, True, 0.0, True, False)
    out_TNH, normalizer_TN1, *_ = torch.ops.aten._cudnn_attention_forward(q_TNH, k_TNH, v_TNH, *lengths, scale=scale)
    return out_TNH.contiguous(), normalizer_TN1.contiguous()


@cudnn_varlen.register_fake
def _(q_TNH, k_TNH, v_TNH, starts, longest, scale):
    return torch.empty_like(q_TNH), q_TNH.new_empty((*q_TNH.shape[:2], 1), dtype=torch.float32)


@torch.library.custom_op("rl_actors::cudnn_varlen_backward", mutates_args=())
def cudnn_varlen_backward(
    grad_TNH: Tensor,
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    out_TNH: Tensor,
    normalizer_TN1: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    seed, offset = (torch.zeros((), dtype=torch.int64, device=q_TNH.device) for _ in range(2))  # of dropout: none
    lengths = (seed, offset, None, starts, starts, longest, longest, 0.0, True)
    saved = (q_TNH, k_TNH, v_TNH, out_TNH, normalizer_TN1)
    gradients = torch.ops.aten._cudnn_attention_backward(grad_TNH.contiguous(), *saved, *lengths, scale=scale)
    return tuple(gradient.contiguous() for gradient in gradients)


@cudnn_varlen_backward.register_fake
def _(grad_TNH, q_TNH, k_TNH, v_TNH, out_TNH, normalizer_TN1, starts, longest, scale):
    return torch.empty_like(q_TNH), torch.empty_like(k_TNH), torch.empty_like(v_TNH)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad_TNH: Tensor, _: Tensor):
    q_TNH, k_TNH, v_TNH, starts, out_TNH, normalizer_TN1 = ctx.saved_tensors
    saved = (q_TNH, k_TNH, v_TNH, out_TNH, normalizer_TN1, starts)
    return (*cudnn_varlen_backward(grad_TNH, *saved, ctx.longest, ctx.scale), None, None, None)


cudnn_varlen.register_autograd(_backward, setup_context=_save)


class KeepAttention(SelectiveAC):
    """torchtitan's selective checkpointing, which keeps what its own attention kernels gave, and cuDNN's, too."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | {torch.ops.rl_actors.cudnn_varlen.default}


CONFIGS: dict[str, Callable[[], Any]] = {
    "flex": lambda: FlexAttention.Config(kernel_options=dict(FLEX_KERNEL_OPTIONS)),
    "varlen": FlashVarlen.Config,
    "cudnn": CudnnVarlen.Config,
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
