"""Supervised losses.

In shapes, B is the number of rows of a batch, L the length of a row, T the number of positions of a sample and K the
number of target ids at one position.
"""

from dataclasses import dataclass

from torch import Tensor

from rl_actors.metrics import Partials


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """sum_i -w_i log p_i (Tinker's `cross_entropy`). p_i is the probability of the target at position i, and w_i is the
    loss weight. A weight may be negative.

    A sample of T positions may have the columns target_ids and target_weights, both of shape [T, K]. Then the loss is
    sum_i -w_i sum_k v_ik log p(id_ik | tokens[:i+1]), where v are the target_weights and tokens are the sample's
    tokens. This is the cross entropy to a distribution over K tokens, as in distillation. The sample's `targets` then
    have only one use: a position whose target is IGNORE_TARGET does not count.
    """

    def __call__(
        self,
        logprobs_BL: Tensor,
        *,
        loss_weights: Tensor,
        target_ids: Tensor | None = None,
        target_weights: Tensor | None = None,
        target_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, Partials]:
        if target_logprobs is not None and target_weights is not None:
            logprobs_BL = (target_logprobs * target_weights).sum(-1)
        loss = -(logprobs_BL * loss_weights).sum()
        is_trained_BL = loss_weights != 0
        return loss, {
            "loss:sum": loss.detach(),
            "logprob:mean": ((logprobs_BL.detach() * is_trained_BL).sum(), is_trained_BL.sum()),
        }
