"""Tinker's losses by name, each a sum over tokens, with the formulas of Tinker's documentation.

Unlike the losses of rl_actors.losses they read no loss weights, and have a clip bound per position.
lp: the trainer's logprob of a target; q: the client's, input `logprobs`; A: advantage; r = exp(lp -
q); clip(x): x limited to [clip_low, clip_high]. B rows, L positions.
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

OUR_NAMES = {
    "weights": "loss_weights",
    "logprobs": "old_logprobs",
    "clip_low_threshold": "clip_low",
    "clip_high_threshold": "clip_high",
}
"""Names of inputs and options that have another name as column of a Sample and field of a loss."""


def _result(loss: Tensor, logprobs_BL: Tensor, old_BL: Tensor, advantages: Tensor) -> tuple[Tensor, Partials]:
    is_trained_BL = (advantages != 0).float()
    return loss, {"loss:sum": loss.detach(), **policy_metrics(logprobs_BL, old_BL, advantages, is_trained_BL)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceSampling:
    """-sum r A"""

    def __call__(self, logprobs_BL: Tensor, *, old_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Partials]:
        loss = -((logprobs_BL - old_logprobs).exp() * advantages).sum()
        return _result(loss, logprobs_BL, old_logprobs, advantages)


def _smaller_objective(
    ratio_BL: Tensor, logprobs_BL: Tensor, old_BL: Tensor, advantages: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Partials]:
    """-sum min(ratio A, clip(ratio) A), with metrics."""
    clipped_BL = _clip(ratio_BL, low, high) * advantages
    unclipped_BL = ratio_BL * advantages
    loss, metrics = _result(-torch.minimum(unclipped_BL, clipped_BL).sum(), logprobs_BL, old_BL, advantages)
    return loss, metrics | clip_metrics(clipped_BL < unclipped_BL, ratio_BL, advantages != 0)


def _clip(ratio_BL: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(ratio_BL, low), high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """The bounds of a datum that has none."""

    clip_low: float = 0.8
    clip_high: float = 1.2

    def __post_init__(self) -> None:
        if self.clip_low > self.clip_high:
            raise ValueError(f"clip_low_threshold={self.clip_low} is above clip_high_threshold={self.clip_high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerPPO(Clipped):
    """-sum min(r A, clip(r) A)"""

    def __call__(
        self, logprobs_BL: Tensor, *, old_logprobs: Tensor, advantages: Tensor, clip_low: Tensor, clip_high: Tensor
    ) -> tuple[Tensor, Partials]:
        ratio_BL = (logprobs_BL - old_logprobs).exp()
        return _smaller_objective(ratio_BL, logprobs_BL, old_logprobs, advantages, clip_low, clip_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO(Clipped):
    """-sum stop_gradient(clip(r)) A lp"""

    clip_low: float = 0.0
    clip_high: float = 4.0

    def __call__(
        self, logprobs_BL: Tensor, *, old_logprobs: Tensor, advantages: Tensor, clip_low: Tensor, clip_high: Tensor
    ) -> tuple[Tensor, Partials]:
        ratio_BL = (logprobs_BL.detach() - old_logprobs).exp()
        clipped_BL = _clip(ratio_BL, clip_low, clip_high)
        loss, metrics = _result(-(clipped_BL * advantages * logprobs_BL).sum(), logprobs_BL, old_logprobs, advantages)
        return loss, metrics | clip_metrics(clipped_BL != ratio_BL, ratio_BL, advantages != 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO(Clipped):
    """-sum min(s A, clip(s) A), s = exp(m + lp - stop_gradient(lp)) (arXiv 2507.18071, section 4.3)

    m: mean of lp - q over a datum, weighted by sequence_ratio_mask, without gradient.
    """

    whole_sequence: ClassVar[bool] = True

    def __call__(
        self,
        logprobs_BL: Tensor,
        *,
        old_logprobs: Tensor,
        advantages: Tensor,
        clip_low: Tensor,
        clip_high: Tensor,
        sequence_ratio_mask: Tensor,
    ) -> tuple[Tensor, Partials]:
        difference_BL = (logprobs_BL.detach() - old_logprobs) * sequence_ratio_mask
        mean_B1 = difference_BL.sum(1, keepdim=True) / sequence_ratio_mask.sum(1, keepdim=True).clamp(min=1e-30)
        ratio_BL = (mean_B1 + logprobs_BL - logprobs_BL.detach()).exp()
        return _smaller_objective(ratio_BL, logprobs_BL, old_logprobs, advantages, clip_low, clip_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class DRO:
    """-sum (A lp - beta / 2 (lp - q)^2)"""

    beta: float = 0.05

    def __call__(self, logprobs_BL: Tensor, *, old_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Partials]:
        penalty_BL = (logprobs_BL - old_logprobs).square() * self.beta / 2
        loss = -(logprobs_BL * advantages - penalty_BL).sum()
        return _result(loss, logprobs_BL, old_logprobs, advantages)


@dataclass(frozen=True, slots=True, kw_only=True)
class StableReinforce:
    """-sum stop_gradient(c) A lp + kl_coeff / 2 sum is_sampled (lp - q)^2

    c: min(r, 2) for r in [1/8, 8], else 0. Our own formula: Tinker has not published its own.
    """

    kl_coeff: float = 0.0

    def __call__(
        self, logprobs_BL: Tensor, *, old_logprobs: Tensor, advantages: Tensor, is_sampled: Tensor
    ) -> tuple[Tensor, Partials]:
        ratio_BL = (logprobs_BL.detach() - old_logprobs).exp()
        is_near_BL = (ratio_BL >= 1 / 8) & (ratio_BL <= 8)
        factor_BL = torch.where(is_near_BL, ratio_BL.clamp(max=2), 0.0)
        penalty_BL = is_sampled * (logprobs_BL - old_logprobs).square() / 2
        loss = -(factor_BL * advantages * logprobs_BL).sum() + self.kl_coeff * penalty_BL.sum()
        loss, metrics = _result(loss, logprobs_BL, old_logprobs, advantages)
        is_trained_BL = advantages != 0
        return loss, metrics | {
            "ratio_dropped:mean": ((is_trained_BL & ~is_near_BL).float().sum(), is_trained_BL.sum())
        }


_RATIO_INPUTS = frozenset({"target_tokens", "logprobs", "advantages"})
_BOUNDS = frozenset({"clip_low_threshold", "clip_high_threshold"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind:
    """A loss of the protocol."""

    make: type
    required: frozenset[str] = _RATIO_INPUTS  # inputs of a datum
    optional: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()  # entries of loss_fn_config


KINDS = {
    "cross_entropy": LossKind(
        make=CrossEntropy, required=frozenset({"target_tokens"}), optional=frozenset({"weights"})
    ),
    "importance_sampling": LossKind(make=ImportanceSampling),
    "ppo": LossKind(make=TinkerPPO, optional=_BOUNDS, options=_BOUNDS),
    "cispo": LossKind(make=CISPO, optional=_BOUNDS, options=_BOUNDS),
    "dro": LossKind(make=DRO, options=frozenset({"beta"})),
    "gspo": LossKind(make=GSPO, required=_RATIO_INPUTS | {"sequence_ratio_mask"}, optional=_BOUNDS, options=_BOUNDS),
    "stable_reinforce": LossKind(make=StableReinforce, options=frozenset({"kl_coeff"})),
}


def make_loss(name: str, config: Mapping[str, float | str]) -> Loss:
    """The loss with the options of loss_fn_config. Raises ValueError for a wrong name or option."""
    if name == "custom":
        raise ValueError(
            "the loss custom is not supported: the server runs only the losses that it knows; "
            "forward_backward_custom of the SDK runs a loss of your own in the client"
        )
    if name not in KINDS:
        raise ValueError(f"unknown loss {name!r}; known are {', '.join(sorted(KINDS))}")
    kind = KINDS[name]
    options: dict[str, float] = {}
    for entry, value in config.items():
        if entry not in kind.options:
            known = ", ".join(sorted(kind.options)) or "none"
            raise ValueError(f"loss_fn_config has {entry!r}, which is not an option of {name}; its options: {known}")
        if isinstance(value, str) or not 0 <= value < math.inf:
            raise ValueError(f"loss_fn_config[{entry!r}]={value!r}; it must be a finite number of at least 0")
        options[OUR_NAMES.get(entry, entry)] = value
    return kind.make(**options)
