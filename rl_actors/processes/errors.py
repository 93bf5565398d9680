"""Makes the errors of endpoints reach the caller. An endpoint is a method of an actor that other processes can call.

If an endpoint raised an exception that cannot be pickled, Monarch would end the actor. So such an exception is replaced.
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
    """Wrap an async endpoint so that its exceptions can be sent to the caller. They also get the attribute `rank`, the rank that failed.

    An exception that cannot be pickled is replaced by a RuntimeError, whose text is the traceback of the exception.
    """

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except Exception as error:
            sent = error if _travels(error) else RuntimeError("".join(traceback.format_exception(error)))
            # The client tells its caller the rank that failed. If engine/collectives.py has raised the error of another rank here, the
            # error already names that rank.
            if not hasattr(sent, "rank"):
                rank = error.rank if hasattr(error, "rank") else current_rank().rank
                sent.rank = rank  # type: ignore[attr-defined]
            raise sent  # noqa: B904  # `from error` would attach an error that perhaps cannot be sent

    return call


def _travels(error: Exception) -> bool:
    """True if the error can be pickled, and has the same type after unpickling."""
    try:
        return type(pickle.loads(cloudpickle.dumps(error))) is type(error)
    except Exception:
        return False
