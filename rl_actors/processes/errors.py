"""Makes the errors of endpoints reach the caller: Monarch ends an actor whose exception cannot be
pickled.
"""

import functools
import pickle
import traceback
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

import cloudpickle
from monarch.actor import current_rank

P = ParamSpec("P")
T = TypeVar("T")


def sends_errors(method: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Wrap an async endpoint: its exceptions get the attribute `rank`, and one that cannot be
    pickled becomes a RuntimeError with its traceback as text.
    """

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except Exception as error:
            sent = error if _travels(error) else RuntimeError("".join(traceback.format_exception(error)))
            # an error that engine/collectives.py raises for another rank names that rank already
            if not hasattr(sent, "rank"):
                rank = error.rank if hasattr(error, "rank") else current_rank().rank
                sent.rank = rank  # type: ignore[attr-defined]
            raise sent  # noqa: B904  # `from error` would attach an error that perhaps cannot be sent

    return call


def _travels(error: Exception) -> bool:
    """True if pickling keeps the error's type."""
    try:
        return type(pickle.loads(cloudpickle.dumps(error))) is type(error)
    except Exception:
        return False
