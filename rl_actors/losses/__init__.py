"""Losses by name. A loss is a frozen dataclass over columns that returns sums; it never sees logits."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from rl_actors.losses.policy import PPO, ImportanceSampling
from rl_actors.losses.supervised import CrossEntropy

Loss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""loss(logprobs_BL, **columns_BL) -> (sum, metrics). A metric named `x:mean` is a pair (numerator, denominator)."""

LOSSES: dict[str, type] = {"cross_entropy": CrossEntropy, "importance_sampling": ImportanceSampling, "ppo": PPO}

__all__ = ["LOSSES", "PPO", "CrossEntropy", "ImportanceSampling", "Loss", "columns_of", "resolve"]


def resolve(loss: "str | Loss") -> Loss:
    """A loss by its name with default options, or the loss itself. Raises ValueError for anything else."""
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ValueError(f"unknown loss {loss!r}; known are {', '.join(sorted(LOSSES))}")
        return LOSSES[loss]()
    if not callable(loss) or isinstance(loss, type):
        raise ValueError(
            f"unknown loss {loss!r}; give a name out of {', '.join(sorted(LOSSES))} or an instance such as PPO()"
        )
    return loss


def columns_of(loss: Loss) -> tuple[frozenset[str], frozenset[str]]:
    """The (required, optional) columns of a loss: the keyword-only arguments of its call.

    columns_of(CrossEntropy()) -> ({"loss_weights"}, {})
    """
    parameters = inspect.signature(loss).parameters.values()
    columns = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    required = frozenset(p.name for p in columns if p.default is p.empty)
    return required, frozenset(p.name for p in columns) - required
