"""Supervised losses.

B rows, L row length.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """sum_i -w_i log p_i, with any float weights w (Tinker's `cross_entropy`)."""

    def __call__(self, logprobs_BL: Tensor, *, loss_weights: Tensor):
        loss = -(logprobs_BL * loss_weights).sum()
        trained_BL = loss_weights != 0
        return loss, {
            "loss:sum": loss.detach(),
            "logprob:mean": ((logprobs_BL.detach() * trained_BL).sum(), trained_BL.sum()),
        }
