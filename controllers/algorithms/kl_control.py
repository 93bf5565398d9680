"""A KL penalty on rewards, whose coefficient keeps the divergence near a target.

T_n positions of sequence n; the suffix _T marks [T_n].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl_actors import KL
from rl_actors.field_types import PositiveFloat


@dataclass(kw_only=True)
class KLControlConfig:
    """How the KL coefficient changes from step to step (arXiv 1909.08593, section 2.2)."""

    target: PositiveFloat | None = None
    """Desired mean KL per token, in nats. None: a constant coefficient."""
    gain: PositiveFloat = 0.1
    """A step multiplies the coefficient by 1 + gain * (KL / target - 1)."""
    max_error: PositiveFloat = 0.2
    """Limit of |KL / target - 1|, as in the paper."""

    def validate(self) -> None:
        if self.gain * self.max_error >= 1:
            raise ValueError(
                f"kl_control.gain={self.gain} times kl_control.max_error={self.max_error} is {self.gain * self.max_error:g}; "
                "it must be below 1, because otherwise the coefficient could become 0 or negative"
            )

    def next_kl(self, kl: KL, divergence: float) -> KL:
        """`kl` with the next step's coefficient: times 1 + gain * e, e = divergence / target - 1
        within max_error; unchanged without a target.

        divergence: mean of this step, per token. Raises ValueError for NaN with a target.
        """
        if self.target is None:
            return kl
        if math.isnan(divergence):
            raise ValueError("the KL divergence from the reference is NaN")
        error = min(max(divergence / self.target - 1, -self.max_error), self.max_error)
        return replace(kl, coefficient=kl.coefficient * (1 + self.gain * error))


def penalised_rewards(
    rewards: Sequence[Tensor],
    logprobs: Sequence[Tensor],
    ref_logprobs: Sequence[Tensor],
    is_action: Sequence[Tensor],
    kl: KL,
) -> list[Tensor]:
    """[T_n] by sample: rewards - kl.coefficient * kl_t at actions, else 0, even for NaN.

    rewards 0, 1, logprobs -0.5, -1, ref_logprobs -1, -1, k1, coefficient 0.1 -> -0.05, 1
    """
    estimates = token_divergences(logprobs, ref_logprobs, is_action, kl)
    rows = zip(rewards, estimates, is_action, strict=True)
    return [torch.where(action_T.bool(), reward_T - kl.coefficient * kl_T, 0.0) for reward_T, kl_T, action_T in rows]


def mean_divergence(
    logprobs: Sequence[Tensor], ref_logprobs: Sequence[Tensor], is_action: Sequence[Tensor], kl: KL
) -> float:
    """Mean of `kl` over all actions, without coefficient. Raises ValueError if there is none."""
    num_actions = sum(int(action_T.bool().sum()) for action_T in is_action)
    if not num_actions:
        raise ValueError(f"{len(is_action)} sequences have no action, so they have no mean KL divergence")
    estimates = token_divergences(logprobs, ref_logprobs, is_action, kl)
    return math.fsum(float(estimate_T.double().sum()) for estimate_T in estimates) / num_actions


def token_divergences(
    logprobs: Sequence[Tensor], ref_logprobs: Sequence[Tensor], is_action: Sequence[Tensor], kl: KL
) -> list[Tensor]:
    """[T_n] by sample: `kl` at actions, without the coefficient, and 0 elsewhere."""
    rows = zip(logprobs, ref_logprobs, is_action, strict=True)
    return [torch.where(action_T.bool(), kl(policy_T, reference_T), 0.0) for policy_T, reference_T, action_T in rows]
