"""The iterator of generate_each when it is closed while a task waits for its next pair. Fake functions replace the generator."""

import asyncio

import pytest
from waiting import GUARD, wait_until

from rl_actors.clients.call import in_background
from rl_actors.clients.finished_groups import FinishedGroups


def test_an_iterator_that_is_closed_as_an_answer_comes_ends_and_fetches_nothing_more():
    fetched, aborted = [], []

    async def start() -> int:
        return 7

    async def fetch(number: int) -> list[tuple[int, str]]:
        fetched.append(number)
        return [(0, "a")]

    async def abort(number: int) -> None:
        aborted.append(number)

    async def use() -> None:
        groups = FinishedGroups(in_background(start(), "start"), 2, fetch=fetch, abort=abort, what="generate_each")
        waiting = asyncio.create_task(groups.__anext__())
        await asyncio.sleep(0)  # the task begins the fetch
        answer = groups._fetching
        wait_until(answer.done)  # blocks this loop, so that the task does not see the answer yet
        await groups.aclose()
        with pytest.raises(StopAsyncIteration):
            await waiting
        with pytest.raises(StopAsyncIteration):
            await groups.__anext__()

    asyncio.run(asyncio.wait_for(use(), GUARD))
    assert (fetched, aborted) == ([7], [7])
