"""The garbage collector of a process that this package spawned. The collector of another program's process is not changed."""

import contextlib
import gc
import os
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import modules without garbage collections. Later collections leave out every object that exists at the end.

    Modules make hundreds of thousands of objects that live as long as the process. Collections while vLLM is imported, and those that vLLM
    itself makes when its engine starts, look through all of them. They took three of the ten seconds of a start.
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
    """Leave every object that exists now out of all later collections, and collect from now on. Only in a process that we spawned.

    collect: True to collect the garbage first, which would otherwise stay until the process ends.
    """
    if _is_ours():
        if collect:
            gc.collect()
        gc.freeze()
        gc.enable()


def _is_ours() -> bool:
    return "RL_ACTORS_PROCESS" in os.environ
