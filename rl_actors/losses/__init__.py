"""The losses and their names. A loss is a function of logprobs and columns, never of logits.

B rows, L positions of a row, K ids of the column target_ids at each position.
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
"""loss(logprobs_BL, **columns_BL) -> (sum over the positions, metrics of rl_actors.metrics).

With the attribute `output` = "values" it gets a value model's values instead of logprobs. With a
true `whole_sequence` it gets rows of one sample, padded with zeros; any other loss may get some of
the positions in each call. Logprobs and columns are 0 at positions without a target.
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
"""Arguments that the engine computes. `entropy` [B, L]: of the distribution over the vocabulary.
`target_logprobs` [B, L, K]: of the ids in the column target_ids, only if the samples have it.
"""

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
    """The loss from an object or a name.

    A name in LOSSES gives default options; in "module:name", `name` is a function, a callable
    object, or a class that is called without arguments. Raises ValueError for anything else.
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
    """(required, optional) columns: from the loss's columns(), or its keyword-only arguments."""
    required, optional = _reads(loss)
    return required - COMPUTED_BY_ENGINE, optional - COMPUTED_BY_ENGINE


def computed_for(loss: Loss) -> frozenset[str]:
    required, optional = _reads(loss)
    return (required | optional) & COMPUTED_BY_ENGINE


def name_of(loss: Loss | None) -> str:
    """For error texts."""
    return getattr(loss, "__name__", type(loss).__name__)


def output_of(loss: Loss) -> str:
    """What the loss reads: "logprobs", or "values" of a value model."""
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
