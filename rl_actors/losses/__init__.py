"""The losses and their names. A loss is a function of logprobs and columns. It never gets logits. The losses of this package are frozen
dataclasses.

A column is a named tensor of the samples with an entry for each position, such as advantages. In shapes, B is the number of rows, L the
number of positions of a row, and K the number of ids that the column target_ids has for each position.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from rl_actors.losses.custom import LogprobGradient
from rl_actors.losses.options import KL, IcePop, TruncatedImportanceSampling
from rl_actors.losses.policy import CISPO, DRO, GSPO, PPO, ImportanceSampling, PolicyLoss, Reinforce
from rl_actors.losses.supervised import CrossEntropy
from rl_actors.losses.value import ValueLoss, explained_variance
from rl_actors.metrics import Partials

Loss = Callable[..., tuple[Tensor, Partials]]
"""A loss is called as loss(logprobs_BL, **columns_BL) and returns (sum over the positions, metrics). The end of a metric's name says how its
values from several calls are merged: `:sum`, `:mean`, `:max` or `:min`. A metric named `x:mean` is a pair (numerator, denominator).

A loss whose attribute `output` is "values" gets the values of a value model instead of logprobs.

A loss whose attribute `whole_sequence` is true gets rows with one sample each, padded with zeros. Any other loss may get only some of the
positions in each call. The sums of the calls are then added up.
Logprobs and columns are 0 at every position without a target: after the last sample of a row, and where a target is IGNORE_TARGET.
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

COMPUTED_BY_ENGINE = frozenset({"entropy", "target_logprobs"})
"""Arguments of a loss that the engine computes, so they are not columns. `entropy`, [B, L], is the entropy of the distribution over the
vocabulary. `target_logprobs`, [B, L, K], has the logprobs of the ids in the column target_ids. A loss gets target_logprobs only if the
samples have this column."""

__all__ = [
    "CISPO",
    "COMPUTED_BY_ENGINE",
    "DRO",
    "GSPO",
    "KL",
    "LOSSES",
    "PPO",
    "CrossEntropy",
    "IcePop",
    "ImportanceSampling",
    "LogprobGradient",
    "Loss",
    "PolicyLoss",
    "Reinforce",
    "TruncatedImportanceSampling",
    "ValueLoss",
    "columns_of",
    "computed_for",
    "explained_variance",
    "name_of",
    "output_of",
    "resolve",
]


def resolve(loss: "str | Loss") -> Loss:
    """The loss that a caller gives as an object or by its name.

    A name in LOSSES gives that loss with default options. "module:name" gives a loss of your own. `name` may be a function, an object that
    can be called, or a class. A class is called without arguments to make the loss. A callable that is not a class is returned as it is.
    Raises ValueError for anything else.
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
    """(names of the required columns, names of the optional columns) of a loss.

    These are the names that the loss's columns() method returns. For a loss without this method, these are its keyword-only arguments, and
    arguments with a default are optional. The arguments in COMPUTED_BY_ENGINE are left out.

    columns_of(ImportanceSampling()) -> ({"advantages", "loss_weights", "old_logprobs"}, {"generator_logprobs"})
    """
    required, optional = _reads(loss)
    return required - COMPUTED_BY_ENGINE, optional - COMPUTED_BY_ENGINE


def computed_for(loss: Loss) -> frozenset[str]:
    """The arguments of the loss that the engine computes: a subset of COMPUTED_BY_ENGINE."""
    required, optional = _reads(loss)
    return (required | optional) & COMPUTED_BY_ENGINE


def name_of(loss: Loss | None) -> str:
    """The name of a loss for error texts."""
    return getattr(loss, "__name__", type(loss).__name__)


def output_of(loss: Loss) -> str:
    """The output of the model that the loss reads: "logprobs", or "values" for the loss of a value model."""
    return getattr(loss, "output", "logprobs")


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
