"""What an endpoint raises must reach its caller: Monarch ends an actor whose exception cannot be pickled."""

import functools
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle
from monarch.actor import current_rank


def sends_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Leave the rank on what an async method raises, and replace what cannot travel by a RuntimeError with its words."""

    @functools.wraps(method)
    async def call(self, *args, **kwargs):
        try:
            return await method(self, *args, **kwargs)
        except Exception as error:
            sent = error if _travels(error) else RuntimeError("".join(traceback.format_exception(error)))
            if not hasattr(error, "rank"):  # a failure that one rank told all others says whose it is
                sent.rank = current_rank().rank  # type: ignore[attr-defined]  # the client tells where it was raised
            raise sent  # noqa: B904  # `from` would bring the error that cannot travel

    return call


def _travels(error: Exception) -> bool:
    try:
        return type(pickle.loads(cloudpickle.dumps(error))) is type(error)
    except Exception:
        return False
