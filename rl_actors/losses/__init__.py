"""Losses by name. A loss is a frozen dataclass whose call takes logprobs and columns and returns sums. It never sees logits."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from rl_actors.losses.custom import LogprobGradient
from rl_actors.losses.options import KL, IcePop, TruncatedImportanceSampling
from rl_actors.losses.policy import CISPO, DRO, GSPO, PPO, ImportanceSampling, PolicyLoss, Reinforce
from rl_actors.losses.supervised import CrossEntropy
from rl_actors.metrics import Partials

Loss = Callable[..., tuple[Tensor, Partials]]
"""loss(logprobs_BL, **columns_BL) -> (sum, metrics). A metric named `x:mean` is a pair (numerator, denominator).

A loss with a true attribute `whole_sequence` gets one sample a row, padded with zeros. Any other loss may get any piece of any rows.
Logprobs and columns are 0 at every position without a target: behind the samples of a row, and where a sample's target is padding.
"""

LOSSES: dict[str, type] = {
    "cispo": CISPO,
    "cross_entropy": CrossEntropy,
    "dro": DRO,
    "gspo": GSPO,
    "importance_sampling": ImportanceSampling,
    "ppo": PPO,
    "reinforce": Reinforce,
}

MADE = frozenset({"entropy", "target_logprobs"})
"""Arguments of a loss that the engine computes: the entropy [B, L] of the whole distribution, and the logprobs [B, L, K] of the
column target_ids, where samples have it."""

__all__ = [
    "CISPO",
    "DRO",
    "GSPO",
    "KL",
    "LOSSES",
    "MADE",
    "PPO",
    "CrossEntropy",
    "IcePop",
    "ImportanceSampling",
    "LogprobGradient",
    "Loss",
    "PolicyLoss",
    "Reinforce",
    "TruncatedImportanceSampling",
    "columns_of",
    "made_for",
    "name_of",
    "resolve",
]


def resolve(loss: "str | Loss") -> Loss:
    """The loss of a name in LOSSES with default options, of a "module:name" of your own (a function, an instance, or a class that
    needs no arguments), or the given loss itself. Raises ValueError for anything else.
    """
    if isinstance(loss, str) and ":" in loss:
        loss = _imported(loss)
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ValueError(f"unknown loss {loss!r}; known are {', '.join(sorted(LOSSES))}, and 'module:name'")
        return LOSSES[loss]()
    if not callable(loss) or isinstance(loss, type):
        raise ValueError(
            f"unknown loss {loss!r}; give one of the names {', '.join(sorted(LOSSES))} or an instance such as PPO()"
        )
    return loss


def columns_of(loss: Loss) -> tuple[frozenset[str], frozenset[str]]:
    """The (required, optional) columns of a loss: the keyword-only arguments of its call, or the result of its columns() method.

    columns_of(ImportanceSampling()) -> ({"advantages", "loss_weights", "old_logprobs"}, {"generator_logprobs"})
    """
    required, optional = _reads(loss)
    return required - MADE, optional - MADE


def made_for(loss: Loss) -> frozenset[str]:
    """The arguments of the loss that the engine computes: a subset of MADE."""
    return frozenset().union(*_reads(loss)) & MADE


def name_of(loss: Loss | None) -> str:
    """The name of a loss for error texts."""
    return getattr(loss, "__name__", type(loss).__name__)


def _reads(loss: Loss) -> tuple[frozenset[str], frozenset[str]]:
    if hasattr(loss, "columns"):
        return loss.columns()
    parameters = inspect.signature(loss).parameters.values()
    keywords = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    required = frozenset(keyword.name for keyword in keywords if keyword.default is keyword.empty)
    return required, frozenset(keyword.name for keyword in keywords) - required


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
        return found() if isinstance(found, type) else found
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"loss {name!r} cannot be used: {error}") from error
