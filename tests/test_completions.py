"""The ledger of a generate call, and its iterator when it is closed while a task waits for its next
pair. No generator is used.
"""

import asyncio

import pytest
from waiting import GUARD, wait_until

from rl_actors import SamplingParams
from rl_actors.clients.call import in_background
from rl_actors.clients.completions import FinishedGroups, GenerateCall


def make(ended: list, num_prompts: int = 2) -> GenerateCall:
    prompts = [[5]] * num_prompts
    return GenerateCall(prompts, SamplingParams(), list(range(num_prompts)), None, lambda: ended.append("end"))


def start(call: GenerateCall) -> FinishedGroups:
    async def started() -> GenerateCall:
        return call

    return FinishedGroups(in_background(started(), "start"), "generate_each")


def test_an_iterator_that_is_closed_as_an_answer_comes_ends_and_fetches_nothing_more():
    ended: list[str] = []

    async def use() -> None:
        call = make(ended)
        call.deliver([(0, [])])
        groups = start(call)
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
    assert ended == ["end"]


def test_closing_an_iterator_ends_a_wait_for_a_prompt_that_is_still_open():
    ended: list[str] = []

    async def use() -> None:
        groups = start(make(ended))
        waiting = asyncio.create_task(groups.__anext__())
        await asyncio.sleep(0)
        await groups.aclose()
        with pytest.raises((StopAsyncIteration, RuntimeError)):
            await waiting

    asyncio.run(asyncio.wait_for(use(), GUARD))
    assert ended == ["end"]


def test_a_call_ends_once_when_its_last_prompt_is_taken():
    ended: list[str] = []

    async def use() -> None:
        call = make(ended)
        call.deliver([(1, [])])
        assert await call.next() == (1, []) and (call.num_left, call.open, ended) == (1, {0}, [])
        call.deliver([(0, [])])
        assert await call.take(1) == [(0, [])]
        assert await call.next() is None
        await call.abort()

    asyncio.run(asyncio.wait_for(use(), GUARD))
    assert ended == ["end"]


def test_an_iterator_without_prompts_ends_at_once():
    ended: list[str] = []
    assert list(start(make(ended, 0))) == []
    assert ended == ["end"]
