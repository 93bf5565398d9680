"""Policy-gradient losses: pure functions of the trainer's logprobs, the sampler's logprobs and advantages.

B rows, L row length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def policy_ratio(logprobs_BL: Tensor, old_logprobs: Tensor, loss_weights: Tensor) -> Tensor:
    """exp(logprob - old_logprob), and 1 where the loss weight is 0: there a ratio may overflow, and 0 * inf is NaN."""
    return torch.where(loss_weights != 0, logprobs_BL - old_logprobs, 0.0).exp()


def policy_metrics(logprobs_BL: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_weights: Tensor) -> dict:
    """What every policy loss reports: the verification of the sampler's logprobs against the trainer's, and the advantages.

    Means are over positions with a non-zero loss weight. The KL of the sampler from the trainer is the k3 estimate
    r - 1 - log r with r = p_trainer / p_sampler (Schulman, "Approximating KL divergence", 2020).
    """
    trained_BL = loss_weights != 0
    count = trained_BL.sum()
    difference_BL = torch.where(trained_BL, logprobs_BL.detach() - old_logprobs, 0.0)
    ratio_BL = difference_BL.exp()
    mean = lambda x_BL: (torch.where(trained_BL, x_BL, 0.0).sum(), count)  # noqa: E731
    return {
        "logprob_diff:mean": (difference_BL.abs().sum(), count),
        "logprob_diff:max": difference_BL.abs().max(),
        "kl_policy_generator:mean": mean(ratio_BL - 1 - difference_BL),
        "ratio:mean": mean(ratio_BL),
        "ratio:max": torch.where(trained_BL, ratio_BL, 0.0).max(),
        "advantage:mean": mean(advantages),
        "advantage_abs:mean": mean(advantages.abs()),
        "entropy_estimate:mean": mean(-logprobs_BL.detach()),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceSampling:
    """sum_i -w_i r_i A_i with r_i = exp(logprob_i - old_logprob_i) (Tinker's `importance_sampling`)."""

    def __call__(self, logprobs_BL: Tensor, *, old_logprobs: Tensor, advantages: Tensor, loss_weights: Tensor):
        ratio_BL = policy_ratio(logprobs_BL, old_logprobs, loss_weights)
        loss = -(loss_weights * ratio_BL * advantages).sum()
        return loss, {"loss:sum": loss.detach(), **policy_metrics(logprobs_BL, old_logprobs, advantages, loss_weights)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PPO:
    """sum_i -w_i min(r_i A_i, clip(r_i, ratio_low, ratio_high) A_i) (Schulman et al., arXiv 1707.06347, eq. 7).

    Different bounds are DAPO's clip-higher (arXiv 2503.14476): PPO(ratio_low=0.8, ratio_high=1.28).
    """

    ratio_low: float = 0.8
    ratio_high: float = 1.2

    def __post_init__(self) -> None:
        if not 0 <= self.ratio_low <= 1 <= self.ratio_high:
            raise ValueError(
                f"ratio_low={self.ratio_low}, ratio_high={self.ratio_high}; it must hold that 0 <= low <= 1 <= high"
            )

    def __call__(self, logprobs_BL: Tensor, *, old_logprobs: Tensor, advantages: Tensor, loss_weights: Tensor):
        ratio_BL = policy_ratio(logprobs_BL, old_logprobs, loss_weights)
        clipped_BL = ratio_BL.clamp(self.ratio_low, self.ratio_high)
        objective_BL = torch.minimum(ratio_BL * advantages, clipped_BL * advantages)
        loss = -(loss_weights * objective_BL).sum()
        trained_BL = loss_weights != 0
        was_clipped_BL = (clipped_BL * advantages < ratio_BL * advantages) & trained_BL
        return loss, {
            "loss:sum": loss.detach(),
            "clip_fraction:mean": (was_clipped_BL.sum(), trained_BL.sum()),
            **policy_metrics(logprobs_BL, old_logprobs, advantages, loss_weights),
        }
