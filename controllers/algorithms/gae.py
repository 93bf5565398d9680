"""Advantages and returns from rewards and values: generalised advantage estimation (arXiv 1506.02438).

An action is a position whose token the policy sampled. Other positions are skipped, such as the positions of a prompt or of an environment's
answer. So the state after an action is the state before the next action, and skipped positions add no discount.

In shapes, N is the number of sequences, T_n is the number of positions of sequence n, and T is the largest T_n.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STD_EPS = 1e-8


@dataclass(kw_only=True)
class GAEConfig:
    gamma: float = 1.0
    """Discount. A reward that comes n actions later is multiplied by gamma^n. 1: no discount, which is usual if the only reward comes at the end."""
    actor_lambda: float = 0.95
    """λ of the policy's advantages. If it is 1, an advantage is the return minus the value, and has no bias. A lower λ gives less
    variance, but errors of the values then bias the advantages. 0.95 is the choice of VC-PPO (arXiv 2503.01491)."""
    critic_lambda: float = 1.0
    """λ of the returns that the value model learns. 1: a return is the discounted sum of the rewards, which has no bias (VC-PPO)."""
    length_adaptive: float = 0.0
    """Above 0, this is α, and a sequence has λ = 1 - 1 / (α * number of actions) instead of actor_lambda (VAPO, arXiv 2504.05118, with
    α = 0.05). A sequence of 1 / α actions or fewer has λ = 0. 0: every sequence has actor_lambda."""

    bootstrap: bool = True
    """The value of the last state of a sequence that a limit has cut off. True: the critic's value, as if the sequence went on (arXiv
    1712.00378). False: 0, as for a sequence that was not cut off."""
    whiten: bool = True
    """True: the advantages are shifted and scaled to mean 0 and standard deviation 1, over all actions of a step's batch."""

    def validate(self) -> None:
        for name in ("gamma", "actor_lambda", "critic_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"gae.{name}={getattr(self, name)}; it must be in [0, 1]")
        if not 0 <= self.length_adaptive < math.inf:
            raise ValueError(f"gae.length_adaptive={self.length_adaptive}; it must be finite and at least 0")

    def actor_lambdas(self, num_actions: Tensor) -> Tensor:
        """λ of the advantages of every sequence, [N] float64. num_actions: [N]."""
        if not self.length_adaptive:
            return torch.full((len(num_actions),), self.actor_lambda, dtype=torch.float64)
        return (1 - 1 / (self.length_adaptive * num_actions.double())).clamp(min=0.0)


def estimate(
    values: Sequence[Tensor],
    rewards: Sequence[Tensor],
    is_action: Sequence[Tensor],
    last_values: Sequence[float],
    config: GAEConfig,
) -> tuple[list[Tensor], list[Tensor]]:
    """The advantages and the returns of every sequence, as tensors [T_n] of float64. They are 0 at positions that are no actions.

    values: [T_n], the value of the state before each position's token. rewards: [T_n], the reward for each action. is_action: [T_n] bool.
    last_values: for each sequence the value of the state after its last action; 0 if the sequence was not cut off.
    Numbers at positions that are no actions are not read, so they may be NaN.

    For action a let d_a = r_a + γ V_{a+1} - V_a, where V_{a+1} of the last action is the number in last_values. Then
    advantage_a = sum_{k >= 0} (γ λ)^k d_{a+k}, and return_a is V_a plus the same sum with the critic's λ.

    Example: two actions, γ = 1, λ = 1, values 0.5 and 0.75, rewards 0 and 1. Then the advantages are 0.5 and 0.25, and the returns 1 and 1.

    Raises ValueError if the lists differ in length, if the tensors of a sequence differ in length, or if a sequence has no action.
    """
    _require_same_lengths(values, rewards, is_action, last_values)
    if not values:
        return [], []
    action_NT = _padded(is_action).bool()
    # Values and rewards at positions that are no actions may be NaN. torch.where replaces them by 0. A multiplication by the mask would keep NaN.
    values_NT = torch.where(action_NT, _padded(values), 0.0)
    rewards_NT = torch.where(action_NT, _padded(rewards), 0.0)
    last_N = torch.tensor(last_values, dtype=torch.float64)
    lambdas_N = config.actor_lambdas(action_NT.sum(1))
    advantages_NT = _advantages(values_NT, rewards_NT, action_NT, last_N, config.gamma, lambdas_N)
    critic_N = torch.full_like(lambdas_N, config.critic_lambda)
    returns_NT = values_NT + _advantages(values_NT, rewards_NT, action_NT, last_N, config.gamma, critic_N)
    lengths = [len(row) for row in values]
    return _unpadded(advantages_NT, lengths), _unpadded(returns_NT, lengths)


def _advantages(
    values_NT: Tensor, rewards_NT: Tensor, action_NT: Tensor, last_N: Tensor, gamma: float, lambda_N: Tensor
) -> Tensor:
    """The advantages, computed from the last position to the first.

    A position that is no action leaves next_value_N and next_advantage_N unchanged. So the last action before such a
    position uses the value and the advantage of the first action after the position.
    """
    found_NT = torch.zeros_like(values_NT)
    next_value_N = last_N
    next_advantage_N = torch.zeros_like(last_N)
    for t in reversed(range(values_NT.shape[1])):
        difference_N = rewards_NT[:, t] + gamma * next_value_N - values_NT[:, t]
        advantage_N = difference_N + gamma * lambda_N * next_advantage_N
        next_value_N = torch.where(action_NT[:, t], values_NT[:, t], next_value_N)
        next_advantage_N = torch.where(action_NT[:, t], advantage_N, next_advantage_N)
        found_NT[:, t] = torch.where(action_NT[:, t], advantage_N, 0.0)
    return found_NT


def whiten(rows: Sequence[Tensor], is_action: Sequence[Tensor]) -> list[Tensor]:
    """(x - mean) / (std + 1e-8) for the number x of each action, and 0 at other positions. Mean and std are over the actions of all rows.
    The variance divides by the number of actions minus 1.

    Whiten the whole batch at once: if minibatches are whitened one by one, equal advantages become unequal. If there is
    only one action, its whitened x is 0.
    """
    if not rows:
        return []
    action_NT = _padded(is_action).bool()
    values_NT = _padded(rows)
    actions = values_NT[action_NT]
    std = actions.std() if len(actions) > 1 else torch.tensor(0.0)
    whitened_NT = torch.where(action_NT, (values_NT - actions.mean()) / (std + STD_EPS), 0.0)
    return _unpadded(whitened_NT, [len(row) for row in rows])


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """[N, T] float64, 0 after the end of a row."""
    return torch.nn.utils.rnn.pad_sequence([row.double() for row in rows], batch_first=True)


def _unpadded(values_NT: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return [row[:length] for row, length in zip(values_NT, lengths, strict=True)]


def _require_same_lengths(
    values: Sequence[Tensor], rewards: Sequence[Tensor], is_action: Sequence[Tensor], last_values: Sequence[float]
) -> None:
    counts = {"values": len(values), "rewards": len(rewards), "is_action": len(is_action)}
    counts["last_values"] = len(last_values)
    if len(set(counts.values())) > 1:
        raise ValueError(f"the numbers of sequences differ: {counts}")
    for index, (row, reward_row, action_row) in enumerate(zip(values, rewards, is_action, strict=True)):
        lengths = {"values": len(row), "rewards": len(reward_row), "is_action": len(action_row)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the lengths of sequence {index} differ: {lengths}")
        if not action_row.any():
            raise ValueError(f"sequence {index} of {len(row)} positions has no action")
