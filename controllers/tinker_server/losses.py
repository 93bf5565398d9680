"""Tinker's losses by name, each a sum over tokens, with the formulas of Tinker's documentation
(stable_reinforce is our own).

Unlike the losses of rl_actors.losses they read no loss weights, their clip bounds may be columns,
and gspo reads a mask. cross_entropy is CrossEntropy of rl_actors.losses.

lp: the trainer's logprob of a target; q: the client's, input `logprobs`; A: advantage; r = exp(lp -
q); clip(x): x limited to [low, high]. B rows, L positions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rl_actors.losses import CrossEntropy, Loss
from rl_actors.losses.policy import clip_metrics, policy_metrics
from rl_actors.metrics import Partials

COLUMN_OF_INPUT = {
    "weights": "loss_weights",
    "logprobs": "old_logprobs",
    "advantages": "advantages",
    "clip_low_threshold": "clip_low",
    "clip_high_threshold": "clip_high",
    "sequence_ratio_mask": "sequence_ratio_mask",
}
"""Input of a datum -> column of its Sample, with one target per position. target_tokens become the
targets.
"""


def _result(loss: Tensor, logprobs_BL: Tensor, old_BL: Tensor, advantages: Tensor) -> tuple[Tensor, Partials]:
    is_trained_BL = (advantages != 0).float()
    return loss, {"loss:sum": loss.detach(), **policy_metrics(logprobs_BL, old_BL, advantages, is_trained_BL)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceSampling:
    """-sum r A"""

    def __call__(self, logprobs_BL: Tensor, *, old_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Partials]:
        loss = -((logprobs_BL - old_logprobs).exp() * advantages).sum()
        return _result(loss, logprobs_BL, old_logprobs, advantages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """Base of the losses with a clipped ratio. The optional columns clip_low and clip_high replace
    `low` and `high` at each position.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high < math.inf:
            raise ValueError(
                f"clip_low_threshold={self.low}, clip_high_threshold={self.high}; it must hold that 0 <= low <= high < inf"
            )

    def clip(self, ratio_BL: Tensor, clip_low: Tensor | None, clip_high: Tensor | None) -> Tensor:
        low = torch.full_like(ratio_BL, self.low) if clip_low is None else clip_low
        high = torch.full_like(ratio_BL, self.high) if clip_high is None else clip_high
        return torch.minimum(torch.maximum(ratio_BL, low), high)

    def smaller_objective(
        self,
        ratio_BL: Tensor,
        logprobs_BL: Tensor,
        old_BL: Tensor,
        advantages: Tensor,
        clip_low: Tensor | None,
        clip_high: Tensor | None,
    ) -> tuple[Tensor, Partials]:
        """(-sum min(ratio A, clip(ratio) A), metrics)"""
        clipped_BL = self.clip(ratio_BL, clip_low, clip_high) * advantages
        unclipped_BL = ratio_BL * advantages
        loss = -torch.minimum(unclipped_BL, clipped_BL).sum()
        loss, metrics = _result(loss, logprobs_BL, old_BL, advantages)
        return loss, metrics | clip_metrics(clipped_BL < unclipped_BL, ratio_BL, advantages != 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PPO(Clipped):
    """-sum min(r A, clip(r) A)"""

    low: float = 0.8
    high: float = 1.2

    def __call__(
        self,
        logprobs_BL: Tensor,
        *,
        old_logprobs: Tensor,
        advantages: Tensor,
        clip_low: Tensor | None = None,
        clip_high: Tensor | None = None,
    ) -> tuple[Tensor, Partials]:
        ratio_BL = (logprobs_BL - old_logprobs).exp()
        return self.smaller_objective(ratio_BL, logprobs_BL, old_logprobs, advantages, clip_low, clip_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO(Clipped):
    """-sum stop_gradient(clip(r)) A lp"""

    low: float = 0.0
    high: float = 4.0

    def __call__(
        self,
        logprobs_BL: Tensor,
        *,
        old_logprobs: Tensor,
        advantages: Tensor,
        clip_low: Tensor | None = None,
        clip_high: Tensor | None = None,
    ) -> tuple[Tensor, Partials]:
        ratio_BL = (logprobs_BL.detach() - old_logprobs).exp()
        clipped_BL = self.clip(ratio_BL, clip_low, clip_high)
        loss, metrics = _result(-(clipped_BL * advantages * logprobs_BL).sum(), logprobs_BL, old_logprobs, advantages)
        return loss, metrics | clip_metrics(clipped_BL != ratio_BL, ratio_BL, advantages != 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DRO:
    """-sum (A lp - beta / 2 (lp - q)^2)"""

    beta: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"beta={self.beta}; it must be finite and at least 0")

    def __call__(self, logprobs_BL: Tensor, *, old_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Partials]:
        penalty_BL = (logprobs_BL - old_logprobs).square() * self.beta / 2
        loss = -(logprobs_BL * advantages - penalty_BL).sum()
        return _result(loss, logprobs_BL, old_logprobs, advantages)


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO(Clipped):
    """-sum min(s A, clip(s) A) with s = exp(m + lp - stop_gradient(lp)) (GSPO-token, arXiv
    2507.18071, section 4.3).

    m: mean of lp - q over a datum, weighted by sequence_ratio_mask, without gradient.
    """

    low: float = 0.8
    high: float = 1.2

    whole_sequence: ClassVar[bool] = True

    def __call__(
        self,
        logprobs_BL: Tensor,
        *,
        old_logprobs: Tensor,
        advantages: Tensor,
        sequence_ratio_mask: Tensor,
        clip_low: Tensor | None = None,
        clip_high: Tensor | None = None,
    ) -> tuple[Tensor, Partials]:
        difference_BL = (logprobs_BL.detach() - old_logprobs) * sequence_ratio_mask
        mean_B1 = difference_BL.sum(1, keepdim=True) / sequence_ratio_mask.sum(1, keepdim=True).clamp(min=1e-30)
        ratio_BL = (mean_B1 + logprobs_BL - logprobs_BL.detach()).exp()
        return self.smaller_objective(ratio_BL, logprobs_BL, old_logprobs, advantages, clip_low, clip_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class StableReinforce:
    """-sum stop_gradient(c) A lp + kl_coeff / 2 sum m (lp - q)^2, with m = 1 at sampled tokens,
    else 0.

    c is min(r, 2) for r in [1/8, 8], else 0. Tinker has not published the formula of its loss of
    this name; this one is our own, so the numbers differ.
    """

    kl_coeff: float = 0.0

    cap: ClassVar[float] = 2.0
    farthest: ClassVar[float] = 8.0

    def __post_init__(self) -> None:
        if not 0 <= self.kl_coeff < math.inf:
            raise ValueError(f"kl_coeff={self.kl_coeff}; it must be finite and at least 0")

    def __call__(
        self, logprobs_BL: Tensor, *, old_logprobs: Tensor, advantages: Tensor, is_sampled: Tensor
    ) -> tuple[Tensor, Partials]:
        ratio_BL = (logprobs_BL.detach() - old_logprobs).exp()
        is_near_BL = (ratio_BL >= 1 / self.farthest) & (ratio_BL <= self.farthest)
        factor_BL = torch.where(is_near_BL, ratio_BL.clamp(max=self.cap), 0.0)
        penalty_BL = is_sampled * (logprobs_BL - old_logprobs).square() / 2
        loss = -(factor_BL * advantages * logprobs_BL).sum() + self.kl_coeff * penalty_BL.sum()
        loss, metrics = _result(loss, logprobs_BL, old_logprobs, advantages)
        is_trained_BL = advantages != 0
        dropped_BL = torch.where(is_trained_BL, (~is_near_BL).float(), 0.0)
        return loss, metrics | {"ratio_dropped:mean": (dropped_BL.sum(), is_trained_BL.sum())}


_CLIP = {"clip_low_threshold": "low", "clip_high_threshold": "high"}
_RATIO_INPUTS = frozenset({"target_tokens", "logprobs", "advantages"})
_CLIP_INPUTS = frozenset(_CLIP)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind:
    """A loss of the protocol."""

    make: type
    required: frozenset[str]  # of a datum
    optional: frozenset[str] = frozenset()
    options: Mapping[str, str]  # entry of loss_fn_config -> field of the loss


KINDS = {
    "cross_entropy": LossKind(
        make=CrossEntropy, required=frozenset({"target_tokens"}), optional=frozenset({"weights"}), options={}
    ),
    "importance_sampling": LossKind(make=ImportanceSampling, required=_RATIO_INPUTS, options={}),
    "ppo": LossKind(make=PPO, required=_RATIO_INPUTS, optional=_CLIP_INPUTS, options=_CLIP),
    "cispo": LossKind(make=CISPO, required=_RATIO_INPUTS, optional=_CLIP_INPUTS, options=_CLIP),
    "dro": LossKind(make=DRO, required=_RATIO_INPUTS, options={"beta": "beta"}),
    "gspo": LossKind(make=GSPO, required=_RATIO_INPUTS | {"sequence_ratio_mask"}, optional=_CLIP_INPUTS, options=_CLIP),
    "stable_reinforce": LossKind(make=StableReinforce, required=_RATIO_INPUTS, options={"kl_coeff": "kl_coeff"}),
}


def kind_of(name: str) -> LossKind:
    """Raises ValueError for "custom" and unknown names."""
    if name == "custom":
        raise ValueError(
            "the loss custom is not supported: the server runs only the losses that it knows; "
            "forward_backward_custom of the SDK runs a loss of your own in the client"
        )
    if name not in KINDS:
        raise ValueError(f"unknown loss {name!r}; known are {', '.join(sorted(KINDS))}")
    return KINDS[name]


def make_loss(name: str, config: Mapping[str, float | str]) -> Loss:
    """The loss with the options of loss_fn_config. Raises ValueError for an unknown loss, option or
    value.
    """
    kind = kind_of(name)
    options: dict[str, float] = {}
    for entry, value in config.items():
        if entry not in kind.options:
            known = ", ".join(sorted(kind.options)) or "none"
            raise ValueError(f"loss_fn_config has {entry!r}, which is not an option of {name}; its options: {known}")
        if isinstance(value, str):
            raise ValueError(f"loss_fn_config[{entry!r}]={value!r}; it must be a number")
        options[kind.options[entry]] = value
    return kind.make(**options)
