"""Ctrl-C and SIGTERM: the first signal ends a run between two steps, the second at once."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

REPEATED_WITHIN = 1.0  # seconds without further signals: `timeout` signals a process, then its group


class Interrupted(BaseException):
    """The run ends and loses no trained step. A BaseException passes `except Exception`."""


class Interruption:
    """A first signal in `training` drops rollouts and lets the step end; others cancel the run's task."""

    def __init__(self, on_event: Callable[[str], None] = print) -> None:
        self.on_event = on_event
        self.received: signal.Signals | None = None  # the first signal
        self._received_at = 0.0
        self._is_training = False
        self._droppable: asyncio.Task[Any] | None = None

    def watch(self, task: "asyncio.Task[Any]") -> None:
        """Handle this process's signals. task: the run's, which a signal may cancel."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._handle, number, task)

    def _handle(self, number: signal.Signals, task: "asyncio.Task[Any]") -> None:
        is_first = self.received is None
        if is_first:
            self.received = number
            self._received_at = time.monotonic()
        elif time.monotonic() - self._received_at < REPEATED_WITHIN:
            return
        if not (is_first and self._is_training):
            self.on_event(f"{number.name}: the run ends at once")
            task.cancel(number.name)
            return
        self.on_event(
            f"{number.name}: the run ends after the step that is being trained; a second signal ends it at once, without a checkpoint"
        )
        if self._droppable is not None:
            self._droppable.cancel()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Context in which a first signal ends the run between two steps."""
        self._is_training = True
        try:
            yield
        finally:
            self._is_training = False

    def raise_if_asked(self) -> None:
        """Raises Interrupted after a signal. Call it where nothing is lost."""
        if self.received is not None:
            raise Interrupted(self.received.name)

    async def drop_if_asked(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that a signal may cancel, because a resumed run does it again."""
        self._droppable = asyncio.ensure_future(work)
        if self.received is not None:
            self._droppable.cancel()
        try:
            return await self._droppable
        except asyncio.CancelledError:
            running = asyncio.current_task()
            if self.received is None or (running is not None and running.cancelling()):
                raise  # the run's task was cancelled, or the work was cancelled without a signal
            raise Interrupted(self.received.name) from None
        finally:
            self._droppable = None
