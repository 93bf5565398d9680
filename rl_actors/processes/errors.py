"""Errors that reach another process. An exception that cannot be pickled would end a Monarch actor."""

import functools
import pickle
import traceback
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

import cloudpickle

P = ParamSpec("P")
T = TypeVar("T")


def sendable(error: Exception) -> Exception:
    """The error, or a RuntimeError with its traceback if pickling would lose it or its type."""
    try:
        if type(pickle.loads(cloudpickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    return RuntimeError("\n".join([repr(error), *traceback.format_exception(error)]))


def sends_errors(method: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Wrap an endpoint: its exceptions become `sendable`, and name the `rank` that failed."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except Exception as error:
            # engine/collectives.py may have raised the error of another rank here, which then has
            # its rank.
            rank = error.rank if hasattr(error, "rank") else _own_rank()
            sent = sendable(error)
            sent.rank = rank  # type: ignore[attr-defined]
            raise sent  # noqa: B904  # `from error` would attach an error that perhaps cannot be sent

    return call


def _own_rank() -> int:
    from monarch.actor import current_rank  # here, because the engine imports this module

    return current_rank().rank
