"""`FinishedGroups`, the iterator that GeneratorClient.generate_each returns. It gives the completions of a prompt as soon as all of them are done.

The iterator works with `async for` in any event loop, and with `for` in a program without an event loop, such as a REPL.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

from rl_actors.clients.call import Call, in_background

T = TypeVar("T")


class FinishedGroups(Generic[T]):
    """Iterator of one pair for each prompt: (index of the prompt, results of the prompt). The pairs come in the order in which the prompts finish.

    When the iterator is closed or garbage-collected, the prompts that have not finished are aborted. CPython collects the iterator of a loop as soon
    as the loop is left by break, return, an exception or a cancellation, unless something else still refers to the iterator.
    """

    def __init__(
        self,
        started: Call[int],
        num_prompts: int,
        *,
        fetch: Callable[[int], Coroutine[object, None, list[tuple[int, T]]]],
        abort: Callable[[int], Coroutine[object, None, None]],
        what: str,
    ) -> None:
        """started: handle of the call that starts the generation. The answer of this call is a number that identifies the generation.

        fetch: takes this number, waits until at least one more prompt has finished, and returns the new pairs. abort: takes this number and
        ends the generation. what: name of the call in error texts.
        """
        self._started, self._num_left, self._fetch, self._abort, self._what = started, num_prompts, fetch, abort, what
        self._finished: deque[tuple[int, T]] = deque()  # fetched, but not yet given to the caller
        self._fetching: Call[list[tuple[int, T]]] | None = None

    def __aiter__(self) -> "FinishedGroups[T]":
        return self

    async def __anext__(self) -> tuple[int, T]:
        while not self._finished:
            if self._num_left == 0:
                raise StopAsyncIteration
            # If the caller's task is cancelled, the fetch goes on. The next __anext__ waits for the answer of this fetch.
            fetching = self._begin_fetch()
            self._take(fetching, await fetching)
        return self._finished.popleft()

    def __iter__(self) -> "FinishedGroups[T]":
        return self

    def __next__(self) -> tuple[int, T]:
        while not self._finished:
            if self._num_left == 0:
                raise StopIteration
            fetching = self._begin_fetch()
            self._take(fetching, fetching.result())
        return self._finished.popleft()

    async def aclose(self) -> None:
        """Abort the prompts that have not finished. Does nothing if the generation has ended or was aborted already."""
        if (aborting := self._begin_abort()) is not None:
            await aborting

    def close(self) -> None:
        """`aclose` for a caller without an event loop."""
        if (aborting := self._begin_abort()) is not None:
            aborting.result()

    def _begin_fetch(self) -> Call[list[tuple[int, T]]]:
        if self._fetching is None:
            # If the coroutine referred to this object, the object could not be garbage-collected while the coroutine waits. So the coroutine
            # is not a method, and gets only the two attributes that it needs.
            self._fetching = in_background(_fetch_more(self._started, self._fetch), self._what)
        return self._fetching

    def _take(self, fetching: Call[list[tuple[int, T]]], groups: list[tuple[int, T]]) -> None:
        if self._fetching is not fetching:
            return  # another task waited for the same answer and has taken it
        self._fetching = None
        self._num_left -= len(groups)
        self._finished.extend(groups)

    def _begin_abort(self) -> Call[None] | None:
        has_failed = self._fetching is not None and self._fetching.failed()
        if self._num_left == 0 or has_failed:
            return None
        self._num_left = 0
        self._finished.clear()
        # A task may still wait for the answer of this fetch. Without the fetch in `_fetching`, `_take` drops the answer.
        fetching, self._fetching = self._fetching, None
        return in_background(_abort_started(self._started, self._abort, fetching), self._what)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the program the background thread may have ended
            self._begin_abort()


async def _fetch_more(
    started: Call[int], fetch: Callable[[int], Coroutine[object, None, list[tuple[int, T]]]]
) -> list[tuple[int, T]]:
    return await fetch(await started)


async def _abort_started(
    started: Call[int],
    abort: Callable[[int], Coroutine[object, None, None]],
    fetching: Call[list[tuple[int, T]]] | None,
) -> None:
    """Wait until a generation has started, then abort it. The abort makes a waiting fetch fail. The error of this fetch is expected, and dropped."""
    with contextlib.suppress(Exception):
        await abort(await started)
    if fetching is not None:
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await fetching
