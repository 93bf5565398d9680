"""Supervised losses.

B rows, L row length, T positions of a sample, K target ids at a position.
"""

from dataclasses import dataclass

from torch import Tensor

from rl_actors.metrics import Partials


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """sum_i -w_i log p_i (Tinker's `cross_entropy`), with the loss weights w, which may be
    negative.

    With the columns target_ids and target_weights, [T, K], it is sum_i -w_i sum_k v_ik log p(id_ik
    | tokens[:i+1]), as in distillation; of `targets` only IGNORE_TARGET then counts.
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
