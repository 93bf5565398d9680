"""Runs long computations beside the event loop, so that a large request delays no other request."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

SMALL_BYTES = 1 << 16
"""Below this, a computation takes less time than the way to another thread."""

T = TypeVar("T")
# one thread: two large requests at once would take twice the memory and are no faster under the GIL
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large requests")


async def beside(num_bytes: int, function: Callable[..., T], *args: Any) -> T:
    """function(*args), whose time depends on `num_bytes`."""
    if num_bytes < SMALL_BYTES:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_thread, function, *args)
