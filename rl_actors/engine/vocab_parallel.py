"""Logprobs, entropy and their gradients, of logits whole or sharded over the vocabulary.

A backward pass needs no collectives: each rank computes its own shard's gradient.
B rows, L positions of a row, N = B * L, V this rank's token ids, K ids of a position.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor, Shard

from rl_actors.types import IGNORE_TARGET


@dataclass(frozen=True, kw_only=True)
class Logits:
    raw_NV: Tensor
    temperatures_N: Tensor  # float32
    vocab_size: int
    group: dist.ProcessGroup | None = None  # of the shards; None: this rank has the whole vocabulary

    @classmethod
    def of(cls, logits_BLV: Tensor, temperatures_BL: Tensor) -> "Logits":
        """From [B, L, V]; with tensor parallelism this rank's shard."""
        local_BLV = logits_BLV
        group = None
        if isinstance(logits_BLV, DTensor):
            if logits_BLV.placements != (Shard(2),):
                raise ValueError(
                    f"logits are a DTensor with placements {logits_BLV.placements}; expected a plain tensor, or a DTensor sharded over the vocabulary"
                )
            local_BLV = logits_BLV.to_local()
            group = logits_BLV.device_mesh.get_group("tp")
        raw_NV = local_BLV.flatten(0, 1)
        temperatures_N = temperatures_BL.flatten()
        return cls(raw_NV=raw_NV, temperatures_N=temperatures_N, vocab_size=logits_BLV.shape[-1], group=group)

    @cached_property
    def scaled_NV(self) -> Tensor:
        return _upcast(self.raw_NV) / self.temperatures_N[:, None]

    @property
    def first_id(self) -> int:
        """Token id of this rank's first column. Only the last shards may be smaller."""
        if self.group is None:
            return 0
        return dist.get_rank(self.group) * -(-self.vocab_size // dist.get_world_size(self.group))


class TargetLogprobs:
    """log_softmax at the targets. fuse: Machine.fuse.

    Compiled, both passes read the logits once and write no float32 [N, V].
    """

    def __init__(self, fuse: Callable[[Callable], Callable]) -> None:
        self.normalize = fuse(_normalize)
        self.gradient = fuse(_gradient)

    def __call__(self, logits: Logits, targets_N: Tensor) -> Tensor:
        """[N] float32, 0 where the target is IGNORE_TARGET."""
        return _TargetLogprobs.apply(
            logits.raw_NV, logits.temperatures_N, targets_N, logits.first_id, logits.group, self
        )


def entropy(logits: Logits, targets_N: Tensor) -> Tensor:
    """-sum_v p_v log p_v, [N], 0 where the target is IGNORE_TARGET."""
    entropy_N = _Entropy.apply(logits.scaled_NV, logits.group)
    return torch.where(targets_N != IGNORE_TARGET, entropy_N, 0.0)


def top_k_logprobs(logits: Logits, targets_N: Tensor, ids_NK: Tensor) -> Tensor:
    """log_softmax at K ids of every position, [N, K], 0 where the target is IGNORE_TARGET."""
    logprobs_NK = _LogprobsAt.apply(logits.scaled_NV, ids_NK, logits.first_id, logits.group)
    return torch.where((targets_N != IGNORE_TARGET)[:, None], logprobs_NK, 0.0)


class _TargetLogprobs(torch.autograd.Function):
    """log p_t = z_t - log sum_v exp z_v; d log p_t / d logits_v = ([v = t] - p_v) / T.

    t target, T temperature, z = logits / T, p = softmax(z), [v = t] is 1 if v = t, else 0.
    With n_r = log sum_v exp z_v over rank r's part and m = max n_r, the whole is m + log sum_r
    exp(n_r - m). A second sum over the ranks gives z_t, to which the others add 0.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        raw_NV: Tensor,
        temperatures_N: Tensor,
        targets_N: Tensor,
        first_id: int,
        group: dist.ProcessGroup | None,
        kernels: TargetLogprobs,
    ) -> Tensor:
        local_N = targets_N - first_id
        is_local_N = (local_N >= 0) & (local_N < raw_NV.shape[-1]) & (targets_N != IGNORE_TARGET)
        local_N = torch.where(is_local_N, local_N, 0)
        normalizer_N, chosen_N = kernels.normalize(raw_NV, temperatures_N, local_N)
        chosen_N = torch.where(is_local_N, chosen_N, 0.0)
        if group is not None:
            largest_N = funcol.all_reduce(normalizer_N, reduceOp="max", group=group)
            normalizer_N = largest_N + _sum((normalizer_N - largest_N).exp(), group).log()
            chosen_N = _sum(chosen_N, group)
        has_target_N = targets_N != IGNORE_TARGET
        ctx.kernels = kernels
        ctx.save_for_backward(raw_NV, temperatures_N, local_N, is_local_N, has_target_N, normalizer_N)
        return torch.where(has_target_N, chosen_N - normalizer_N, 0.0)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        raw_NV, temperatures_N, local_N, is_local_N, has_target_N, normalizer_N = ctx.saved_tensors
        grad_N = torch.where(has_target_N, grad_N, 0.0)
        grad_NV = ctx.kernels.gradient(raw_NV, temperatures_N, local_N, is_local_N, normalizer_N, grad_N)
        return grad_NV, None, None, None, None, None


def _normalize(raw_NV: Tensor, temperatures_N: Tensor, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """(log sum_v exp z_v, z at the ids), [N] both."""
    chosen_N = _upcast(raw_NV.gather(-1, ids_N[:, None]).squeeze(-1)) / temperatures_N
    scaled_NV = _upcast(raw_NV) / temperatures_N[:, None]
    # compiled, torch.logsumexp would read the logits more than once
    largest_N1 = scaled_NV.amax(-1, keepdim=True)
    normalizer_N1 = largest_N1 + scaled_NV.sub_(largest_N1).exp_().sum(-1, keepdim=True).log()
    return normalizer_N1.squeeze(-1), chosen_N


def _gradient(
    raw_NV: Tensor, temperatures_N: Tensor, ids_N: Tensor, is_local_N: Tensor, normalizer_N: Tensor, grad_N: Tensor
) -> Tensor:
    """g / T * ([v = id] - p_v) in the logits' dtype, g = grad_N; 0 for [v = id] on other ranks."""
    scaled_NV = _upcast(raw_NV) / temperatures_N[:, None]
    grad_NV = scaled_NV.sub_(normalizer_N[:, None]).exp_()
    own_ids_N = torch.where(is_local_N, ids_N, -1)
    is_target_NV = torch.arange(raw_NV.shape[-1], device=raw_NV.device) == own_ids_N[:, None]
    return grad_NV.add_(is_target_NV, alpha=-1).mul_(-(grad_N / temperatures_N)[:, None]).to(raw_NV.dtype)


def _upcast(values: Tensor) -> Tensor:
    """To float32; float64 stays."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class _Entropy(torch.autograd.Function):
    """H = -sum_v p_v log p_v, with d H / d z_v = -p_v (log p_v + H)."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits_NV: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        logprobs_NV = logits_NV - _log_normalizer(logits_NV, group)
        entropy_N = -_sum((logprobs_NV.exp() * logprobs_NV).sum(-1), group)
        ctx.save_for_backward(logprobs_NV, entropy_N)
        return entropy_N

    @staticmethod
    def backward(ctx: FunctionCtx, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        logprobs_NV, entropy_N = ctx.saved_tensors
        return -logprobs_NV.exp() * (logprobs_NV + entropy_N[:, None]) * grad_N[:, None], None


class _LogprobsAt(torch.autograd.Function):
    """log p_k = z_k - log sum_v exp z_v for K ids of each position.

    With g_k the gradient of log p_k, that of z_v is (sum of g_k over k with id v) - p_v sum_k g_k.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits_NV: Tensor, ids_NK: Tensor, first_id: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        log_normalizer_N1 = _log_normalizer(logits_NV, group)
        local_NK = ids_NK - first_id
        is_local_NK = (local_NK >= 0) & (local_NK < logits_NV.shape[-1])
        local_NK = torch.where(is_local_NK, local_NK, 0)
        chosen_NK = _sum(torch.where(is_local_NK, logits_NV.gather(-1, local_NK), 0.0), group)
        ctx.save_for_backward(logits_NV, log_normalizer_N1, local_NK, is_local_NK)
        return chosen_NK - log_normalizer_N1

    @staticmethod
    def backward(ctx: FunctionCtx, grad_NK: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, log_normalizer_N1, local_NK, is_local_NK = ctx.saved_tensors
        grad_NV = -(logits_NV - log_normalizer_N1).exp() * grad_NK.sum(-1, keepdim=True)
        return grad_NV.scatter_add(-1, local_NK, torch.where(is_local_NK, grad_NK, 0.0)), None, None, None


def _log_normalizer(logits_NV: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """log sum_v exp z_v over all ranks, [N, 1]."""
    if group is None:
        return logits_NV.logsumexp(-1, keepdim=True)
    largest_N1 = funcol.all_reduce(logits_NV.amax(-1, keepdim=True), reduceOp="max", group=group)
    return largest_N1 + _sum((logits_NV - largest_N1).exp().sum(-1, keepdim=True), group).log()


def _sum(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return values if group is None else funcol.all_reduce(values, reduceOp="sum", group=group)
