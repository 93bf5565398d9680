"""Answers under way, and the one background thread that all clients of a process share. Knows no actors.

So a REPL, a script, repeated asyncio.run and a running Jupyter loop work alike.
"""

import asyncio
import threading
from collections.abc import Coroutine, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Call(Generic[T]):
    """An answer under way. `await` it, or wait with `.result()`; it goes on whether or not anybody waits."""

    def __init__(self, future: "Future[T]", what: str) -> None:
        self._future, self._what = future, what

    def result(self, timeout: float | None = None) -> T:
        """Wait for the answer. TimeoutError and Ctrl-C end the waiting, not the call: ask again for the result."""
        try:
            return self._future.result(timeout)
        except FutureTimeout as error:
            if self._future.done():
                raise  # the call's own TimeoutError
            raise TimeoutError(f"{self._what} has not answered within {timeout:g} s and goes on; ask again") from error

    def done(self) -> bool:
        return self._future.done()

    def __await__(self) -> Generator[Any, None, T]:
        # shield: an `asyncio.wait_for` around it must not cancel what the ranks are doing
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()


class _Background:
    """One daemon thread with an event loop, made at first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, T], what: str) -> Call[T]:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="rl_actors", daemon=True).start()
        return Call(asyncio.run_coroutine_threadsafe(coroutine, self._loop), what)


_background = _Background()


def in_background(coroutine: Coroutine[Any, Any, T], what: str) -> Call[T]:
    """Run a coroutine on the thread that all clients of this process share."""
    return _background.run(coroutine, what)
