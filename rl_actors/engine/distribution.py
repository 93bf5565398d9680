"""Functions of one chunk of logits, whole or sharded over the vocabulary, each with its gradient. Knows nothing of models or losses.

N positions, V vocabulary of this rank, K targets of one position. A backward needs no collective: its gradient is the shard's own.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torchtitan.components.loss import _LossParallelCrossEntropy

from rl_actors.types import IGNORE_TARGET


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """Logits over temperature, float32."""

    scaled_NV: Tensor
    vocab_size: int
    group: dist.ProcessGroup | None = None  # None: the vocabulary is whole

    @classmethod
    def of(cls, logits_BLV: Tensor, temperatures_BL: Tensor) -> "Logits":
        """Vocabulary shards of tensor parallelism stay where they are."""
        local_BLV, group = logits_BLV, None
        if isinstance(logits_BLV, DTensor):
            if logits_BLV.placements != (Shard(2),):
                raise ValueError(
                    f"logits are laid out as {logits_BLV.placements}; expected whole or sharded over the vocabulary"
                )
            local_BLV, group = logits_BLV.to_local(), logits_BLV.device_mesh.get_group("tp")
        scaled_NV = (local_BLV.float() / temperatures_BL[..., None]).flatten(0, 1)
        return cls(scaled_NV=scaled_NV, vocab_size=logits_BLV.shape[-1], group=group)

    @property
    def first_id(self) -> int:
        """The id of this rank's first row of the vocabulary: DTensor's shards are of equal size, but for the last."""
        if self.group is None:
            return 0
        return dist.get_rank(self.group) * -(-self.vocab_size // dist.get_world_size(self.group))


def target_logprobs(logits: Logits, targets_N: Tensor) -> Tensor:
    """log_softmax at the targets, [N]; 0 where the target is IGNORE_TARGET."""
    if logits.group is not None:
        args = (logits.scaled_NV, targets_N, logits.group, logits.vocab_size, "none")
        return -_LossParallelCrossEntropy.apply(*args)
    return -torch.nn.functional.cross_entropy(logits.scaled_NV, targets_N, reduction="none", ignore_index=IGNORE_TARGET)


def entropy(logits: Logits, targets_N: Tensor) -> Tensor:
    """-sum_v p_v log p_v, [N]; 0 where the target is IGNORE_TARGET."""
    entropy_N = _Entropy.apply(logits.scaled_NV, logits.group)
    return torch.where(targets_N != IGNORE_TARGET, entropy_N, 0.0)


def top_k_logprobs(logits: Logits, targets_N: Tensor, ids_NK: Tensor) -> Tensor:
    """log_softmax at K ids of every position, [N, K]; 0 where the target is IGNORE_TARGET."""
    logprobs_NK = _LogprobsAt.apply(logits.scaled_NV, ids_NK, logits.first_id, logits.group)
    return torch.where((targets_N != IGNORE_TARGET)[:, None], logprobs_NK, 0.0)


class _Entropy(torch.autograd.Function):
    """H = -sum_v p_v log p_v; d H / d z_v = -p_v (log p_v + H)."""

    @staticmethod
    def forward(ctx, logits_NV: Tensor, group) -> Tensor:
        logprobs_NV = logits_NV - _log_normalizer(logits_NV, group)
        entropy_N = -_sum((logprobs_NV.exp() * logprobs_NV).sum(-1), group)
        ctx.save_for_backward(logprobs_NV, entropy_N)
        return entropy_N

    @staticmethod
    def backward(ctx, grad_N: Tensor):
        logprobs_NV, entropy_N = ctx.saved_tensors
        return -logprobs_NV.exp() * (logprobs_NV + entropy_N[:, None]) * grad_N[:, None], None


class _LogprobsAt(torch.autograd.Function):
    """log p_k = z_k - log sum_v exp z_v; d (sum_k g_k log p_k) / d z_v = sum over k with id v of g_k - p_v sum_k g_k."""

    @staticmethod
    def forward(ctx, logits_NV: Tensor, ids_NK: Tensor, first_id: int, group) -> Tensor:
        log_normalizer_N1 = _log_normalizer(logits_NV, group)
        local_NK = ids_NK - first_id
        here_NK = (local_NK >= 0) & (local_NK < logits_NV.shape[-1])
        local_NK = torch.where(here_NK, local_NK, 0)
        chosen_NK = _sum(torch.where(here_NK, logits_NV.gather(-1, local_NK), 0.0), group)
        ctx.save_for_backward(logits_NV, log_normalizer_N1, local_NK, here_NK)
        return chosen_NK - log_normalizer_N1

    @staticmethod
    def backward(ctx, grad_NK: Tensor):
        logits_NV, log_normalizer_N1, local_NK, here_NK = ctx.saved_tensors
        grad_NV = -(logits_NV - log_normalizer_N1).exp() * grad_NK.sum(-1, keepdim=True)
        return grad_NV.scatter_add(-1, local_NK, torch.where(here_NK, grad_NK, 0.0)), None, None, None


def _log_normalizer(logits_NV: Tensor, group) -> Tensor:
    """log sum_v exp z_v over all shards, [N, 1]."""
    if group is None:
        return logits_NV.logsumexp(-1, keepdim=True)
    largest_N1 = funcol.all_reduce(logits_NV.amax(-1, keepdim=True), reduceOp="max", group=group)
    return largest_N1 + _sum((logits_NV - largest_N1).exp().sum(-1, keepdim=True), group).log()


def _sum(values: Tensor, group) -> Tensor:
    return values if group is None else funcol.all_reduce(values, reduceOp="sum", group=group)
