"""Deaths and restarts of a client's generators, and calls that the client divides among its generators. The generators are fakes."""

import asyncio
import functools
from collections.abc import Awaitable, Callable

import pytest
from waiting import GUARD, wait_until

from rl_actors import Completion, GeneratorClient, GeneratorConfig, GeneratorInfo, SamplingParams
from rl_actors.clients.base import ActorDiedError, ActorSilentError
from rl_actors.clients.fleet import Fleet
from rl_actors.clients.one_generator import Silence
from rl_actors.clients.replicas import FIRST_RESTARTS, HOUR, LONGEST_RESTART_PAUSE, Restarts
from rl_actors.config import RestartPolicy
from rl_actors.types import DeviceMemory, Heartbeat, Transfer

NO_PAUSE = RestartPolicy(backoff=0.0)
ONE = SamplingParams(n=1)
PROMPTS = [[1], [2], [3], [4]]


class Generators:
    """The fake generators that a test has spawned, in order, and their events, such as spawns, calls and kills, in order."""

    def __init__(self) -> None:
        self.spawned: list[FakeGenerator] = []
        self.events: list[str] = []
        # The next spawn takes the first function of this list. The function changes the generator before it starts.
        self.plans: list[Callable[[FakeGenerator], None]] = []

    def spawn(self, name: str) -> "FakeGenerator":
        made = FakeGenerator(name, self, len(self.spawned))
        if self.plans:
            self.plans.pop(0)(made)
        self.spawned.append(made)
        self.note(made, "spawn")
        return made

    def note(self, generator: "FakeGenerator", what: str) -> None:
        self.events.append(f"{generator.number}: {what}")


class FakeGenerator:
    """A fake generator. The only token of its completions is its own number. If `waits` is true, it finishes only the prompts in `released`."""

    is_owned = True

    def __init__(self, name: str, generators: Generators, number: int) -> None:
        self.name, self.generators, self.number = name, generators, number
        self.known: GeneratorInfo | None = None
        self.last_pull: Transfer | None = None
        self.version = -1
        self.signs_every = 0.0  # seconds between its signs of life
        # For each generate call: the numbers from which the seeds of the call's prompts are computed.
        self.seeds: list[list[int]] = []
        self.released: asyncio.Queue[int] = asyncio.Queue()  # indices (in the call) of prompts that may finish
        self.waits = False  # False: all prompts finish at once
        self.is_up: Callable[[], Awaitable[None]] = self.nothing
        self.on_pull: list[Callable[[], Awaitable[None]]] = []  # awaited at the start of each pull
        self.on_load: list[Callable[[], Awaitable[None]]] = []  # awaited at the start of each load of an adapter
        self.dead: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.left: list[int] = []  # indices (in the newest call) of prompts that have not finished

    async def nothing(self) -> None: ...

    def die(self, error: Exception | None = None) -> None:
        """End the process: all waiting calls fail, and `death` returns the error."""
        self.dead.set_result(error or ActorDiedError(f"{self.name} ({self.number}) was killed", self.name))

    async def die_now(self) -> None:
        self.die()
        await asyncio.sleep(0)

    async def alive(self, work: Awaitable) -> object:
        """The result of the work. If the process dies before the work ends, raises the error of the death."""
        task = asyncio.ensure_future(work)
        await asyncio.wait((task, self.dead), return_when=asyncio.FIRST_COMPLETED)
        if self.dead.done():
            task.cancel()
            raise self.dead.result()
        return task.result()

    async def ready(self) -> None:
        await self.alive(self.is_up())
        self.known = GeneratorInfo(policy_version=-1, max_model_len=8, vocab_size=9, logs=self.name)

    async def death(self, silent_after: float) -> Exception:
        if silent_after < self.signs_every:
            return ActorDiedError(f"{self.name}: no sign of life for {silent_after:g} s", self.name)
        return await asyncio.shield(self.dead)

    async def kill(self) -> None:
        self.generators.note(self, "kill")
        if not self.dead.done():
            self.die()

    async def close(self) -> None:
        self.generators.note(self, "close")

    async def info(self) -> GeneratorInfo:
        return await self.alive(self._info())

    async def _info(self) -> GeneratorInfo:
        self.known = GeneratorInfo(policy_version=self.version, max_model_len=8, vocab_size=9, logs=self.name)
        return self.known

    async def start_generate(self, prompts, params, indices, adapter=None) -> int:
        self.generators.note(self, f"generate {indices}" + (f" with {adapter}" if adapter else ""))
        if params.max_tokens == 7:
            raise ValueError("7 is refused")
        self.seeds.append(indices)
        self.left = list(range(len(prompts)))
        return await self.alive(asyncio.sleep(0, len(self.seeds) - 1))

    async def finished_groups(self, call: int, at_least: int):
        if self.waits:
            places = [await self.alive(self.released.get())]
        else:
            await self.alive(asyncio.sleep(0))
            places = list(self.left)
        self.left = [place for place in self.left if place not in places]
        completion = Completion(
            tokens=[self.number], logprobs=[0.0], policy_versions=[self.version], finish_reason="stop"
        )
        return [(place, [completion]) for place in places]

    async def abort_generate(self, call: int) -> None:
        self.generators.note(self, "abort")

    async def compute_logprobs(self, sequences, adapter=None):
        self.generators.note(self, f"logprobs {sequences}" + (f" with {adapter}" if adapter else ""))
        return await self.alive(asyncio.sleep(0, [f"{self.number} {sequence}" for sequence in sequences]))

    async def pull(self, version: int, timeout: float, in_flight: bool = True) -> Transfer:
        self.generators.note(self, f"pull {version}")
        await self.alive(self.on_pull.pop(0)() if self.on_pull else self.nothing())
        self.version = version
        self.last_pull = Transfer(policy_version=version, path="memory", num_bytes=1, seconds=self.number)
        return self.last_pull

    async def load_adapter(self, name: str, directory: str) -> None:
        self.generators.note(self, f"load {name}")
        await self.alive(self.on_load.pop(0)() if self.on_load else self.nothing())

    async def unload_adapter(self, name: str) -> None:
        self.generators.note(self, f"unload {name}")
        await self.alive(self.nothing())

    async def sleep(self, level: int) -> DeviceMemory:
        self.generators.note(self, "sleep")
        return await self.alive(asyncio.sleep(0, DeviceMemory(num_bytes=1)))

    async def wake(self) -> DeviceMemory:
        self.generators.note(self, "wake")
        return await self.alive(asyncio.sleep(0, DeviceMemory(num_bytes=1)))


class Started:
    """Starts a fleet of `count` fake generators for an `async with` block, and closes it at the end.

    `lines` has the texts that the fleet gives to `on_event`.
    """

    def __init__(self, count: int = 1, policy: RestartPolicy = NO_PAUSE, **options) -> None:
        self.count, self.policy, self.options = count, policy, options
        self.generators, self.lines = Generators(), []

    def make(self) -> Fleet:
        names = [f"g{index}" for index in range(self.count)]
        spawns = {name: functools.partial(self.generators.spawn, name) for name in names}
        return Fleet(spawns, self.policy, setup_timeout=GUARD, on_event=self.lines.append, **self.options)

    async def __aenter__(self) -> "tuple[Fleet, Generators]":
        self.fleet = self.make()
        await self.fleet.start()
        return self.fleet, self.generators

    async def __aexit__(self, *_) -> None:
        await self.fleet.close()


def in_loop(test):
    """The test as a plain function, which runs the coroutine in an event loop."""

    @functools.wraps(test)
    def run(*args, **kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), GUARD))

    return run


def states(fleet: Fleet) -> list[str]:
    return [replica.state for replica in fleet.replicas]


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0)


async def generate(fleet: Fleet, prompts=PROMPTS, params=ONE) -> dict[int, list[Completion]]:
    call = await fleet.generate(prompts, params, None)
    return dict(await call.take(len(prompts)))


def makers(groups: dict[int, list[Completion]]) -> list[int]:
    """For each prompt: the number of the generator that completed the prompt."""
    return [groups[index][0].tokens[0] for index in range(len(groups))]


# --- calls ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_call_is_divided_among_the_generators_and_every_prompt_gets_its_own_results():
    async with Started(2) as (fleet, generators):
        assert makers(await generate(fleet, [[1], [2], [3], [4], [5]])) == [0, 1, 0, 1, 0]
        left, right = generators.spawned
        assert (left.seeds, right.seeds) == ([[0, 2, 4]], [[1, 3]])
        assert fleet._router.loads == [0, 0]
        assert await fleet.compute_logprobs([[1], [2], [3]]) == ["0 [1]", "1 [2]", "0 [3]"]
        assert fleet._router.loads == [0, 0]


@in_loop
async def test_no_generator_has_a_load_after_a_call_is_aborted():
    async with Started(2) as (fleet, generators):
        for generator in generators.spawned:
            generator.waits = True
        call = await fleet.generate(PROMPTS, ONE, None)
        generators.spawned[0].released.put_nowait(1)
        assert [index for index, _ in await call.take(1)] == [2]
        await call.abort()
        assert fleet._router.loads == [0, 0] and call.is_over and not call.parts


@in_loop
async def test_an_error_that_is_no_death_is_raised_at_once_and_restarts_nothing():
    async with Started(2) as (fleet, _):
        with pytest.raises(ValueError, match="7 is refused"):
            await generate(fleet, params=SamplingParams(n=1, max_tokens=7))
        assert states(fleet) == ["healthy", "healthy"] and fleet.num_restarts == 0
        assert fleet._router.loads == [0, 0]


@in_loop
async def test_calls_reach_a_generator_in_the_order_in_which_they_were_made():
    async with Started(1) as (fleet, generators):
        calls = [
            fleet.compute_logprobs([[1]]),
            fleet.sleep(1),
            generate(fleet, [[2]]),
            fleet.pull(1, 1.0, True),
            fleet.compute_logprobs([[3]]),
            fleet.wake(),
        ]
        generators.events.clear()
        await asyncio.gather(*calls)
        words = ["logprobs [[1]]", "sleep", "generate [0]", "pull 1", "logprobs [[3]]", "wake"]
        assert generators.events == [f"0: {word}" for word in words]


# --- adapters ------------------------------------------------------------------------------------------------------


async def refuse() -> None:
    raise ValueError("does not fit")


@in_loop
async def test_all_generators_load_an_adapter_before_calls_use_it():
    async with Started(2) as (fleet, generators):
        generators.events.clear()
        await fleet.load_adapter("a", "/a")
        call = await fleet.generate(PROMPTS[:2], ONE, None, "a")
        await call.take(2)
        await fleet.compute_logprobs([[1]], "a")
        assert generators.events[:2] == ["0: load a", "1: load a"]
        assert sorted(generators.events[2:4]) == ["0: generate [0] with a", "1: generate [1] with a"]
        assert generators.events[4].endswith("logprobs [[1]] with a")
        with pytest.raises(ValueError, match="the name 'a' is loaded already, from /a"):
            await fleet.load_adapter("a", "/b")


@in_loop
async def test_an_adapter_that_one_generator_refuses_is_loaded_in_none():
    async with Started(2) as (fleet, generators):
        generators.spawned[1].on_load = [refuse]
        with pytest.raises(ValueError, match="does not fit"):
            await fleet.load_adapter("a", "/a")
        assert generators.events[-2:] == ["0: unload a", "1: unload a"]
        await fleet.load_adapter("a", "/b")
        assert states(fleet) == ["healthy", "healthy"] and fleet.num_restarts == 0


@in_loop
async def test_an_adapter_is_unloaded_when_the_calls_that_use_it_have_ended():
    async with Started(1) as (fleet, generators):
        generators.spawned[0].waits = True
        await fleet.load_adapter("a", "/a")
        ending, aborted = [await fleet.generate([[1]], ONE, None, "a") for _ in range(2)]
        unloading = asyncio.ensure_future(fleet.unload_adapter("a"))
        generators.spawned[0].released.put_nowait(0)
        await ending.take(1)
        await fleet.compute_logprobs([[1]])
        assert not unloading.done() and "0: unload a" not in generators.events
        await aborted.abort()
        await unloading
        assert generators.events[-1] == "0: unload a"


@in_loop
async def test_a_generator_that_is_started_again_loads_the_adapters_before_it_gets_prompts():
    async with Started(1) as (fleet, generators):
        await fleet.pull(3, 1.0, True)
        for name in "abc":
            await fleet.load_adapter(name, f"/{name}")
        await fleet.unload_adapter("b")
        first = generators.spawned[0]
        first.waits = True
        call = await fleet.generate([[1]], ONE, None, "c")
        generators.plans.append(lambda made: made.on_load.append(refuse))
        generators.events.clear()
        first.die()
        assert makers(dict(await call.take(1))) == [1]
        again = [event for event in generators.events if event.startswith("1: ")]
        assert again == ["1: spawn", "1: pull 3", "1: load a", "1: load c", "1: generate [0] with c"]


@in_loop
async def test_a_restarting_generator_also_loads_an_adapter_that_the_fleet_loads_meanwhile():
    async with Started(2) as (fleet, generators):
        await fleet.load_adapter("a", "/a")
        allowed = asyncio.Event()
        generators.plans.append(lambda made: made.on_load.append(allowed.wait))
        generators.spawned[0].die()
        await until(lambda: "2: load a" in generators.events)
        await fleet.load_adapter("b", "/b")
        allowed.set()
        await until(lambda: states(fleet) == ["healthy", "healthy"])
        assert [event for event in generators.events if event.startswith("2: load")] == [
            "2: load a",
            "2: load a",
            "2: load b",
        ]


# --- deaths ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_only_the_unfinished_prompts_of_a_dead_generator_go_to_another_and_they_keep_their_seeds():
    async with Started(2) as (fleet, generators):
        dying, other = generators.spawned
        dying.waits = True
        call = await fleet.generate([[index] for index in range(6)], ONE, [60, 61, 62, 63, 64, 65])
        dying.released.put_nowait(1)  # position 1 of its call is prompt 2
        await until(lambda: any(index == 2 for index, _ in call._finished))
        dying.die()
        groups = dict(await call.take(6))
        assert makers(groups) == [1, 1, 0, 1, 1, 1]
        assert (dying.seeds, other.seeds) == ([[60, 62, 64]], [[61, 63, 65], [60, 64]])
        await until(lambda: states(fleet) == ["healthy", "healthy"])
        assert fleet.num_restarts == 1 and fleet._router.loads == [0, 0]


@in_loop
async def test_prompts_of_the_only_generator_wait_until_its_successor_has_pulled_the_newest_version():
    started = Started(1)
    async with started as (fleet, generators):
        await fleet.pull(3, 1.0, True)
        generators.spawned[0].waits = True
        call = asyncio.ensure_future(generate(fleet))
        await until(lambda: generators.spawned[0].seeds)
        generators.spawned[0].die()
        assert makers(await call) == [1, 1, 1, 1]
        assert generators.events == [
            *("0: spawn", "0: pull 3", "0: generate [0, 1, 2, 3]"),
            *("0: kill", "1: spawn", "1: pull 3", "1: generate [0, 1, 2, 3]"),
        ]
        info = await fleet.info()
        assert (info.restarts, info.state, info.policy_version, info.replicas) == (1, "healthy", 3, ())
        assert started.lines[0].startswith("g0 has died: g0 (0) was killed; restart 1 (at most 10 an hour)")
        assert started.lines[1].startswith("g0 is back after ")


@in_loop
async def test_logprobs_of_a_dead_generator_come_from_another():
    async with Started(2) as (fleet, generators):
        asked = asyncio.ensure_future(fleet.compute_logprobs([[1], [2], [3]]))
        await until(lambda: "0: logprobs [[1], [3]]" in generators.events)
        generators.spawned[0].die()
        assert await asked == ["1 [1]", "1 [2]", "1 [3]"]
        assert fleet._router.loads == [0, 0]


@in_loop
async def test_a_generator_that_dies_twice_is_dead_then_restarting_then_stale_then_healthy():
    gate, seen = asyncio.Event(), []
    started = Started(1)
    started.generators.plans = [
        lambda first: None,
        lambda second: setattr(second, "is_up", second.die_now),
        lambda third: (setattr(third, "is_up", gate.wait), third.on_pull.append(functools.partial(record, third))),
    ]

    async def record(third) -> None:
        seen.extend(states(fleet))

    async with started as (fleet, generators):
        await fleet.pull(1, 1.0, True)
        assert states(fleet) == ["healthy"]
        generators.spawned[0].die()
        await until(lambda: states(fleet) == ["dead"])
        await until(lambda: len(generators.spawned) == 3)
        assert states(fleet) == ["restarting"] and fleet.num_restarts == 2
        assert await fleet.is_alive(GUARD) is False
        gate.set()
        await until(lambda: states(fleet) == ["healthy"])
        assert seen == ["stale"] and generators.spawned[2].version == 1
        [returned] = fleet.returns
        assert (returned.name, returned.cause) == ("g0", "g0 (0) was killed") and returned.seconds >= 0


@in_loop
async def test_a_restarted_generator_that_dies_in_its_pull_is_restarted_again_and_gets_no_prompts():
    started = Started(1)
    started.generators.plans = [lambda first: None, lambda second: second.on_pull.append(second.die_now)]
    async with started as (fleet, generators):
        await fleet.pull(5, 1.0, True)
        generators.spawned[0].die()
        assert makers(await generate(fleet)) == [2, 2, 2, 2]
        assert "1: generate [0, 1, 2, 3]" not in generators.events
        assert generators.spawned[2].version == 5 and fleet.num_restarts == 2


@in_loop
async def test_beyond_the_limit_of_restarts_every_call_raises_the_error_of_the_first_death():
    started = Started(1, RestartPolicy(max_per_hour=2, backoff=0.0))
    async with started as (fleet, generators):
        generators.spawned[0].waits = True
        waiting = asyncio.ensure_future(generate(fleet))
        for number in range(3):
            await until(lambda number=number: len(generators.spawned) > number and states(fleet) == ["healthy"])
            generators.spawned[-1].waits = True
            generators.spawned[-1].die()
            await until(lambda: states(fleet) != ["healthy"])
        for call in (waiting, generate(fleet), fleet.pull(1, 1.0, True), fleet.info(), fleet.compute_logprobs([[1]])):
            with pytest.raises(ActorDiedError, match=r"g0 \(0\) was killed") as raised:
                await call
        assert "the first of 3 deaths in the last hour, and at most 2 restarts are allowed" in raised.value.__notes__[0]
        assert states(fleet) == ["retired"] and str(await fleet.death(GUARD)) == "g0 (0) was killed"


@in_loop
async def test_a_fleet_goes_on_with_its_other_generators_if_one_is_retired():
    async with Started(2, RestartPolicy(max_per_hour=0)) as (fleet, generators):
        generators.spawned[0].die()
        await until(lambda: states(fleet) == ["retired", "healthy"])
        assert makers(await generate(fleet)) == [1, 1, 1, 1]
        info = await fleet.info()
        assert [one.state for one in info.replicas] == ["retired", "healthy"] and info.state == "healthy"


@in_loop
async def test_an_error_of_the_first_start_is_raised_but_a_generator_that_dies_or_is_silent_is_started_again():
    started = Started(1)

    async def fail() -> None:
        raise ValueError("vLLM refuses this")

    started.generators.plans = [lambda first: setattr(first, "is_up", fail)]
    with pytest.raises(ValueError, match="vLLM refuses this"):
        await started.__aenter__()
    assert len(started.generators.spawned) == 1
    started.generators.plans = [lambda killed: setattr(killed, "is_up", killed.die_now)]
    async with started as (fleet, _):
        assert fleet.num_restarts == 1

    async def be_silent() -> None:
        raise ActorSilentError("g0: setup did not answer within 300 s", "g0")

    started.generators.plans = [lambda silent: setattr(silent, "is_up", be_silent)]
    async with started as (fleet, _):
        assert fleet.num_restarts == 1
    started.generators.plans = [lambda killed: setattr(killed, "is_up", killed.die_now)] * (FIRST_RESTARTS + 1)
    with pytest.raises(ActorDiedError, match="was killed"):
        await started.__aenter__()


@in_loop
async def test_a_closed_fleet_starts_no_generator_and_its_calls_raise():
    async with Started(1) as (fleet, generators):
        generators.spawned[0].waits = True
        call = asyncio.ensure_future(generate(fleet))
        await until(lambda: generators.spawned[0].seeds)
        await fleet.close()
        generators.spawned[0].die()
        with pytest.raises((ActorDiedError, RuntimeError)):
            await call
        assert len(generators.spawned) == 1


# --- pulls ----------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_pull_succeeds_although_a_generator_dies_in_it_and_the_successor_pulls_the_same_version():
    async with Started(2) as (fleet, generators):
        await fleet.pull(1, 1.0, True)
        generators.spawned[0].on_pull.append(generators.spawned[0].die_now)
        await fleet.pull(2, 1.0, True)
        assert makers(await generate(fleet)) == [1, 1, 1, 1]
        await until(lambda: states(fleet) == ["healthy", "healthy"])
        assert generators.spawned[2].version == 2 and "2: pull 1" not in generators.events


@in_loop
async def test_a_pull_in_which_every_generator_dies_ends_when_a_restarted_generator_has_the_version():
    async with Started(1) as (fleet, generators):
        generators.spawned[0].on_pull.append(generators.spawned[0].die_now)
        await fleet.pull(2, 1.0, True)
        assert states(fleet) == ["healthy"] and generators.spawned[1].version == 2
        assert fleet.last_pull == generators.spawned[1].last_pull


@in_loop
async def test_a_restarted_generator_also_pulls_a_version_that_the_others_pull_during_its_own_pull():
    in_pull, go_on = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        in_pull.set()
        await go_on.wait()

    started = Started(2)
    started.generators.plans = [lambda first: None, lambda other: None, lambda third: third.on_pull.append(hold)]
    async with started as (fleet, generators):
        await fleet.pull(1, 1.0, True)
        generators.spawned[0].die()
        await in_pull.wait()
        await fleet.pull(2, 1.0, True)
        go_on.set()
        await until(lambda: states(fleet) == ["healthy", "healthy"])
        assert [event for event in generators.events if event.startswith("2: pull")] == ["2: pull 1", "2: pull 2"]


@in_loop
async def test_a_restarted_generator_repeats_a_failed_pull_until_a_pull_succeeds(monkeypatch):
    monkeypatch.setattr("rl_actors.clients.fleet.REFIT_PAUSE", 0.0)

    async def fail() -> None:
        raise ConnectionError("the trainer has died, too")

    started = Started(1)
    started.generators.plans = [lambda first: None, lambda second: second.on_pull.extend([fail, fail])]
    async with started as (fleet, generators):
        await fleet.pull(7, 1.0, True)
        generators.spawned[0].die()
        await until(lambda: "1: pull 7" in generators.events)
        await fleet.pull(4, 1.0, True)  # the pull after the trainer's recovery
        assert states(fleet) == ["healthy"] and generators.spawned[1].version == 4 and fleet.num_restarts == 1


@in_loop
async def test_a_generator_whose_pull_fails_is_stale_until_a_repeated_pull_succeeds():
    async def fail() -> None:
        raise OSError("lost its disk")

    gate = asyncio.Event()
    async with Started(2) as (fleet, generators):
        generators.spawned[0].on_pull = [fail, gate.wait]
        await fleet.pull(2, 1.0, True)
        await until(lambda: generators.events.count("0: pull 2") == 2)
        assert states(fleet) == ["stale", "healthy"]
        assert makers(await generate(fleet)) == [1, 1, 1, 1]
        gate.set()
        await until(lambda: states(fleet) == ["healthy", "healthy"])
        assert generators.spawned[0].version == 2 and fleet.num_restarts == 0


@in_loop
async def test_a_pull_that_fails_on_all_generators_raises_and_the_generators_keep_their_version():
    async def fail() -> None:
        raise TimeoutError("version 9 was not published")

    async with Started(2) as (fleet, generators):
        await fleet.pull(2, 1.0, True)
        for generator in generators.spawned:
            generator.on_pull.append(fail)
        with pytest.raises(TimeoutError, match="version 9 was not published"):
            await fleet.pull(9, 1.0, True)
        assert states(fleet) == ["healthy", "healthy"] and fleet.target_version == 2
        generators.spawned[0].die()
        await until(lambda: len(generators.spawned) == 3 and states(fleet) == ["healthy", "healthy"])
        assert generators.spawned[2].version == 2


@in_loop
async def test_a_generator_that_dies_while_the_fleet_sleeps_is_started_again_at_the_wake():
    async with Started(1) as (fleet, generators):
        await fleet.pull(1, 1.0, True)
        await fleet.sleep(1)
        generators.spawned[0].die()
        await until(lambda: "0: kill" in generators.events)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(generators.spawned) == 1 and states(fleet) == ["dead"]
        await fleet.wake()
        assert generators.events[-3:] == ["1: spawn", "1: pull 1", "1: wake"]


# --- silence, clients and limits ------------------------------------------------------------------------------------


@in_loop
async def test_expect_signs_shortens_the_silence_after_which_a_generator_is_replaced():
    async with Started(2, RestartPolicy(backoff=0.0, silent_after=120.0)) as (fleet, generators):
        generators.spawned[0].signs_every = 50.0
        fleet.expect_signs(180.0)  # no effect: the policy's 120 s are shorter
        fleet.expect_signs(60.0)
        await asyncio.sleep(0)
        assert states(fleet) == ["healthy", "healthy"] and fleet.num_restarts == 0
        fleet.expect_signs(30.0)
        await until(lambda: len(generators.spawned) == 3 and states(fleet) == ["healthy", "healthy"])
        assert [each.cause for each in fleet.returns] == ["g0: no sign of life for 30 s"]
        generators.spawned[1].signs_every = 50.0
        fleet.expect_signs(40.0)  # the shorter time stays, also for generators that are spawned later
        assert [replica.silent_after for replica in fleet.replicas] == [30.0, 30.0]


def test_a_call_of_death_shortens_the_silence_after_which_a_clients_generators_count_as_dead(monkeypatch):
    silences = []

    class Silent:
        name, is_owned, known = "g", True, GeneratorInfo(policy_version=-1, max_model_len=8, vocab_size=9, logs="g")

        async def ready(self) -> None: ...

        async def death(self, silent_after: float) -> Exception:
            silences.append(silent_after)
            return await asyncio.Event().wait()

        async def close(self) -> None: ...

    monkeypatch.setattr(GeneratorClient, "_spawn_one", staticmethod(lambda mesh, *, name, **_: Silent()))
    config = GeneratorConfig(restarts=RestartPolicy(silent_after=120.0))
    with GeneratorClient(None, config=config) as client:
        client.ready().result(GUARD)
        client.death(20.0)
        wait_until(lambda: silences == [120.0, 20.0], "a watch with the shorter time")


def test_a_client_has_the_version_the_logs_and_the_number_of_restarts_of_its_generators(monkeypatch):
    generators = Generators()

    class LateFake(FakeGenerator):
        """A fake that is made outside of the clients' event loop. `ready` runs in the loop, and calls FakeGenerator's constructor, which needs a loop."""

        def __init__(self, name: str) -> None:
            self.name, self.generators, self.number = name, generators, 0

        async def ready(self) -> None:
            FakeGenerator.__init__(self, self.name, generators, 0)
            self.known = await self._info()

        async def death(self, silent_after: float) -> Exception:
            return await asyncio.Event().wait()

    monkeypatch.setattr(GeneratorClient, "_spawn_one", staticmethod(lambda mesh, *, name, **_: LateFake(name)))
    with GeneratorClient(None, config=GeneratorConfig(replicas=2)) as client:
        assert client.pull_model_state_dict(3).result() == 3
        assert client.num_restarts == 0 and "policy_version 3" in repr(client)
        assert [one.logs for one in client.info().result().replicas] == ["generator-0", "generator-1"]
        groups = client.generate([[1], [2]], ONE).result()
        assert [completion.tokens for [completion] in groups] == [[0], [0]]


def test_a_client_whose_generators_are_all_dead_says_what_died_and_what_to_do(monkeypatch):
    killed = []

    class Dying:
        is_owned, known = True, GeneratorInfo(policy_version=-1, max_model_len=8, vocab_size=9, logs="g")

        def __init__(self, name: str) -> None:
            self.name = name

        async def ready(self) -> None: ...

        async def death(self, silent_after: float) -> Exception:
            await until(lambda: self.name in killed)
            return ActorDiedError(f"{self.name}: the process of rank 0 ended", self.name)

        async def kill(self) -> None: ...

        async def close(self) -> None: ...

    monkeypatch.setattr(GeneratorClient, "_spawn_one", staticmethod(lambda mesh, *, name, **_: Dying(name)))
    config = GeneratorConfig(replicas=2, restarts=RestartPolicy(max_per_hour=0))
    with GeneratorClient(None, config=config) as client:
        client.ready().result(GUARD)
        assert repr(client) == "<GeneratorClient generator: ready>"
        killed.append("generator-1")
        wait_until(lambda: repr(client) == "<GeneratorClient generator: generator-1 is retired>")
        killed.append("generator-0")
        wait_until(lambda: "dead" in repr(client))
        dead = "dead, generator-0: the process of rank 0 ended; close this client and spawn another"
        assert repr(client).startswith(f"<GeneratorClient generator: {dead}; GeneratorConfig.restarts says")
        with pytest.raises(ActorDiedError, match="generator-0: the process of rank 0 ended") as raised:
            client.generate([[1]]).result(GUARD)
        assert any("close this client and spawn another" in note for note in raised.value.__notes__)


def test_the_pauses_before_restarts_grow_and_too_many_deaths_raise_the_first_error():
    now = 0.0
    restarts = Restarts(RestartPolicy(max_per_hour=9, backoff=2.0), clock=lambda: now)
    assert [restarts.pause_after(RuntimeError(str(index))) for index in range(9)] == [
        *(0.0, 2.0, 4.0, 8.0, 16.0, 32.0),
        *[LONGEST_RESTART_PAUSE] * 3,
    ]
    now = HOUR - 1.0
    with pytest.raises(RuntimeError, match="^0\n") as raised:
        restarts.pause_after(RuntimeError("9"))
    assert raised.value.__notes__ == [
        "this is the first of 10 deaths in the last hour, and at most 9 restarts are allowed in that time; the last death: 9"
    ]
    now = 2 * HOUR
    assert restarts.pause_after(RuntimeError("10")) == 0.0 and restarts.total == 10


@pytest.mark.parametrize(
    ("field", "value"), [("max_per_hour", -1), ("backoff", -0.5), ("backoff", float("inf")), ("silent_after", 0.5)]
)
def test_the_error_for_a_restart_policy_with_a_value_out_of_range_names_the_field(field, value):
    with pytest.raises(ValueError, match=rf"generator.restarts.{field}={value}; it must be (finite and )?at least"):
        GeneratorClient.spawn(GeneratorConfig(restarts=RestartPolicy(**{field: value})))


def test_a_generator_is_silent_if_it_does_not_answer_or_if_its_engine_stands_still():
    silence = Silence()
    for _ in range(3):
        silence.saw(None, 2.0)
    assert silence.seconds == 6.0
    silence.saw(Heartbeat(is_idle=True, num_done=0), 2.0)
    silence.saw(Heartbeat(is_idle=True, num_done=0), 2.0)  # an idle engine only waits for requests
    assert silence.seconds == 0.0
    silence.saw(Heartbeat(is_idle=False, num_done=1), 2.0)
    for _ in range(4):
        silence.saw(Heartbeat(is_idle=False, num_done=1), 2.0)
    assert silence.seconds == 8.0
    silence.saw(Heartbeat(is_idle=False, num_done=2), 2.0)
    assert silence.seconds == 0.0


@in_loop
async def test_a_silent_generator_is_killed_and_its_successor_answers():
    async with Started(1) as (fleet, generators):
        generators.spawned[0].waits = True
        call = asyncio.ensure_future(generate(fleet))
        await until(lambda: generators.spawned[0].seeds)
        silent = ActorSilentError("g0: no sign of life for 5 s during generate", "g0")
        fleet.replicas[0].lose(fleet.replicas[0].client, silent)  # as the fleet does with a silent generator
        assert makers(await call) == [1, 1, 1, 1]
        assert "0: kill" in generators.events
