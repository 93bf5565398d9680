"""Settings of Python's garbage collector in a process that this package spawned. In other processes these functions change no setting."""

import contextlib
import gc
import os
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Context manager for imports. The garbage collector is off during the imports. Later collections skip every object that exists at the
    end of the context.

    Imported modules make hundreds of thousands of objects that live as long as the process. Every full collection would
    look through all of these objects. Python collects often while vLLM is imported and when vLLM starts its engine. These
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
    """Turn the garbage collector on. Its collections skip every object that exists now.

    collect: True collects the garbage first. False: garbage that exists now stays until the process ends.
    Does nothing in a process that this package did not spawn.
    """
    if _is_ours():
        if collect:
            gc.collect()
        gc.freeze()
        gc.enable()


def _is_ours() -> bool:
    return "RL_ACTORS_PROCESS" in os.environ
