"""Supervised losses.

B rows, L row length, T tokens of a sample, K targets of one position.
"""

from dataclasses import dataclass

from torch import Tensor

from rl_actors.metrics import Partials


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """sum_i -w_i log p_i (Tinker's `cross_entropy`). The weights w may be any numbers, also negative ones.

    A sample of T tokens may have the columns target_ids and target_weights, both of shape [T, K]. Then the loss is
    sum_i -w_i sum_k v_ik log p(id_ik | tokens[:i+1]), where v are the target_weights and tokens are the sample's tokens. This is the
    cross entropy to a distribution over K tokens, as in distillation. The sample's `targets` then only exclude positions: a position
    whose target is IGNORE_TARGET does not count.
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
