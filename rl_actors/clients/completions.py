"""`GenerateCall`, the ledger of a generate call, and `FinishedGroups`, the iterator over its results."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from rl_actors.clients.call import Call, in_background
from rl_actors.texts import TextCodec
from rl_actors.types import Completion, SamplingParams

Group = tuple[int, list[Completion]]  # the index of a finished prompt in its call, and its completions


def with_texts(completions: list[Completion], codec: TextCodec | None) -> list[Completion]:
    """The completions with their texts, if the prompts were texts."""
    if codec is None:
        return completions
    return [replace(completion, text=codec.decode(completion.tokens)) for completion in completions]


@dataclass(eq=False)
class GenerateCall:
    """Which prompts of a call are open, and which finished ones wait to be taken."""

    prompts: list[list[int]]
    params: SamplingParams
    seed_indices: list[int]  # for each prompt, p of SamplingParams.seed
    adapter: str | None
    on_end: Callable[[], None]  # called once, when all is taken or aborted

    def __post_init__(self) -> None:
        self.open = set(range(len(self.prompts)))  # indices of the unfinished prompts
        self.parts: set[asyncio.Task[None]] = set()  # one task for each generator with open prompts
        self.is_over = False
        self._finished: list[Group] = []
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    @property
    def num_left(self) -> int:
        """Number of prompts that were not taken."""
        return len(self.open) + len(self._finished)

    def deliver(self, groups: list[Group]) -> None:
        self.open.difference_update(index for index, _ in groups)
        self._finished += groups
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.set()

    async def take(self, at_least: int) -> list[Group]:
        """Coroutine: the finished prompts, at_least or all that are left. Aborts if the wait fails."""
        await self._wait(at_least)
        taken = self._finished
        self._finished = []
        self._end_if_empty()
        return taken

    async def next(self) -> Group | None:
        """The next finished prompt, or None after the last."""
        await self._wait(1)
        group = self._finished.pop(0) if self._finished else None
        self._end_if_empty()
        return group

    async def _wait(self, at_least: int) -> None:
        try:
            while len(self._finished) < min(at_least, self.num_left):
                if self._failure is not None:
                    raise self._failure
                self._changed.clear()
                await self._changed.wait()
        except BaseException:
            await self.abort()
            raise

    async def abort(self) -> None:
        """Coroutine: end the open prompts, and fail whoever waits for them."""
        if self.is_over:
            return
        self._end()
        for part in self.parts:
            part.cancel()
        await asyncio.gather(*self.parts, return_exceptions=True)
        self.fail(RuntimeError("the generate call was aborted"))

    def _end_if_empty(self) -> None:
        if not self.num_left and not self.is_over:
            self._end()

    def _end(self) -> None:
        self.is_over = True
        self.on_end()


class FinishedGroups:
    """Iterator of (index of a prompt, its completions), for `async for` and for `for`.

    Closing or dropping it aborts the open prompts: CPython drops the iterator of a loop that is
    left, unless something else refers to it.
    """

    def __init__(self, started: Call[GenerateCall], what: str, codec: TextCodec | None = None) -> None:
        """what: name of the call in error texts. codec: of prompts that are texts."""
        self._started = started
        self._what = what
        self._codec = codec
        self._fetching: Call[Group | None] | None = None
        self._is_over = False

    def __aiter__(self) -> "FinishedGroups":
        return self

    async def __anext__(self) -> Group:
        while not self._is_over:
            # if the caller's task is cancelled, the fetch goes on, and the next __anext__ waits for it
            fetching = self._fetch()
            if (group := self._take(fetching, await fetching)) is not None:
                return group
        raise StopAsyncIteration

    def __iter__(self) -> "FinishedGroups":
        return self

    def __next__(self) -> Group:
        while not self._is_over:
            fetching = self._fetch()
            if (group := self._take(fetching, fetching.result())) is not None:
                return group
        raise StopIteration

    async def aclose(self) -> None:
        """Abort the open prompts."""
        if (aborting := self._begin_abort()) is not None:
            await aborting

    def close(self) -> None:
        """`aclose` for a caller without an event loop."""
        if (aborting := self._begin_abort()) is not None:
            aborting.result()

    def _fetch(self) -> Call[Group | None]:
        if self._fetching is None:
            # no method: a waiting coroutine would keep this object from being collected
            self._fetching = in_background(_next(self._started, self._codec), self._what)
        return self._fetching

    def _take(self, fetching: Call[Group | None], group: Group | None) -> Group | None:
        if self._fetching is not fetching:
            return None  # another task has taken this answer, or the iterator was closed
        self._fetching = None
        self._is_over = group is None
        return group

    def _begin_abort(self) -> Call[None] | None:
        has_failed = self._fetching is not None and self._fetching.failed()
        if self._is_over or has_failed:
            return None
        self._is_over = True
        fetching = self._fetching
        self._fetching = None
        return in_background(_abort(self._started, fetching), self._what)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the program the background thread may have ended
            self._begin_abort()


async def _next(started: Call[GenerateCall], codec: TextCodec | None) -> Group | None:
    group = await (await started).next()
    return None if group is None else (group[0], with_texts(group[1], codec))


async def _abort(started: Call[GenerateCall], fetching: Call[Group | None] | None) -> None:
    """Abort a call that may still be starting. The error of a waiting fetch is expected."""
    with contextlib.suppress(Exception):
        await (await started).abort()
    if fetching is not None:
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await fetching
