"""Handles Ctrl-C and SIGTERM. The first signal ends a run between two steps. A second signal ends the run at once."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

REPEATED_WITHIN = 1.0
"""Further signals are ignored for this number of seconds after the first signal. The command `timeout` signals a process and then also the
process's group, so the process gets two signals instead of one."""


class Interrupted(BaseException):
    """Raised after a signal, at a point where the run can end without losing a trained step.

    It is a BaseException, so `except Exception` does not catch it.
    """


class Interruption:
    """Handles the signals that a run gets.

    If the first signal comes inside the context `training`, the run ends between two steps. A step that is being trained is finished, and then
    `raise_if_asked` raises Interrupted. Rollouts that are being made are dropped, and `drop_if_asked` raises Interrupted.
    If the first signal comes outside of this context, it cancels the run's task, so the run ends at once.
    Signals within REPEATED_WITHIN seconds after the first signal are ignored. Every later signal cancels the run's task.
    """

    def __init__(self, tell: Callable[[str], None] = print) -> None:
        """tell: function that shows a line to the user."""
        self.tell = tell
        self.received: signal.Signals | None = None  # the first signal
        self._received_at = 0.0
        self._is_training = False
        self._droppable: asyncio.Task[Any] | None = None

    def watch(self, task: "asyncio.Task[Any]") -> None:
        """Handle the signals of this process from now on. task: the run's task, which a signal may cancel."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._handle, number, task)

    def _handle(self, number: signal.Signals, task: "asyncio.Task[Any]") -> None:
        is_first = self.received is None
        if is_first:
            self.received, self._received_at = number, time.monotonic()
        elif time.monotonic() - self._received_at < REPEATED_WITHIN:
            return
        if not (is_first and self._is_training):
            self.tell(f"{number.name}: the run ends at once")
            task.cancel(number.name)
            return
        self.tell(
            f"{number.name}: the run ends after the step that is being trained; a second signal ends it at once, without a checkpoint"
        )
        if self._droppable is not None:
            self._droppable.cancel()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Context manager. A first signal in its body ends the run between two steps, not at once."""
        self._is_training = True
        try:
            yield
        finally:
            self._is_training = False

    def raise_if_asked(self) -> None:
        """Raise Interrupted if a signal has asked for the end of the run. Call this where nothing is lost if the run ends."""
        if self.received is not None:
            raise Interrupted(self.received.name)

    async def drop_if_asked(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that the first signal may cancel. Nothing is lost, because a resumed run does the work again.

        Raises Interrupted if the signal cancels the work, or if it came before the work began.
        """
        if self.received is not None:
            work.close()
            raise Interrupted(self.received.name)
        self._droppable = asyncio.ensure_future(work)
        try:
            return await self._droppable
        except asyncio.CancelledError:
            running = asyncio.current_task()
            if self.received is None or (running is not None and running.cancelling()):
                raise  # the run's task was cancelled, or the work was cancelled without a signal
            raise Interrupted(self.received.name) from None
        finally:
            self._droppable = None
