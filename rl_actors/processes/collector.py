"""Settings of Python's garbage collector in a process that this package spawned. In other processes these functions change no setting."""

import contextlib
import gc
import os
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """A context for imports. No garbage is collected during the imports. Every object that exists at the end of the context is left out of
    all later collections.

    Imported modules make hundreds of thousands of objects that live as long as the process. Every collection would look
    through all of these objects. Python collects often while vLLM is imported and when vLLM starts its engine. These
    collections took three of the ten seconds of a start.
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
    """Leave every object that exists now out of all later collections, and collect garbage from now on.

    Does nothing in a process that this package did not spawn. collect: True collects the garbage first. Garbage that exists now and is not
    collected stays until the process ends.
    """
    if _is_ours():
        if collect:
            gc.collect()
        gc.freeze()
        gc.enable()


def _is_ours() -> bool:
    return "RL_ACTORS_PROCESS" in os.environ
