"""Rollouts that run ahead of the trainer.

A group is the completions of one problem. The tests check which groups a step trains on, how old these groups may be, and that no group is
lost, repeated or awaited for ever.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from controllers.rollouts.episodes import EpisodeLimits
from controllers.rollouts.groups import Group, RolloutBatch, RolloutConfig, Rollouts
from controllers.rollouts.queue import Place, RolloutQueue, choose
from controllers.run.survival import ReplayedStep
from rl_actors import Completion, SamplingParams
from tests.fakes import ParityReward

SIZE = 3
LIMITS = EpisodeLimits(max_turns=1, max_tokens=4, max_tokens_per_turn=4)


def group(index: int, version: int = 0, *, is_trainable: bool = True) -> Group:
    completion = Completion(tokens=[5], logprobs=[-1.0], policy_versions=[version], finish_reason="stop")
    rewards = [0.0, 1.0] if is_trainable else [1.0, 1.0]
    return Group(
        problem=ParityReward(0.0, 1).problem(index),
        prompt=[4],
        completions=[completion, completion],
        texts=["a", "b"],
        task_rewards=rewards,
        rewards=rewards,
    )


def places(*described: tuple[int, bool]) -> list[Place]:
    """One Place of the queue for each pair (step at which its problem was drawn, True if its group has finished)."""
    made = []
    for index, (step, is_finished) in enumerate(described):
        made.append(Place(index=index, step=step, group=group(index) if is_finished else None))
    return made


def chosen_indices(described: list[tuple[int, bool]], **arguments: int) -> list[int] | None:
    chosen = choose(places(*described), **arguments)
    return None if chosen is None else [place.index for place in chosen]


def test_without_staleness_a_step_waits_for_all_groups():
    assert chosen_indices([(1, True), (1, False), (1, True)], size=2, step=1, ahead=0) is None
    assert chosen_indices([(1, True), (1, True)], size=2, step=1, ahead=0) == [0, 1]


def test_a_step_takes_younger_groups_while_an_older_group_is_unfinished_and_not_yet_due():
    described = [(1, False), (1, True), (1, True), (1, True)]
    assert chosen_indices(described, size=2, step=1, ahead=1) == [1, 2]
    # The two groups that are left from step 1 are due at step 2, but one of them has not finished. So step 2 waits, although two groups that
    # were drawn at step 2 have finished.
    later = [(1, False), (1, True), (2, True), (2, True)]
    assert chosen_indices(later, size=2, step=2, ahead=1) is None
    later[0] = (1, True)
    assert chosen_indices(later, size=2, step=2, ahead=1) == [0, 1]


def test_a_step_waits_if_training_on_young_groups_would_make_old_groups_overdue():
    # The four groups drawn at step 1 are due at step 3. If step 2 trained on the two groups drawn at step 2, step 3 would have to train on
    # all four, but a step trains on two.
    described = [(1, False), (1, False), (1, False), (1, False), (2, True), (2, True)]
    assert chosen_indices(described, size=2, step=2, ahead=2) is None


class Simulated:
    """A simulated trainer and a simulated generator. Their unit of time is one pass of the event loop.

    Groups take random times. In some groups all rewards are equal. A step without samples does not train. A step that trains raises the version
    by a random number, which may be 0.
    """

    def __init__(self, seed: int, *, max_staleness: int, versions_per_step: int, in_flight_updates: bool) -> None:
        self.draw = random.Random(seed)
        config = RolloutConfig(
            groups_per_step=SIZE,
            group_size=2,
            max_staleness=max_staleness,
            dynamic_sampling_rounds=self.draw.randrange(3),
            in_flight_updates=in_flight_updates,
        )
        self.versions_per_step = versions_per_step
        self.version = self.draw.randrange(5)
        self.drop_rate = self.draw.choice([0.0, 0.3, 0.9])
        self.num_running = 0
        tokenizer = SimpleNamespace(
            encode_prompt=lambda problem: [problem.index], decode=str, decode_prompt=str, stop_token_ids=()
        )
        environment = SimpleNamespace(problem=problem_of)
        rollouts = Rollouts(config, environment, tokenizer, self, limits=LIMITS, seed=0, scorer=self)
        self.queue = RolloutQueue(rollouts, versions_per_step=versions_per_step)

    async def generate_each(
        self, prompts: list[list[int]], params: SamplingParams, indices: list[int]
    ) -> AsyncIterator[tuple[int, list[Completion]]]:
        self.num_running += 1
        began = {place: self.version for place in range(len(prompts))}
        order = sorted(began, key=lambda _: self.draw.random())
        for place in order:
            for _ in range(self.draw.choice([0, 1, 2, 30])):
                await asyncio.sleep(0)
            versions = [began[place], self.version]
            made = Completion(tokens=[5, 6], logprobs=[-1.0, -1.0], policy_versions=versions, finish_reason="stop")
            yield place, [made] * params.n
        self.num_running -= 1

    async def score(self, environment, problem, texts):
        for _ in range(self.draw.choice([0, 3])):
            await asyncio.sleep(0)
        is_trainable = random.Random(problem.index).random() >= self.drop_rate
        totals = [0.0, 1.0] if is_trainable else [1.0, 1.0]
        return SimpleNamespace(totals=totals, components={}, num_retries=0)

    async def run(self, num_steps: int) -> list[RolloutBatch]:
        batches = []
        async with self.queue as queue:
            for _ in range(num_steps):
                batches.append(await queue.next_batch(self.version))
                # The queue had at most (ahead + 1) * SIZE places. next_batch has removed the places of this batch.
                assert len(queue.places) <= queue.ahead * SIZE
                if batches[-1].samples:
                    for _ in range(self.draw.randrange(20)):
                        await asyncio.sleep(0)  # the step trains
                    async with queue.update():
                        assert queue.config.in_flight_updates or self.num_running == 0
                        await asyncio.sleep(0)
                        self.version += self.draw.randint(0, self.versions_per_step)
        return batches


@dataclass(frozen=True, kw_only=True)
class NumberedProblem:
    index: int
    prompt: str = ""
    answer: str = ""
    source: str = ""


def problem_of(index: int) -> NumberedProblem:
    return NumberedProblem(index=index)


@pytest.mark.parametrize("in_flight_updates", [True, False])
@pytest.mark.parametrize("versions_per_step", [1, 2])
@pytest.mark.parametrize("max_staleness", [0, 2, 3, 4])
def test_with_random_times_no_problem_is_lost_or_repeated_and_no_group_is_too_old(
    max_staleness, versions_per_step, in_flight_updates
):
    oldest = 0
    for seed in range(10):
        simulated = Simulated(
            seed,
            max_staleness=max_staleness,
            versions_per_step=versions_per_step,
            in_flight_updates=in_flight_updates,
        )
        batches = asyncio.run(simulated.run(12))
        used = [each.problem.index for batch in batches for each in batch.groups]
        waiting = [place.index for place in simulated.queue.places]
        filtered = [place.index for place in simulated.queue.since.filtered]
        assert sorted([*used, *waiting, *filtered]) == list(range(simulated.queue.cursor))
        for batch in batches:
            ages = batch.ages()
            assert len(ages) <= SIZE and max(ages, default=0) <= max_staleness
            oldest = max([oldest, *ages])
    if max_staleness >= versions_per_step:
        assert oldest > 0  # the rollouts do run ahead
    else:
        assert oldest == 0


@dataclass
class ScriptedGenerator:
    """A generator that finishes a prompt when the test sets the prompt's event."""

    failures: int = 0  # this many calls, the first ones, fail at their last prompt
    calls: list[list[list[int]]] = field(default_factory=list)
    finish: dict[int, asyncio.Event] = field(default_factory=dict)
    num_open: int = 0  # calls that have not ended

    def event(self, prompt: int) -> asyncio.Event:
        return self.finish.setdefault(prompt, asyncio.Event())

    async def generate_each(self, prompts, params, indices):
        assert [[index] for index in indices] == prompts
        self.calls.append(prompts)
        self.num_open += 1
        try:
            for place, prompt in enumerate(prompts):
                if self.failures and place == len(prompts) - 1:
                    self.failures -= 1
                    raise RuntimeError("the engine has died")
                await self.event(prompt[0]).wait()
                made = Completion(tokens=[5], logprobs=[-1.0], policy_versions=[0], finish_reason="stop")
                yield place, [made] * params.n
        finally:
            self.num_open -= 1


class Scores:
    async def score(self, environment, problem, texts):
        return SimpleNamespace(totals=[0.0, 1.0], components={}, num_retries=0)


def queue_of(generator: ScriptedGenerator, *, pending=(), cursor=0, scorer=None, **options) -> RolloutQueue:
    config = RolloutConfig(**{"groups_per_step": 2, "group_size": 2, **options})
    tokenizer = SimpleNamespace(
        encode_prompt=lambda problem: [problem.index], decode=str, decode_prompt=str, stop_token_ids=()
    )
    environment = SimpleNamespace(problem=problem_of)
    rollouts = Rollouts(config, environment, tokenizer, generator, limits=LIMITS, seed=0, scorer=scorer or Scores())
    return RolloutQueue(rollouts, pending=pending, cursor=cursor)


def indices(batch: RolloutBatch) -> list[int]:
    return [group.problem.index for group in batch.groups]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_the_next_groups_are_generated_while_a_step_trains():
    async def scenario() -> None:
        generator = ScriptedGenerator()
        async with queue_of(generator, max_staleness=1) as queue:
            for prompt in (0, 1):
                generator.event(prompt).set()
            first = await queue.next_batch(0)
            assert indices(first) == [0, 1] and generator.calls == [[[0], [1], [2], [3]]] and generator.num_open == 1
            assert queue.state() == {"cursor": 4, "pending": [2, 3]}
            for prompt in (2, 3):
                generator.event(prompt).set()
            second = await queue.next_batch(1)
            assert indices(second) == [2, 3] and second.ages() == [1, 1]
            assert second.metrics()["age/1"] == 2 and second.metrics()["age/max"] == 1
            assert generator.calls[1:] == [[[4], [5]]]

    asyncio.run(scenario())


def test_a_resumed_queue_first_completes_the_problems_that_were_drawn_but_not_trained_on():
    async def scenario() -> None:
        generator = ScriptedGenerator()
        for prompt in range(12):
            generator.event(prompt).set()
        async with queue_of(generator, max_staleness=1, pending=[4, 6], cursor=8) as queue:
            assert indices(await queue.next_batch(0)) == [4, 6]
            assert indices(await queue.next_batch(0)) == [8, 9]
            assert generator.calls == [[[4], [6], [8], [9]]]

    asyncio.run(scenario())


def test_a_rollout_that_fails_in_the_generator_is_retried_and_the_retry_is_counted():
    async def scenario() -> None:
        generator = ScriptedGenerator(failures=1)
        for prompt in (0, 1):
            generator.event(prompt).set()
        async with queue_of(generator) as queue:
            batch = await queue.next_batch(0)
        assert indices(batch) == [0, 1] and batch.metrics()["groups/retries"] >= 1
        assert generator.calls[0] == [[0], [1]] and generator.calls[1] in ([[1]], [[0], [1]])

    asyncio.run(scenario())


def test_a_run_ends_with_the_generators_error_after_the_last_retry():
    async def scenario() -> None:
        generator = ScriptedGenerator(failures=100)
        for prompt in range(3):
            generator.event(prompt).set()
        async with queue_of(generator, max_retries=2, groups_per_step=3) as queue:
            with pytest.raises(RuntimeError, match="the engine has died"):
                await queue.next_batch(0)
        assert len(generator.calls) == 3 and generator.num_open == 0

    asyncio.run(scenario())


def test_an_error_of_the_reward_function_ends_next_batch_at_once_and_stops_the_requests():
    class Broken(Scores):
        async def score(self, environment, problem, texts):
            raise ZeroDivisionError("a bug in the reward")

    async def scenario() -> None:
        generator = ScriptedGenerator()
        generator.event(0).set()  # the second prompt never finishes
        async with queue_of(generator, scorer=Broken()) as queue:
            with pytest.raises(ZeroDivisionError, match="a bug in the reward"):
                await queue.next_batch(0)
            await settle()
            assert generator.num_open == 0 and len(generator.calls) == 1

    asyncio.run(scenario())


def test_an_error_of_the_generator_while_a_step_trains_is_raised_by_the_next_call_of_next_batch():
    async def scenario() -> None:
        generator = ScriptedGenerator()
        for prompt in (0, 1):
            generator.event(prompt).set()
        async with queue_of(generator, max_staleness=1, max_retries=0) as queue:
            await queue.next_batch(0)
            generator.failures = 1
            generator.event(2).set()
            async with queue.update():
                pass
            with pytest.raises(RuntimeError, match="the engine has died"):
                await queue.next_batch(1)

    asyncio.run(scenario())


def test_an_update_waits_for_running_requests_only_without_in_flight_updates():
    async def scenario(in_flight_updates: bool) -> bool:
        generator = ScriptedGenerator()
        for prompt in (0, 1):
            generator.event(prompt).set()
        async with queue_of(generator, max_staleness=1, in_flight_updates=in_flight_updates) as queue:
            await queue.next_batch(0)
            entered = asyncio.Event()

            async def update() -> None:
                async with queue.update():
                    entered.set()

            task = asyncio.create_task(update())
            await settle()
            was_waiting = not entered.is_set()
            for prompt in (2, 3):
                generator.event(prompt).set()
            await task
            return was_waiting

    assert asyncio.run(scenario(in_flight_updates=False))
    assert not asyncio.run(scenario(in_flight_updates=True))


def test_leaving_the_queue_ends_all_requests():
    async def scenario() -> None:
        generator = ScriptedGenerator()
        queue = queue_of(generator, max_staleness=2)
        async with queue:
            waiting = asyncio.create_task(queue.next_batch(0))
            await settle()
            assert generator.num_open == 1
            waiting.cancel()
        await settle()
        assert generator.num_open == 0

    asyncio.run(scenario())


def test_a_batch_with_a_group_older_than_max_staleness_is_an_error():
    async def scenario() -> None:
        generator = ScriptedGenerator()
        for prompt in range(4):
            generator.event(prompt).set()
        async with queue_of(generator, max_staleness=1) as queue:
            with pytest.raises(RuntimeError, match=r"a group is 2 versions old, but rollouts.max_staleness=1"):
                await queue.next_batch(2)

    asyncio.run(scenario())


def test_groups_without_a_signal_are_replaced_at_most_max_refills_times():
    class NoSignal(Scores):
        async def score(self, environment, problem, texts):
            return SimpleNamespace(totals=[1.0, 1.0], components={}, num_retries=0)

    async def scenario() -> None:
        generator = ScriptedGenerator()
        for prompt in range(6):
            generator.event(prompt).set()
        async with queue_of(generator, dynamic_sampling_rounds=2, scorer=NoSignal()) as queue:
            batch = await queue.next_batch(0)
        assert indices(batch) == list(range(6)) and batch.samples == [] and batch.num_refills == 2
        assert replace(batch).metrics()["groups/filtered"] == 6

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("rewards", "is_trainable"),
    [([0.1 + 0.2, 0.3], False), ([1e8, 1e8 + 1], True), ([0.0, 1e-6], True), ([0.7 + 0.2 + 0.1, 1.0], False)],
)
def test_rewards_that_differ_by_rounding_are_no_signal(rewards, is_trainable):
    assert replace(group(0), rewards=rewards).is_trainable() == is_trainable


def test_a_component_is_averaged_over_the_completions_that_have_it():
    one = replace(group(0), components={"format": [0.5, None]})
    other = replace(group(1), components={"right": [1.0, 0.0]})
    batch = RolloutBatch.of([one, other], RolloutConfig(), num_refills=0, num_retries=0, version=0)
    values = batch.metrics()
    assert values["reward/component/format"] == 0.5 and values["reward/component/right"] == 0.5


def test_recorded_batches_are_counted_with_their_filtered_groups():
    sizes = {}
    for is_trainable in (True, False):
        groups = [group(index, is_trainable=is_trainable) for index in range(4)]
        batch = RolloutBatch.of(groups, RolloutConfig(), num_refills=0, num_retries=0, version=0)
        sizes[is_trainable] = ReplayedStep(batch=batch, state={}, random={}).num_bytes
    assert sizes[True] == sizes[False] > 0
