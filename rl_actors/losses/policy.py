"""Policy-gradient losses: pure functions of the trainer's logprobs, the generator's logprobs and advantages.

A subclass of PolicyLoss defines the objective at a position. PolicyLoss adds weights, options and metrics. A position
is trained if its loss weight is not 0.

B is the number of rows of a batch, and L is the length of a row. A row may hold several samples. If the property
`whole_sequence` of a loss is True, each row holds one sample.
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
    """The loss is sum_i -w_i c_i J_i + kl.coefficient sum_i w_i kl_i - entropy_coefficient sum_i w_i H_i

    At position i, w is the loss weight, J is the objective of the subclass, c is the factor of the correction (1
    without a correction), kl is the estimate of KL(trainer, reference), and H is the entropy of the
    distribution over the vocabulary. In the formulas of the subclasses, A is the advantage.
    The factor c is a function of q = p_trainer / p_generator. If samples have the column generator_logprobs, then
    old_logprobs are the trainer's logprobs from before the update, and q = exp(old_logprobs - generator_logprobs).
    Without this column, old_logprobs are the generator's, and q = exp(logprobs - old_logprobs). No gradient flows
    through q.
    sequence_mean divides the weights w of a sample by the sum of their absolute values, so that every sample counts the
    same. In GRPO's formula this is the factor 1 / |o|.
    """

    kl: KL | None = None  # if it is set, the loss reads the column ref_logprobs
    entropy_coefficient: float = 0.0
    correction: Correction | None = None
    sequence_mean: bool = False

    # True: J contains the ratio exp(logprobs - old_logprobs). If old_logprobs are the generator's, J already corrects
    # for the difference between generator and trainer.
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
        """Returns two sets of names: the keyword arguments that `__call__` requires, and its optional keyword arguments.

        The options, such as the correction, decide which arguments are required. The engine computes the argument
        `entropy`. The other arguments are columns of the samples.
        """
        required, optional = {"loss_weights", "advantages"}, {"generator_logprobs", "old_logprobs"}
        if self.needs_old_logprobs or self.correction is not None:
            required.add("old_logprobs")
        if self.kl is not None:
            required.add("ref_logprobs")
        if self.entropy_coefficient:
            required.add("entropy")
        if self.correction is not None and self.correction.reweights and self.corrects:
            # Without generator_logprobs, q would be the ratio exp(logprobs - old_logprobs). J contains this ratio
            # already, so the ratio would count twice.
            required.add("generator_logprobs")
        return frozenset(required), frozenset(optional - required)

    def objective(
        self, logprobs_BL: Tensor, old_logprobs: Tensor, advantages: Tensor, is_trained_BL: Tensor
    ) -> tuple[Tensor, Partials]:
        """Returns J [B, L], which training maximises, and the metrics of the subclass."""
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
            # A ratio could overflow at a position that is not trained. The loss would then contain 0 * inf = NaN. So
            # such a position gets the current logprob, which makes its ratio 1.
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
    """Metrics that all policy losses report. They cover only trained positions.

    The metrics describe the advantages, an estimate of the entropy, and the distance of the generator's logprobs from
    the trainer's logprobs. The ratio r is p_trainer / p_generator.

    kl_policy_generator is the k3 estimate r - 1 - log r of KL(generator, trainer) (Schulman, "Approximating KL
    divergence", 2020).
    effective_sample_fraction is 1 / E[r^2], the effective sample size divided by the number of positions (Kong 1992
    with E[r] = 1). This fraction is 1 if p_trainer and p_generator agree. Noise can raise it above 1. The fractions of
    several calls can be merged, because each fraction is a quotient of two sums.
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

    The objective does not read old_logprobs. Only the metrics and a correction read them.
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
    """J_i = min(r_i A_i, clip(r_i, ratio_low, ratio_high) A_i) (Schulman et al., arXiv 1707.06347, eq. 7; Tinker's `ppo`).

    r_i is exp(logprob_i - old_logprob_i).
    DAPO's clip-higher (arXiv 2503.14476) is the larger upper bound.
    dual_clip=c, with c > 1, also keeps J_i at or above c A_i where A_i < 0 (Ye et al., arXiv 1912.09729, eq. 5).
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
        """PPO's objective, and the metrics of clipping. A position counts as clipped if a bound changes J there.

        ratio_BL: PPO has one ratio per position. GSPO repeats the ratio of a sample at all its positions.
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
    """PPO with one ratio s per sample (Zheng et al., arXiv 2507.18071).

    s = exp(mean of logprob_i - old_logprob_i over the sample's trained positions i).
    Equation 5 of the paper is a mean over samples. GSPO(sequence_mean=True) computes this mean if the optimizer step
    divides the gradient by the number of samples (OptimParams.grad_divisor).
    The default bounds are the paper's. They are narrow because s is a geometric mean.
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
    """J_i = clip(r_i, ratio_low, ratio_high) A_i logprob_i (MiniMax-M1, arXiv 2506.13585, eq. 4; Tinker's `cispo`).

    r_i is exp(logprob_i - old_logprob_i). No gradient flows through the clipped ratio: it is a constant factor of
    logprob_i. So a position outside the bounds still has a gradient. In PPO a clipped position has none.
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

    Sources: Richemond et al., arXiv 2405.19107; Kimi k1.5, arXiv 2501.12599; Tinker's `dro`. The default beta is from
    Tinker's example.
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
    """The fraction of the trained positions that were clipped.

    clip_fraction_low counts only positions whose ratio is below 1. clip_fraction_high counts only the other positions.
    """
    is_low_BL = ratio_BL < 1
    return {
        "clip_fraction:mean": _mean(was_clipped_BL.float(), is_trained_BL),
        "clip_fraction_low:mean": _mean((was_clipped_BL & is_low_BL).float(), is_trained_BL),
        "clip_fraction_high:mean": _mean((was_clipped_BL & ~is_low_BL).float(), is_trained_BL),
    }


def _mean(values_BL: Tensor, is_trained_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of a mean over trained positions."""
    return torch.where(is_trained_BL, values_BL, 0.0).sum(), is_trained_BL.sum()


def _require_bounds(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high < math.inf:
        raise ValueError(f"ratio_low={low}, ratio_high={high}; it must hold that 0 <= low <= 1 <= high < inf")
