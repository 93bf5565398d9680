"""Advantages: pure functions from rewards [G, N] to advantages [G, N].

The functions know neither tokens nor losses. Other modules decide which groups are kept.

G groups (prompts), N completions of each.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def grpo(rewards_GN: Tensor, eps: float = 1e-6) -> Tensor:
    """(reward - group mean) / (group std + eps), std with N - 1 degrees of freedom: GRPO, arXiv 2402.03300.

    grpo([[1, 0]]) -> [[0.7071, -0.7071]]
    """
    return dr_grpo(rewards_GN) / (rewards_GN.float().std(dim=1, keepdim=True) + eps)


def dr_grpo(rewards_GN: Tensor) -> Tensor:
    """reward - group mean: Dr. GRPO, arXiv 2503.20783. Dr. GRPO leaves out GRPO's division, which favours very easy and very hard prompts.

    dr_grpo([[1, 0, 0, 1]]) -> [[0.5, -0.5, -0.5, 0.5]]
    """
    rewards_GN = _checked(rewards_GN)
    return rewards_GN - rewards_GN.mean(dim=1, keepdim=True)


def rloo(rewards_GN: Tensor) -> Tensor:
    """reward - mean of the group's other rewards: RLOO, arXiv 2402.14740.

    rloo([[1, 0, 0]]) -> [[1, -0.5, -0.5]]
    """
    num_completions = rewards_GN.shape[-1]
    # r - (sum - r) / (N - 1) equals N / (N - 1) * (r - sum / N).
    return dr_grpo(rewards_GN) * num_completions / (num_completions - 1)


def reinforce_plus_plus(rewards_GN: Tensor, eps: float = 1e-6) -> Tensor:
    """reward - group mean, then normalised over the whole batch: REINFORCE++ with baseline, arXiv 2501.03262.

    A group with widely spread rewards keeps its larger weight; grpo gives every group the same weight.
    """
    centered_GN = dr_grpo(rewards_GN)
    return (centered_GN - centered_GN.mean()) / (centered_GN.std() + eps)


def _checked(rewards_GN: Tensor) -> Tensor:
    if rewards_GN.ndim != 2 or rewards_GN.shape[0] < 1 or rewards_GN.shape[1] < 2:
        raise ValueError(f"rewards have shape {tuple(rewards_GN.shape)}; expected [G, N] with G >= 1 and N >= 2")
    if not torch.isfinite(rewards_GN).all():
        raise ValueError(f"{int((~torch.isfinite(rewards_GN)).sum())} of {rewards_GN.numel()} rewards are not finite")
    return rewards_GN.float()


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
}
