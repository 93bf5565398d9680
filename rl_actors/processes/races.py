"""Waits for the first of two things, and makes coroutines of awaitables such as Monarch's futures."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
End = TypeVar("End")


async def awaited(work: Awaitable[T]) -> T:
    """A coroutine of any awaitable: asyncio.wait_for and create_task take no future of Monarch."""
    return await work


async def unless(end: Awaitable[End], error: Callable[[End], Exception], work: Awaitable[T]) -> T:
    """The result of `work`; if `end` is done first, raises error(its result). Cancels the other."""
    ending = asyncio.ensure_future(awaited(end))
    working = asyncio.ensure_future(awaited(work))
    try:
        await asyncio.wait((ending, working), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise error(ending.result())
        return working.result()
    finally:
        ending.cancel()
        working.cancel()
