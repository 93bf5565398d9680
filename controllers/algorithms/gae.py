"""Generalised advantage estimation (arXiv 1506.02438) from rewards and values.

The state after an action is the state before the next one: other positions are skipped without
discount. N sequences, T_n positions of sequence n, T the largest T_n.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_actors.field_types import NonNegativeFloat, Share

STD_EPS = 1e-8


@dataclass(kw_only=True)
class GAEConfig:
    gamma: Share = 1.0
    """Discount per action. 1: none, usual for a single reward at the end."""
    actor_lambda: Share = 0.95
    """λ of the advantages (VC-PPO, arXiv 2503.01491). 1: unbiased. Lower: less variance."""
    critic_lambda: Share = 1.0
    """λ of the critic's returns. 1: the discounted sum of rewards, unbiased (VC-PPO)."""
    length_adaptive: NonNegativeFloat = 0.0
    """α of λ = max(0, 1 - 1 / (α * actions)) (VAPO, arXiv 2504.05118). 0: actor_lambda."""
    bootstrap: bool = True
    """The last state of a cut-off sequence has the critic's value (arXiv 1712.00378). False: 0."""
    whiten: bool = True
    """Normalize the advantages to mean 0 and standard deviation 1 over all actions of a step."""

    def actor_lambdas(self, num_actions: Tensor) -> Tensor:
        """λ of the advantages, [N] float64. num_actions: [N]."""
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
    """(advantages, returns), each [T_n] float64 by sequence, 0 where there is no action.

    values: [T_n], of the state before each token. rewards: [T_n]. is_action: [T_n] bool.
    last_values: of the state after the last action, 0 if not cut off. What is no action may be NaN.
    With d_a = r_a + γ V_{a+1} - V_a: advantage_a = sum_{k >= 0} (γ λ)^k d_{a+k}, and return_a is
    V_a plus that sum with the critic's λ.
    Raises ValueError if lengths differ, or for a sequence without actions.
    """
    counts = [len(rows) for rows in (values, rewards, is_action, last_values)]
    if len(set(counts)) > 1:
        raise ValueError(f"the numbers of sequences differ: values, rewards, is_action, last_values have {counts}")
    for index, rows in enumerate(zip(values, rewards, is_action, strict=True)):
        lengths = [len(row) for row in rows]
        if len(set(lengths)) > 1:
            raise ValueError(f"the lengths of sequence {index} differ: values, rewards, is_action have {lengths}")
        if not is_action[index].any():
            raise ValueError(f"sequence {index} of {lengths[0]} positions has no action")
    if not values:
        return [], []
    action_NT = _padded(is_action).bool()
    # torch.where, because a product with the mask would keep NaN
    values_NT = torch.where(action_NT, _padded(values), 0.0)
    rewards_NT = torch.where(action_NT, _padded(rewards), 0.0)
    last_N = torch.tensor(last_values, dtype=torch.float64)
    lambdas_N = config.actor_lambdas(action_NT.sum(1))
    advantages_NT = _advantages(values_NT, rewards_NT, action_NT, last_N, config.gamma, lambdas_N)
    critic_N = torch.full_like(lambdas_N, config.critic_lambda)
    returns_NT = values_NT + _advantages(values_NT, rewards_NT, action_NT, last_N, config.gamma, critic_N)
    return _like(values, advantages_NT), _like(values, returns_NT)


def _advantages(
    values_NT: Tensor, rewards_NT: Tensor, action_NT: Tensor, last_N: Tensor, gamma: float, lambda_N: Tensor
) -> Tensor:
    """From the last position to the first; what is no action changes neither `next` value."""
    advantages_NT = torch.zeros_like(values_NT)
    next_value_N = last_N
    next_advantage_N = torch.zeros_like(last_N)
    for t in reversed(range(values_NT.shape[1])):
        difference_N = rewards_NT[:, t] + gamma * next_value_N - values_NT[:, t]
        advantage_N = difference_N + gamma * lambda_N * next_advantage_N
        next_value_N = torch.where(action_NT[:, t], values_NT[:, t], next_value_N)
        next_advantage_N = torch.where(action_NT[:, t], advantage_N, next_advantage_N)
        advantages_NT[:, t] = torch.where(action_NT[:, t], advantage_N, 0.0)
    return advantages_NT


def whiten(rows: Sequence[Tensor], is_action: Sequence[Tensor]) -> list[Tensor]:
    """(x - mean) / (std + 1e-8) over the actions of all rows, 0 elsewhere; std with n - 1.

    By minibatch, equal advantages would become unequal. A single action gives 0.
    """
    if not rows:
        return []
    action_NT = _padded(is_action).bool()
    values_NT = _padded(rows)
    actions = values_NT[action_NT]
    std = actions.std() if len(actions) > 1 else torch.tensor(0.0)
    whitened_NT = torch.where(action_NT, (values_NT - actions.mean()) / (std + STD_EPS), 0.0)
    return _like(rows, whitened_NT)


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """[N, T] float64, 0 after the end of a row"""
    return torch.nn.utils.rnn.pad_sequence([row.double() for row in rows], batch_first=True)


def _like(rows: Sequence[Tensor], values_NT: Tensor) -> list[Tensor]:
    """The values with the lengths of the rows."""
    return [values[: len(row)] for row, values in zip(rows, values_NT, strict=True)]
