"""Which replica gets which prompt, and calls that several replicas answer. The replicas here are fakes without a process."""

import asyncio
from collections.abc import Callable

import pytest

from rl_actors import Completion, GeneratorConfig, GeneratorInfo, SamplingParams
from rl_actors.clients.replicas import ReplicatedGenerator
from rl_actors.clients.routing import MAX_KNOWN, SLACK, Router


def test_prompts_go_to_the_least_loaded_replica():
    router = Router(3)
    assert [router.assign([index], 4) for index in range(6)] == [0, 1, 2, 0, 1, 2]
    router.finish(1, 8)
    assert [router.assign([10 + index], 4) for index in range(2)] == [1, 1]
    assert router.loads == [8, 8, 8]


def test_a_prompt_goes_where_it_or_an_earlier_turn_of_it_went():
    router = Router(2)
    router.assign([1, 2], 1)
    assert router.assign([1, 2, 3, 4], 1) == 0  # the next turn of an episode
    assert router.assign([1, 2], 1) == 0
    assert router.assign([1, 3], 1) == 1  # a common start is not an earlier prompt
    assert router.assign([1, 2, 3, 4, 5], 1) == 0
    router.forget()
    assert router.assign([1, 2, 3, 4, 5], 1) == 1


def test_a_replica_with_much_more_work_gives_its_prompts_up():
    router = Router(2)
    replicas = [router.assign([7], 2) for _ in range(SLACK + 3)]
    assert replicas == [0] * (SLACK + 1) + [1] * 2
    assert router.loads == [2 * (SLACK + 1), 4]


def test_the_router_remembers_a_limited_number_of_prompts():
    router = Router(2)
    for index in range(MAX_KNOWN + 10):
        router.finish(router.assign([index], 1), 1)
    assert len(router._known) == MAX_KNOWN


class FakeReplica:
    """A generator whose completions have the seed's index as their only token. `groups` says when which of its prompts finish."""

    def __init__(
        self, name: str, bundles: Callable[[int], list[list[int]]], pull_error: Exception | None = None
    ) -> None:
        self.name, self.bundles, self.pull_error = name, bundles, pull_error
        self.calls: list[list[int]] = []  # indices of the prompts, by call
        self.aborted: list[int] = []
        self._version: int | None = None
        self.last_pull = None  # no weights travel

    async def ready(self) -> None: ...

    async def close(self) -> None: ...

    async def info(self) -> GeneratorInfo:
        return GeneratorInfo(policy_version=self._version or -1, max_model_len=8, vocab_size=9, logs=self.name)

    async def start_generate(self, prompts, params, indices) -> int:
        self.calls.append(indices)
        self.left = self.bundles(len(prompts))
        return len(self.calls) - 1

    async def finished_groups(self, call: int, at_least: int):
        await asyncio.sleep(0)
        finished: list[int] = []
        while len(finished) < at_least:
            finished += self.left.pop(0)
        completion = Completion(tokens=[0], logprobs=[0.0], policy_versions=[0], finish_reason=self.name)
        return [(index, [completion]) for index in finished]

    async def abort_generate(self, call: int) -> None:
        self.aborted.append(call)

    async def compute_logprobs(self, sequences):
        return [f"{self.name} {sequence}" for sequence in sequences]

    async def pull_model_state_dict(self, version: int, timeout: float, *, in_flight: bool) -> int:
        if self.pull_error is not None:
            raise self.pull_error
        self._version = version
        return version


def one_by_one(count: int) -> list[list[int]]:
    return [[index] for index in reversed(range(count))]


@pytest.fixture
def generator_of(monkeypatch):
    """generator_of(replica, ...) -> a ReplicatedGenerator of these replicas."""

    def make(*replicas: FakeReplica) -> ReplicatedGenerator:
        monkeypatch.setattr(ReplicatedGenerator, "_spawn_replicas", lambda client: list(replicas))
        client = ReplicatedGenerator(None, config=GeneratorConfig(replicas=len(replicas)))
        client.ready().result()
        made.append(client)
        return client

    made: list[ReplicatedGenerator] = []
    yield make
    for client in made:
        client.close().result()


def test_a_call_is_divided_among_the_replicas_and_comes_back_in_order(generator_of):
    left, right = FakeReplica("left", one_by_one), FakeReplica("right", one_by_one)
    generator = generator_of(left, right)
    groups = generator.generate([[1], [2], [3], [4], [5]], SamplingParams(n=1)).result()
    assert [completion.finish_reason for [completion] in groups] == ["left", "right", "left", "right", "left"]
    assert (left.calls, right.calls) == ([[0, 2, 4]], [[1, 3]])
    assert generator._router.loads == [0, 0]


def test_generate_each_gives_what_any_replica_has_finished(generator_of):
    left, right = FakeReplica("left", one_by_one), FakeReplica("right", lambda count: [list(range(count))])
    generator = generator_of(left, right)
    groups = list(generator.generate_each([[1], [2], [3], [4]], SamplingParams(n=1)))
    assert sorted(index for index, _ in groups) == [0, 1, 2, 3]
    assert [index for index, [one] in groups if one.finish_reason == "left"] == [2, 0]
    assert generator._router.loads == [0, 0] and generator._routed == {}


def test_the_indices_of_the_seeds_go_with_their_prompts(generator_of):
    left, right = FakeReplica("left", one_by_one), FakeReplica("right", one_by_one)
    groups = list(generator_of(left, right).generate_each([[1], [2], [3]], SamplingParams(n=1), [70, 80, 90]))
    assert (left.calls, right.calls) == ([[70, 90]], [[80]])
    assert sorted(index for index, _ in groups) == [0, 1, 2]


def test_leaving_a_loop_ends_the_call_in_all_replicas(generator_of):
    left, right = FakeReplica("left", one_by_one), FakeReplica("right", one_by_one)
    generator = generator_of(left, right)
    groups = generator.generate_each([[index] for index in range(20)], SamplingParams(n=3))
    next(groups)
    groups.close()
    assert (left.aborted, right.aborted) == ([0], [0])
    assert generator._router.loads == [0, 0] and generator._routed == {}


def fails_to_start(count: int) -> list[list[int]]:
    raise RuntimeError("left is dead")


class FailingBundles(list):
    def pop(self, _: int) -> list[int]:
        raise RuntimeError("left is dead")


@pytest.mark.parametrize("bundles", [fails_to_start, lambda count: FailingBundles()])
def test_an_error_of_one_replica_ends_the_call_in_the_others(generator_of, bundles):
    left, right = FakeReplica("left", bundles), FakeReplica("right", one_by_one)
    generator = generator_of(left, right)
    with pytest.raises(RuntimeError, match="left is dead"):
        generator.generate([[1], [2]], SamplingParams(n=1)).result()
    assert right.aborted == [0]
    assert generator._router.loads == [0, 0] and generator._routed == {}


def test_logprobs_come_back_in_order(generator_of):
    generator = generator_of(FakeReplica("left", one_by_one), FakeReplica("right", one_by_one))
    assert generator.compute_logprobs([[1], [2], [3]]).result() == ["left [1]", "right [2]", "left [3]"]


@pytest.mark.parametrize("error", [TimeoutError("version 4 was not published"), ValueError("version 4 does not fit")])
def test_a_pull_that_fails_in_a_replica_says_where_the_version_is(generator_of, error):
    left, right = FakeReplica("left", one_by_one), FakeReplica("right", one_by_one)
    generator = generator_of(left, right)
    assert generator.pull_model_state_dict(3).result() == 3
    assert "policy_version 3" in repr(generator)
    left.pull_error = error
    with pytest.raises(type(error), match="version 4 ") as raised:
        generator.pull_model_state_dict(4).result()
    texts = [str(raised.value), *getattr(raised.value, "__notes__", [])]
    assert any("version 4 is not in left; it is in right" in text for text in texts)
    assert "policy_version" not in repr(generator)
    info = generator.info().result()
    assert (info.policy_version, info.logs) == (3, "left")
    assert [one.policy_version for one in info.replicas] == [3, 4]
