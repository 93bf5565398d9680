"""Policy-gradient losses: pure functions of logprobs and advantages.

A subclass of PolicyLoss defines the objective at a position; PolicyLoss adds weights, options and
metrics. A position is trained if its loss weight is not 0. B rows, L row length.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rl_actors.losses.options import KL, Correction, sequence_mean
from rl_actors.metrics import Partials


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """sum_i -w_i c_i J_i + kl.coefficient sum_i w_i kl_i - entropy_coefficient sum_i w_i H_i

    w: loss weight; J: the subclass's objective; c: the correction's factor, or 1; kl: estimate of
    KL(trainer, reference); H: entropy over the vocabulary; in J, A is the advantage. c is a
    function of q = p_trainer / p_generator = exp(old_logprobs - generator_logprobs) with the column
    generator_logprobs (old_logprobs are then the trainer's before the update), else exp(logprobs -
    old_logprobs) (the generator's). No gradient flows through q. sequence_mean divides w by its
    absolute sum over the sample, GRPO's factor 1 / |o|.
    """

    kl: KL | None = None  # if set, reads the column ref_logprobs
    entropy_coefficient: float = 0.0
    correction: Correction | None = None
    sequence_mean: bool = False

    # True: J contains exp(logprobs - old_logprobs), which corrects already for old_logprobs of the
    # generator
    corrects: ClassVar[bool] = True
    needs_old_logprobs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        value = self.entropy_coefficient
        if not (isinstance(value, float | int) and math.isfinite(value)):
            raise ValueError(f"entropy_coefficient={value}; it must be a finite number")

    @property
    def whole_sequence(self) -> bool:
        return self.sequence_mean or (self.correction is not None and self.correction.level == "sequence")

    def columns(self) -> tuple[frozenset[str], frozenset[str]]:
        """(required, optional) keyword arguments of `__call__`, which depend on the options."""
        required = {"loss_weights", "advantages"}
        optional = {"generator_logprobs", "old_logprobs"}
        if self.needs_old_logprobs or self.correction is not None:
            required.add("old_logprobs")
        if self.kl is not None:
            required.add("ref_logprobs")
        if self.entropy_coefficient:
            required.add("entropy")
        if self.correction is not None and self.correction.reweights and self.corrects:
            # without it q would be the ratio that J contains already, and count twice
            required.add("generator_logprobs")
        return frozenset(required), frozenset(optional - required)

    def objective(
        self, logprobs_BL: Tensor, old_logprobs: Tensor, advantages: Tensor, is_trained_BL: Tensor
    ) -> tuple[Tensor, Partials]:
        """(J [B, L], which training maximises; the subclass's metrics)."""
        raise NotImplementedError

    def __call__(
        self,
        logprobs_BL: Tensor,
        *,
        loss_weights: Tensor,
        advantages: Tensor,
        old_logprobs: Tensor | None = None,
        generator_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> tuple[Tensor, Partials]:
        is_trained_BL = loss_weights != 0
        current_BL = logprobs_BL.detach()

        def where_trained(column: Tensor) -> Tensor:
            # ratio 1 where untrained: an overflow would make 0 * inf = NaN
            return torch.where(is_trained_BL, column, current_BL)

        advantages = torch.where(is_trained_BL, advantages, 0.0)
        old_BL = where_trained(old_logprobs) if old_logprobs is not None else current_BL
        generator_BL = where_trained(generator_logprobs) if generator_logprobs is not None else old_BL
        weights_BL = loss_weights
        if self.sequence_mean:
            weights_BL = loss_weights / loss_weights.abs().sum(1, keepdim=True).clamp(min=1e-30)

        objective_BL, metrics = self.objective(logprobs_BL, old_BL, advantages, is_trained_BL)
        metrics |= policy_metrics(logprobs_BL, generator_BL, advantages, loss_weights)
        policy_weights_BL = weights_BL
        if self.correction is not None:
            trainer_BL = current_BL if generator_logprobs is None else old_BL
            factor_BL = self.correction(trainer_BL - generator_BL, is_trained_BL)
            policy_weights_BL = weights_BL * factor_BL
            metrics["correction:mean"] = _mean(factor_BL, is_trained_BL)
            metrics["correction_zero:mean"] = _mean((factor_BL == 0).float(), is_trained_BL)
        loss = -(policy_weights_BL * objective_BL).sum()
        if self.kl is not None:
            assert ref_logprobs is not None
            kl_BL = self.kl(logprobs_BL if self.kl.coefficient else current_BL, where_trained(ref_logprobs))
            if self.kl.coefficient:  # 0 times an infinite estimate would be NaN
                loss = loss + self.kl.coefficient * (weights_BL * kl_BL).sum()
            metrics["kl_reference:mean"] = _mean(kl_BL.detach(), is_trained_BL)
        if entropy is not None:
            loss = loss - self.entropy_coefficient * (weights_BL * entropy).sum()
            metrics["entropy:mean"] = _mean(entropy.detach(), is_trained_BL)
        return loss, {"loss:sum": loss.detach(), **metrics}


def policy_metrics(
    logprobs_BL: Tensor, generator_logprobs: Tensor, advantages: Tensor, loss_weights: Tensor
) -> Partials:
    """Metrics of all policy losses, over trained positions. r = p_trainer / p_generator.

    kl_policy_generator: k3 estimate r - 1 - log r of KL(generator, trainer) (Schulman,
    "Approximating KL divergence", 2020). effective_sample_fraction: 1 / E[r^2] (Kong 1992 with E[r]
    = 1), 1 if both agree; noise can raise it above 1. As a quotient of sums it can be merged.
    """
    is_trained_BL = loss_weights != 0
    count = is_trained_BL.sum()
    difference_BL = torch.where(is_trained_BL, logprobs_BL.detach() - generator_logprobs, 0.0)
    ratio_BL = difference_BL.exp()
    return {
        "logprob_diff:mean": (difference_BL.abs().sum(), count),
        "logprob_diff:max": difference_BL.abs().max(),
        "kl_policy_generator:mean": _mean(ratio_BL - 1 - difference_BL, is_trained_BL),
        "effective_sample_fraction:mean": (count, torch.where(is_trained_BL, ratio_BL.square(), 0.0).sum()),
        "ratio:mean": _mean(ratio_BL, is_trained_BL),
        "ratio:max": torch.where(is_trained_BL, ratio_BL, 0.0).max(),
        "advantage:mean": _mean(advantages, is_trained_BL),
        "advantage:min": torch.where(is_trained_BL, advantages, math.inf).min(),
        "advantage:max": torch.where(is_trained_BL, advantages, -math.inf).max(),
        "advantage_abs:mean": _mean(advantages.abs(), is_trained_BL),
        "entropy_estimate:mean": _mean(-logprobs_BL.detach(), is_trained_BL),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce(PolicyLoss):
    """J_i = A_i logprob_i (Williams, "Simple statistical gradient-following algorithms", 1992).

    Only metrics and a correction read old_logprobs.
    """

    corrects: ClassVar[bool] = False
    needs_old_logprobs: ClassVar[bool] = False

    def objective(
        self, logprobs_BL: Tensor, old_logprobs: Tensor, advantages: Tensor, is_trained_BL: Tensor
    ) -> tuple[Tensor, Partials]:
        return logprobs_BL * advantages, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceSampling(PolicyLoss):
    """J_i = r_i A_i with r_i = exp(logprob_i - old_logprob_i) (Tinker's `importance_sampling`)."""

    def objective(
        self, logprobs_BL: Tensor, old_logprobs: Tensor, advantages: Tensor, is_trained_BL: Tensor
    ) -> tuple[Tensor, Partials]:
        return (logprobs_BL - old_logprobs).exp() * advantages, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PPO(PolicyLoss):
    """J_i = min(r_i A_i, clip(r_i, ratio_low, ratio_high) A_i), r_i = exp(logprob_i -
    old_logprob_i) (Schulman et al., arXiv 1707.06347, eq. 7; Tinker's `ppo`).

    The larger upper bound is DAPO's clip-higher (arXiv 2503.14476). dual_clip=c > 1 also keeps J_i
    >= c A_i where A_i < 0 (Ye et al., arXiv 1912.09729, eq. 5).
    """

    ratio_low: float = 0.8
    ratio_high: float = 1.28
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        _require_bounds(self.ratio_low, self.ratio_high)
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise ValueError(f"dual_clip={self.dual_clip}; it must be above 1, or None")

    def objective(
        self, logprobs_BL: Tensor, old_logprobs: Tensor, advantages: Tensor, is_trained_BL: Tensor
    ) -> tuple[Tensor, Partials]:
        ratio_BL = (logprobs_BL - old_logprobs).exp()
        return self.clipped_objective(ratio_BL, advantages, is_trained_BL)

    def clipped_objective(self, ratio_BL: Tensor, advantages: Tensor, is_trained_BL: Tensor) -> tuple[Tensor, Partials]:
        """PPO's objective and clip metrics. A position is clipped if a bound changes J there.

        ratio_BL: per position, or in GSPO the sample's ratio at all its positions.
        """
        clipped_BL = ratio_BL.clamp(self.ratio_low, self.ratio_high)
        objective_BL = torch.minimum(ratio_BL * advantages, clipped_BL * advantages)
        was_clipped_BL = clipped_BL * advantages < ratio_BL * advantages
        if self.dual_clip is not None:
            floor_BL = self.dual_clip * advantages
            below_BL = (advantages < 0) & (objective_BL < floor_BL)
            objective_BL = torch.where(below_BL, floor_BL, objective_BL)
            was_clipped_BL = was_clipped_BL | below_BL
        return objective_BL, clip_metrics(was_clipped_BL, ratio_BL, is_trained_BL)


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO(PPO):
    """PPO with one ratio per sample, s = exp(mean of logprob_i - old_logprob_i over trained
    positions) (Zheng et al., arXiv 2507.18071).

    GSPO(sequence_mean=True) with grad_divisor = number of samples is the paper's eq. 5. The default
    bounds are the paper's, narrow because s is a geometric mean.
    """

    ratio_low: float = 1 - 3e-4
    ratio_high: float = 1 + 4e-4

    @property
    def whole_sequence(self) -> bool:
        return True

    def objective(
        self, logprobs_BL: Tensor, old_logprobs: Tensor, advantages: Tensor, is_trained_BL: Tensor
    ) -> tuple[Tensor, Partials]:
        ratio_B1 = sequence_mean(logprobs_BL - old_logprobs, is_trained_BL).exp()
        return self.clipped_objective(ratio_B1.expand_as(logprobs_BL), advantages, is_trained_BL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO(PolicyLoss):
    """J_i = clip(r_i, ratio_low, ratio_high) A_i logprob_i, r_i = exp(logprob_i - old_logprob_i)
    (MiniMax-M1, arXiv 2506.13585, eq. 4; Tinker's `cispo`).

    No gradient flows through the clipped ratio, so unlike PPO's, positions outside the bounds keep
    a gradient.
    """

    ratio_low: float = 0.0
    ratio_high: float = 4.0

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        _require_bounds(self.ratio_low, self.ratio_high)

    def objective(
        self, logprobs_BL: Tensor, old_logprobs: Tensor, advantages: Tensor, is_trained_BL: Tensor
    ) -> tuple[Tensor, Partials]:
        ratio_BL = (logprobs_BL.detach() - old_logprobs).exp()
        clipped_BL = ratio_BL.clamp(self.ratio_low, self.ratio_high)
        metrics = clip_metrics(clipped_BL != ratio_BL, ratio_BL, is_trained_BL)
        return clipped_BL * advantages * logprobs_BL, metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class DRO(PolicyLoss):
    """J_i = A_i logprob_i - beta / 2 (logprob_i - old_logprob_i)^2

    Richemond et al., arXiv 2405.19107; Kimi k1.5, arXiv 2501.12599; Tinker's `dro`, whose example
    has the default beta.
    """

    beta: float = 0.05

    corrects: ClassVar[bool] = False

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"beta={self.beta}; it must be finite and at least 0")

    def objective(
        self, logprobs_BL: Tensor, old_logprobs: Tensor, advantages: Tensor, is_trained_BL: Tensor
    ) -> tuple[Tensor, Partials]:
        penalty_BL = (logprobs_BL - old_logprobs).square() * self.beta / 2
        return logprobs_BL * advantages - penalty_BL, {}


def clip_metrics(was_clipped_BL: Tensor, ratio_BL: Tensor, is_trained_BL: Tensor) -> Partials:
    """The fraction of trained positions that were clipped; _low: with a ratio below 1."""
    is_low_BL = ratio_BL < 1
    return {
        "clip_fraction:mean": _mean(was_clipped_BL.float(), is_trained_BL),
        "clip_fraction_low:mean": _mean((was_clipped_BL & is_low_BL).float(), is_trained_BL),
        "clip_fraction_high:mean": _mean((was_clipped_BL & ~is_low_BL).float(), is_trained_BL),
    }


def _mean(values_BL: Tensor, is_trained_BL: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(is_trained_BL, values_BL, 0.0).sum(), is_trained_BL.sum()


def _require_bounds(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high < math.inf:
        raise ValueError(f"ratio_low={low}, ratio_high={high}; it must hold that 0 <= low <= 1 <= high < inf")
