"""Tests of generate_each, which gives the completions of each prompt as soon as they have finished.

In some tests the caller leaves the loop early, or the generator fails during the loop.
"""

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest
import support
from support import MAX_MODEL_LEN
from waiting import GUARD

from rl_actors import SamplingParams

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11]]
SAMPLED = SamplingParams(max_tokens=24, n=4, seed=7)
# Each completion ends when the context is full: after 509 tokens for the first prompt, 4 for the second and 511 for the
# third.
LONG_AND_SHORT = [[5, 6, 7], [3] * (MAX_MODEL_LEN - 4), [11]]
LONG = SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_stop=True, seed=3)


async def collect(groups) -> list:
    return [pair async for pair in groups]


def num_running(generator_mesh) -> int:
    return len(generator_mesh.num_tokens_under_way.call_one().get(timeout=GUARD))


def test_generate_each_gives_every_prompt_once_with_the_completions_of_generate(generator, synced):
    expected = generator.generate(PROMPTS, SAMPLED).result()
    pairs = asyncio.run(collect(generator.generate_each(PROMPTS, SAMPLED)))
    assert sorted(index for index, _ in pairs) == [0, 1, 2]
    assert [dict(pairs)[index] for index in range(3)] == expected


def test_completions_depend_on_the_indices_of_their_prompts_and_not_on_the_call(generator, synced):
    def tokens(completions: list) -> list[list[int]]:
        return [completion.tokens for completion in completions]

    expected = [tokens(completions) for completions in generator.generate(PROMPTS, SAMPLED).result()]
    last_first = dict(generator.generate_each(PROMPTS[::-1], SAMPLED, [2, 1, 0]))
    assert [tokens(last_first[index]) for index in (2, 1, 0)] == expected
    alone = dict(generator.generate_each([PROMPTS[1]], SAMPLED, [1]))
    assert tokens(alone[0]) == expected[1]
    with pytest.raises(ValueError, match="generate_each got 3 prompts and 2 indices"):
        generator.generate_each(PROMPTS, SAMPLED, [0, 1])


def test_a_completion_comes_as_soon_as_it_has_finished(generator, generator_mesh, synced):
    async def first_and_rest() -> tuple:
        groups = generator.generate_each(LONG_AND_SHORT, LONG)
        first = await anext(groups)
        running = await generator_mesh.num_tokens_under_way.call_one()
        return first, running, await collect(groups)

    (index, [completion]), running, rest = asyncio.run(first_and_rest())
    assert (index, len(completion.tokens)) == (1, 4)
    assert len(running) == 2
    # Prompt 0 is longer than prompt 2, so the completion of prompt 0 is shorter and ends first.
    assert [(index, len(completions[0].tokens)) for index, completions in rest] == [(0, 509), (2, 511)]


def test_plain_for_loops_in_threads_get_their_own_completions(generator, synced):
    """A plain `for` works without an event loop, as in a REPL. Four calls run at the same time."""
    params = [SamplingParams(max_tokens=12, n=2, seed=100 * index) for index in range(4)]
    expected = [generator.generate(PROMPTS, one).result() for one in params]
    answers: dict[int, dict] = {}

    def loop(index: int) -> None:
        answers[index] = dict(iter(generator.generate_each(PROMPTS, params[index])))

    threads = [threading.Thread(target=loop, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD)
    assert [[answers[index][prompt] for prompt in range(3)] for index in range(4)] == expected


async def break_out(generator) -> None:
    async for _ in generator.generate_each(LONG_AND_SHORT, LONG):
        break


async def raise_out(generator) -> None:
    with pytest.raises(KeyError):
        async for _ in generator.generate_each(LONG_AND_SHORT, LONG):
            raise KeyError("the reward is broken")


async def cancel(generator) -> None:
    seen = asyncio.Event()

    async def consume() -> None:
        async for _ in generator.generate_each(LONG_AND_SHORT, LONG):
            seen.set()

    task = asyncio.ensure_future(consume())
    await asyncio.wait((task, asyncio.ensure_future(seen.wait())), return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def close(generator) -> None:
    groups = generator.generate_each(LONG_AND_SHORT, LONG)
    await anext(groups)
    await groups.aclose()
    assert await collect(groups) == []


@pytest.mark.parametrize("leave", [break_out, raise_out, cancel, close])
def test_leaving_the_loop_aborts_the_remaining_requests_in_the_engine(generator, generator_mesh, synced, leave):
    before = generator_mesh.num_aborted.call_one().get(timeout=GUARD)
    asyncio.run(leave(generator))
    support.wait_until(lambda: num_running(generator_mesh) == 0)
    assert generator_mesh.num_aborted.call_one().get(timeout=GUARD) == before + 2
    assert generator.generate(PROMPTS, SAMPLED).result()


def test_a_cancelled_generate_aborts_its_requests_in_the_engine(generator, generator_mesh, synced):
    before = generator_mesh.num_aborted.call_one().get(timeout=GUARD)
    call = generator.generate([[5, 6, 7], [11]], LONG)
    support.wait_until(lambda: num_running(generator_mesh) == 2)
    assert call.cancel()
    support.wait_until(lambda: num_running(generator_mesh) == 0)
    assert generator_mesh.num_aborted.call_one().get(timeout=GUARD) == before + 2
    with pytest.raises(CancelledError):
        call.result()
    assert len(generator.generate(PROMPTS, SAMPLED).result()) == 3
    assert not generator.compute_logprobs(PROMPTS).cancel()


def test_a_cancelled_anext_loses_no_prompt(generator, synced):
    async def impatient() -> list:
        groups = generator.generate_each(LONG_AND_SHORT, LONG)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(groups), 1e-4)
        return await collect(groups)

    assert [index for index, _ in asyncio.run(impatient())] == [1, 0, 2]


def test_tokens_that_are_sampled_after_a_pull_have_the_new_version(generator, trainer, synced):
    new = support.step(trainer, seed=1)
    trainer.push_model_state_dict().result()
    groups = generator.generate_each(LONG_AND_SHORT, LONG)
    assert next(groups)[0] == 1
    generator.pull_model_state_dict(new).result()
    for _, [completion] in groups:
        versions = completion.policy_versions
        num_old = versions.count(synced)
        assert num_old >= 4 and versions == [synced] * num_old + [new] * (len(completion.tokens) - num_old)
        assert new in versions


def test_a_failed_forward_pass_raises_in_the_loop_and_names_the_generator(generator, generator_mesh, synced):
    groups = generator.generate_each(LONG_AND_SHORT, LONG)
    next(groups)
    generator_mesh.fail_next_forward.call_one("the kernel is broken").get(timeout=GUARD)
    for _ in range(2):  # the second next() raises the error again
        with pytest.raises(RuntimeError, match="the kernel is broken") as raised:
            next(groups)
        assert any("raised in generator" in note and "generate" in note for note in raised.value.__notes__)
    assert generator.generate(PROMPTS, SAMPLED).result()


def test_the_actor_does_not_know_a_generate_call_that_has_ended(generator_mesh, synced):
    call = generator_mesh.start_generate.call_one([[5]], SamplingParams(max_tokens=2)).get(timeout=GUARD)
    [(index, [completion])] = generator_mesh.finished_groups.call_one(call).get(timeout=GUARD)
    assert (index, len(completion.tokens)) == (0, 2)
    with pytest.raises(Exception, match=f"no generate call {call} is running"):
        generator_mesh.finished_groups.call_one(call).get(timeout=GUARD)


def test_a_bad_request_is_refused_in_the_callers_thread(generator):
    generator.ready().result()
    with pytest.raises(ValueError, match="prompt 1 has 0 tokens"):
        generator.generate_each([[5], []])
    with pytest.raises(ValueError, match="temperature=-1"):
        generator.generate_each([[5]], SamplingParams(temperature=-1))
