"""`Call`, a handle to the answer of a client's call. All clients of a process share a background
thread with an event loop, so they work in a REPL, a script, calls of asyncio.run, and Jupyter.
"""

import asyncio
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Generic, TypeVar

T = TypeVar("T")


class Call(Generic[T]):
    """A handle to an answer: `await` it, or wait with `.result()`. Nobody needs to wait.

    A warning shows the error of a failed call for whose answer nobody has asked.
    """

    def __init__(self, future: "Future[T]", what: str, *, can_cancel: bool = False) -> None:
        """what: names of the client and of the call, for error texts. can_cancel: a cancelled call leaves its actor as it was."""
        self._future = future
        self._what = what
        self._can_cancel = can_cancel
        self._asked = False

    def result(self, timeout: float | None = None) -> T:
        """Wait for the answer. Raises the call's error, and TimeoutError after `timeout` seconds.

        A timeout ends only the waiting, as does Ctrl-C, which also cancels a `generate`.
        """
        try:
            answer = self._future.result(timeout)
        except FutureTimeout as error:
            if self._future.done():  # the call failed with a TimeoutError of its own, or it ended just after the wait
                self._asked = True
                return self._future.result()
            raise TimeoutError(
                f"{self._what} has not answered within {timeout:g} s; it is still running, and result() can be called again"
            ) from error
        except Exception:
            self._asked = True
            raise
        except KeyboardInterrupt:
            self.cancel()
            raise
        self._asked = True
        return answer

    def cancel(self) -> bool:
        """End a running `generate`: its requests are aborted, and `result` raises CancelledError.
        Returns False if the call has ended or is another call, which ranks run to its end.
        """
        is_cancelled = self._can_cancel and self._future.cancel()
        self._asked = self._asked or is_cancelled
        return is_cancelled

    def done(self) -> bool:
        return self._future.done()

    def failed(self) -> bool:
        """True if the call has ended with an error or was cancelled."""
        return self._future.done() and (self._future.cancelled() or self._future.exception() is not None)

    def may_fail_unasked(self) -> bool:
        """True if the call runs or has failed, and its answer was not asked for."""
        return not (self._asked or (self._future.done() and not self.failed()))

    async def unasked_failure(self) -> BaseException | None:
        """Wait for the end. Returns, once, an error that nobody has asked for."""
        if self._asked:
            return None
        ended = self._ended()
        await asyncio.wait([ended])
        error = None if ended.cancelled() else ended.exception()
        if error is None or self._asked:
            return None
        self._asked = True
        return error

    def __await__(self) -> Generator[object, None, T]:
        self._asked = True
        # shield: a wait_for timeout must not cancel a call that the ranks are running
        return asyncio.shield(self._ended()).__await__()

    def _ended(self) -> "asyncio.Future[T]":
        """The answer, as a future of the running event loop."""
        ended = asyncio.wrap_future(self._future)
        # else asyncio would log an error that the waiting task, cancelled meanwhile, does not read
        ended.add_done_callback(_mark_error_as_seen)
        return ended

    def __repr__(self) -> str:
        return f"<Call {self._what}: {self._state()}>"

    def _state(self) -> str:
        if not self._future.done():
            return "running"
        if self._future.cancelled():
            return "cancelled"
        error = self._future.exception()
        return "done" if error is None else f"failed with {error!r}"

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # at the end of the program this module's globals may be None; by a callback, because the call may still run
        if not (getattr(self, "_asked", True) or is_finalizing()):
            self._future.add_done_callback(functools.partial(_warn_of_failure, self._what))


def _mark_error_as_seen(future: "asyncio.Future[T]") -> None:
    if not future.cancelled():
        future.exception()


def _warn_of_failure(what: str, future: "Future[T]") -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        warnings.warn(f"{what} failed and nobody asked for its answer: {error!r}", RuntimeWarning, stacklevel=2)


_lock = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []  # the one of the daemon thread that the first call starts


def in_background(coroutine: Coroutine[object, None, T], what: str, *, can_cancel: bool = False) -> Call[T]:
    """Run a coroutine on the thread that all clients of this process share. what, can_cancel: see Call."""
    with _lock:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=_loops[0].run_forever, name="rl_actors", daemon=True).start()
    return Call(asyncio.run_coroutine_threadsafe(coroutine, _loops[0]), what, can_cancel=can_cancel)
