"""Garbage collector settings of the processes that this package spawns; does nothing in others."""

import contextlib
import gc
import os
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import without garbage collection, and let later collections skip what exists then.

    Collections took three of the ten seconds in which vLLM starts.
    """
    if not _is_ours():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        keep()


def keep(*, collect: bool = False) -> None:
    """Turn the collector on; it skips every object that exists now. collect: collect first."""
    if _is_ours():
        if collect:
            gc.collect()
        gc.freeze()
        gc.enable()


def _is_ours() -> bool:
    return "RL_ACTORS_PROCESS" in os.environ
