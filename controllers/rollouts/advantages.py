"""Advantages [G, N] in float32 from rewards [G, N]: G groups of N completions of one prompt."""

from collections.abc import Callable

import torch
from torch import Tensor


def grpo(rewards_GN: Tensor, eps: float = 1e-6) -> Tensor:
    """GRPO (arXiv 2402.03300): (reward - group mean) / (group std + eps), std by N - 1."""
    centered_GN = _centered(rewards_GN)
    return _as_float32(centered_GN / (centered_GN.std(dim=1, keepdim=True) + eps))


def dr_grpo(rewards_GN: Tensor) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783): reward - group mean."""
    return _as_float32(_centered(rewards_GN))


def rloo(rewards_GN: Tensor) -> Tensor:
    """RLOO (arXiv 2402.14740): reward - mean of the group's other rewards."""
    num_completions = rewards_GN.shape[-1]
    # r - (sum - r) / (N - 1) equals N / (N - 1) * (r - sum / N)
    return _as_float32(_centered(rewards_GN) * num_completions / (num_completions - 1))


def reinforce_plus_plus(rewards_GN: Tensor, eps: float = 1e-6) -> Tensor:
    """REINFORCE++ with baseline (arXiv 2501.03262): reward - group mean, normalized by batch."""
    centered_GN = _centered(rewards_GN)
    return _as_float32((centered_GN - centered_GN.mean()) / (centered_GN.std() + eps))


def _as_float32(advantages_GN: Tensor) -> Tensor:
    found = advantages_GN.float()
    if not torch.isfinite(found).all():
        raise ValueError(f"an advantage of {float(advantages_GN.abs().max()):g} is not finite in float32")
    return found


def _centered(rewards_GN: Tensor) -> Tensor:
    """reward - group mean, in float64, because float32 loses differences of large rewards."""
    if rewards_GN.ndim != 2 or rewards_GN.shape[0] < 1 or rewards_GN.shape[1] < 2:
        raise ValueError(f"rewards have shape {tuple(rewards_GN.shape)}; expected [G, N] with G >= 1 and N >= 2")
    if not torch.isfinite(rewards_GN).all():
        raise ValueError(f"{int((~torch.isfinite(rewards_GN)).sum())} of {rewards_GN.numel()} rewards are not finite")
    return rewards_GN.double() - rewards_GN.double().mean(dim=1, keepdim=True)


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
}
