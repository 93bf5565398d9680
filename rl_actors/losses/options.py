"""Options of every policy loss (policy.py has the formula): KL, and corrections for the mismatch of
generator and trainer.

B rows, L positions; a correction with
level="sequence" needs rows of one sample.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

Level = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KL:
    """Adds coefficient * sum_i w_i kl_i to the loss, an estimate of KL(trainer, reference) from d_i
    = logprob_i - ref_logprob_i.

    k1: d_i;  k2: d_i^2 / 2;  k3: exp(-d_i) - 1 + d_i  (Schulman, "Approximating KL divergence",
    2020). On-policy, the expected gradient of k2 is that of the KL, and that of k1 is 0 (Tang and
    Munos, arXiv 2506.09477). coefficient=0 only reports kl_reference:mean.
    """

    coefficient: float
    estimator: Literal["k1", "k2", "k3"] = "k3"

    def __post_init__(self) -> None:
        _require_number("KL.coefficient", self.coefficient, low=0.0)
        _require_choice("KL.estimator", self.estimator, ("k1", "k2", "k3"))

    def __call__(self, logprobs_BL: Tensor, ref_logprobs: Tensor) -> Tensor:
        """kl_i, [B, L], without the coefficient."""
        difference_BL = logprobs_BL - ref_logprobs
        match self.estimator:
            case "k1":
                return difference_BL
            case "k2":
                return difference_BL.square() / 2
            case _:
                return (-difference_BL).exp() - 1 + difference_BL


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedImportanceSampling:
    """Multiplies the objective by min(q_i, cap), but not the terms of KL and entropy.

    q_i = p_trainer / p_generator; at level "sequence" its geometric mean over the sample's trained
    positions. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
    2025.
    """

    cap: float = 2.0
    level: Level = "token"

    reweights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require_number("TruncatedImportanceSampling.cap", self.cap, low=0.0, above=True)
        _require_choice("TruncatedImportanceSampling.level", self.level, ("token", "sequence"))

    def __call__(self, difference_BL: Tensor, is_trained_BL: Tensor) -> Tensor:
        """The factor c_i, [B, L]. difference_BL: log of each token's ratio."""
        return at_level(self.level, difference_BL, is_trained_BL).exp().clamp(max=self.cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class IcePop:
    """Drops the objective where q_i is outside [low, high], but not the terms of KL and entropy.

    q_i as in TruncatedImportanceSampling. reweights: multiply by q_i inside the bounds, as in the
    paper (Ling team, "Every step evolves", arXiv 2510.18855).
    """

    low: float = 0.5
    high: float = 5.0
    reweights: bool = False
    level: Level = "token"

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 <= self.high < math.inf:
            raise ValueError(f"IcePop.low={self.low}, high={self.high}; it must hold that 0 <= low <= 1 <= high < inf")
        _require_choice("IcePop.level", self.level, ("token", "sequence"))

    def __call__(self, difference_BL: Tensor, is_trained_BL: Tensor) -> Tensor:
        """As TruncatedImportanceSampling."""
        ratio_BL = at_level(self.level, difference_BL, is_trained_BL).exp()
        kept_BL = (self.low <= ratio_BL) & (ratio_BL <= self.high)
        return torch.where(kept_BL, ratio_BL if self.reweights else 1.0, 0.0)


Correction = TruncatedImportanceSampling | IcePop


def sequence_mean(values_BL: Tensor, is_trained_BL: Tensor) -> Tensor:
    """Mean over a row's trained positions, [B, 1]; 0 for a row without any."""
    total_B1 = torch.where(is_trained_BL, values_BL, 0.0).sum(1, keepdim=True)
    return total_B1 / is_trained_BL.sum(1, keepdim=True).clamp(min=1)


def at_level(level: Level, values_BL: Tensor, is_trained_BL: Tensor) -> Tensor:
    """The values, or at level "sequence" the mean over the trained positions of the row."""
    if level == "token":
        return values_BL
    return sequence_mean(values_BL, is_trained_BL).expand_as(values_BL)


def _require_number(name: str, value: float, *, low: float, above: bool = False) -> None:
    if not (isinstance(value, float | int) and (value > low if above else value >= low) and value < math.inf):
        raise ValueError(f"{name}={value}; it must be finite and {'above' if above else 'at least'} {low:g}")


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}; it must be one of {', '.join(choices)}")
