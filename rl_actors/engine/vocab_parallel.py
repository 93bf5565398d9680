"""Logprobs and entropy of one chunk of logits, with their gradients. The logits are whole, or are sharded over the vocabulary.

A forward pass combines the shards by collectives. A backward pass needs no collectives, because each rank computes the gradient of its own
shard. This module contains no model and no loss.

Letters in shapes: B rows, L positions of a row, N = B * L positions, V token ids of this rank's part of the vocabulary, K token ids for each
position.
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
    """Logits of the output projection, and the temperatures that divide them."""

    raw_NV: Tensor
    temperatures_N: Tensor  # float32
    vocab_size: int
    group: dist.ProcessGroup | None = None  # the ranks that hold the shards; None: this rank has the whole vocabulary

    @classmethod
    def of(cls, logits_BLV: Tensor, temperatures_BL: Tensor) -> "Logits":
        """Make Logits from logits [B, L, V]. If tensor parallelism shards the vocabulary, each rank gets its own shard."""
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
        """The logits divided by the temperature, in float32."""
        return _upcast(self.raw_NV) / self.temperatures_N[:, None]

    @property
    def first_id(self) -> int:
        """The token id of this rank's first column. All shards have the same size, except the shards of the last ranks, which may be smaller."""
        if self.group is None:
            return 0
        return dist.get_rank(self.group) * -(-self.vocab_size // dist.get_world_size(self.group))


class TargetLogprobs:
    """log_softmax of the logits at the target of every position.

    fuse: compiles a function into few kernels, if this makes the function faster on the machine. The compiled forward and backward
    pass read the logits once each, and write no float32 tensor of size [N, V] to memory. The forward pass saves the logits in their own dtype.
    The backward pass returns the gradient in this dtype.
    """

    def __init__(self, fuse: Callable[[Callable], Callable]) -> None:
        self.normalize = fuse(_normalize)
        self.gradient = fuse(_gradient)

    def __call__(self, logits: Logits, targets_N: Tensor) -> Tensor:
        """The logprobs, [N] float32. They are 0 where the target is IGNORE_TARGET."""
        return _TargetLogprobs.apply(
            logits.raw_NV, logits.temperatures_N, targets_N, logits.first_id, logits.group, self
        )


def entropy(logits: Logits, targets_N: Tensor) -> Tensor:
    """The entropy -sum_v p_v log p_v, [N], where p_v is the probability of token id v. It is 0 where the target is IGNORE_TARGET."""
    entropy_N = _Entropy.apply(logits.scaled_NV, logits.group)
    return torch.where(targets_N != IGNORE_TARGET, entropy_N, 0.0)


def top_k_logprobs(logits: Logits, targets_N: Tensor, ids_NK: Tensor) -> Tensor:
    """log_softmax at K token ids of every position, [N, K]. The values are 0 where the target is IGNORE_TARGET."""
    logprobs_NK = _LogprobsAt.apply(logits.scaled_NV, ids_NK, logits.first_id, logits.group)
    return torch.where((targets_N != IGNORE_TARGET)[:, None], logprobs_NK, 0.0)


class _TargetLogprobs(torch.autograd.Function):
    """The logprob is log p_t = z_t - log sum_v exp z_v. Its gradient is d log p_t / d logits_v = ([v = t] - p_v) / T.

    Here t is the target, T is the temperature, z = logits / T, p = softmax(z), and [v = t] is 1 if v = t and 0 otherwise.
    Each rank computes log sum_v exp z_v over its own part of the vocabulary, and z_t if its part has t.
    One maximum and two sums over the ranks combine these values.
    If n_r is log sum_v exp z_v over the part of rank r, and m is the largest n_r, the value over the whole vocabulary is
    m + log sum_r exp(n_r - m).
    The second sum over the ranks gives z_t: the target is in the part of one rank, and all other ranks add 0.
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
    """Returns (log sum_v exp z_v, z at the ids), both of shape [N]. z is the logits divided by the temperature."""
    chosen_N = _upcast(raw_NV.gather(-1, ids_N[:, None]).squeeze(-1)) / temperatures_N
    scaled_NV = _upcast(raw_NV) / temperatures_N[:, None]
    # With torch.logsumexp the compiled kernel would read the logits more than once. With this formula it reads them once.
    largest_N1 = scaled_NV.amax(-1, keepdim=True)
    normalizer_N1 = largest_N1 + scaled_NV.sub_(largest_N1).exp_().sum(-1, keepdim=True).log()
    return normalizer_N1.squeeze(-1), chosen_N


def _gradient(
    raw_NV: Tensor, temperatures_N: Tensor, ids_N: Tensor, is_local_N: Tensor, normalizer_N: Tensor, grad_N: Tensor
) -> Tensor:
    """The gradient g / T * ([v = id] - p_v) in the dtype of the logits. g is grad_N. If another rank has the id, [v = id] is 0 for every v."""
    scaled_NV = _upcast(raw_NV) / temperatures_N[:, None]
    grad_NV = scaled_NV.sub_(normalizer_N[:, None]).exp_()
    own_ids_N = torch.where(is_local_N, ids_N, -1)
    is_target_NV = torch.arange(raw_NV.shape[-1], device=raw_NV.device) == own_ids_N[:, None]
    return grad_NV.add_(is_target_NV, alpha=-1).mul_(-(grad_N / temperatures_N)[:, None]).to(raw_NV.dtype)


def _upcast(values: Tensor) -> Tensor:
    """The values in float32. Values in float64 stay in float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class _Entropy(torch.autograd.Function):
    """The entropy H = -sum_v p_v log p_v. Its gradient is d H / d z_v = -p_v (log p_v + H). z is the logits divided by the temperature."""

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
    """The logprobs log p_k = z_k - log sum_v exp z_v, for K token ids of each position. z is the logits divided by the temperature.

    If g_k is the gradient of log p_k, the gradient of z_v is (sum of g_k over all k whose token id is v) - p_v sum_k g_k.
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
    """log sum_v exp z_v over the shards of all ranks, [N, 1]."""
    if group is None:
        return logits_NV.logsumexp(-1, keepdim=True)
    largest_N1 = funcol.all_reduce(logits_NV.amax(-1, keepdim=True), reduceOp="max", group=group)
    return largest_N1 + _sum((logits_NV - largest_N1).exp().sum(-1, keepdim=True), group).log()


def _sum(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over the ranks of the group."""
    return values if group is None else funcol.all_reduce(values, reduceOp="sum", group=group)
