"""Keeps the policy near a reference model by a penalty on the KL divergence between them.

`penalised_rewards` subtracts a penalty from the reward of every action. An action is a position whose token the policy sampled.
KLControlConfig changes the coefficient of the penalty from step to step, so that the divergence stays near a target. reference.py starts
the reference model. `rl_actors.KL` computes estimates of the divergence, and can add them to a loss.

In shapes, T_n is the number of positions of sequence n. The suffix _T marks a tensor of the shape [T_n].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl_actors import KL


@dataclass(kw_only=True)
class KLControlConfig:
    """Rule by which the coefficient of the KL divergence changes from step to step (arXiv 1909.08593, section 2.2)."""

    target: float | None = None
    """Desired mean KL divergence per token, in nats. None: the coefficient never changes."""
    gain: float = 0.1
    """Strength of the control. After each step the coefficient is multiplied by 1 + gain * error. The error is divergence / target - 1,
    limited by max_error. 0.1 is the paper's value."""
    max_error: float = 0.2
    """The error is clamped to [-max_error, max_error] before it is multiplied by gain. 0.2 is the paper's value."""

    def validate(self) -> None:
        """Raises ValueError naming the value and the limit."""
        for name in ("target", "gain", "max_error"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"kl_control.{name}={value}; it must be finite and above 0")
        if self.gain * self.max_error >= 1:
            raise ValueError(
                f"kl_control.gain={self.gain} times kl_control.max_error={self.max_error} is {self.gain * self.max_error:g}; it must be "
                "below 1, because otherwise the coefficient could become 0 or negative"
            )

    def next_coefficient(self, coefficient: float, divergence: float) -> float:
        """The coefficient of the next step. divergence: the mean KL divergence of a token in this step.

        The result is coefficient * (1 + gain * e), where e is divergence / target - 1, clamped to [-max_error, max_error]. Without a target the
        coefficient does not change.

        Example: target 0.01, gain 0.1, max_error 0.2, coefficient 1. A divergence of 0.02 gives 1.02, and a divergence of 0.009 gives 0.99.

        Raises ValueError if there is a target and the divergence is NaN.
        """
        if self.target is None:
            return coefficient
        if math.isnan(divergence):
            raise ValueError("the KL divergence from the reference is NaN")
        error = min(max(divergence / self.target - 1, -self.max_error), self.max_error)
        return coefficient * (1 + self.gain * error)

    def next_kl(self, kl: KL, divergence: float) -> KL:
        """`kl` with the coefficient of the next step."""
        return replace(kl, coefficient=self.next_coefficient(kl.coefficient, divergence))


def penalised_rewards(
    rewards: Sequence[Tensor],
    logprobs: Sequence[Tensor],
    ref_logprobs: Sequence[Tensor],
    is_action: Sequence[Tensor],
    kl: KL,
) -> list[Tensor]:
    """For each sequence a tensor [T_n]: rewards - kl.coefficient * kl_t at the actions, and 0 at other positions.

    kl_t is the estimate of the divergence at position t. It is computed from the token's logprob under the policy that sampled the token,
    and from its logprob under the reference. Values at positions that are not actions have no effect, so these values may be NaN.

    Example: two actions, rewards 0 and 1, logprobs -0.5 and -1, ref_logprobs -1 and -1, estimator k1, coefficient 0.1 -> -0.05 and 1.
    """
    estimates = token_divergences(logprobs, ref_logprobs, is_action, kl)
    penalised = []
    for reward_T, estimate_T, action_T in zip(rewards, estimates, is_action, strict=True):
        penalised.append(torch.where(action_T.bool(), reward_T - kl.coefficient * estimate_T, 0.0))
    return penalised


def mean_divergence(
    logprobs: Sequence[Tensor], ref_logprobs: Sequence[Tensor], is_action: Sequence[Tensor], kl: KL
) -> float:
    """The mean of the estimates of `kl` over the actions of all sequences, without the coefficient. Raises ValueError if there is no action."""
    num_actions = sum(int(action_T.bool().sum()) for action_T in is_action)
    if not num_actions:
        raise ValueError(f"{len(is_action)} sequences have no action, so they have no mean KL divergence")
    estimates = token_divergences(logprobs, ref_logprobs, is_action, kl)
    return math.fsum(float(estimate_T.double().sum()) for estimate_T in estimates) / num_actions


def token_divergences(
    logprobs: Sequence[Tensor], ref_logprobs: Sequence[Tensor], is_action: Sequence[Tensor], kl: KL
) -> list[Tensor]:
    """For each sequence a tensor [T_n]: the estimate of `kl` at the actions, without the coefficient, and 0 at other positions."""
    found = []
    for policy_T, reference_T, action_T in zip(logprobs, ref_logprobs, is_action, strict=True):
        found.append(torch.where(action_T.bool(), kl(policy_T, reference_T), 0.0))
    return found
