"""Generators whose processes are killed (SIGKILL) or stopped (SIGSTOP).

Every call gives the same completions as an undisturbed call.
tests/test_fleet.py tests restarts and their limits, with fake generators.
"""

import asyncio
import contextlib
import os
import re
import signal
import time
from dataclasses import replace

import psutil
import pytest
import support
from test_own_process import core_below
from waiting import GUARD, wait_until

from rl_actors import GeneratorClient, SamplingParams
from rl_actors.config import RestartPolicy

pytestmark = pytest.mark.slow
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11], [12, 13]]
LONG = SamplingParams(max_tokens=300, n=8, seed=7)
SILENT_AFTER = 20.0  # seconds; a generator that starts on a busy machine may give no sign of life for a while


def config(**fields):
    policy = RestartPolicy(backoff=0.1, silent_after=SILENT_AFTER)
    return replace(support.generator_config(), restarts=policy, setup_timeout=GUARD, **fields)


@pytest.fixture(scope="module")
def transport():
    """A transport with weights of the versions 1 and 2.

    If a test puts the name of a generator's process under "victim", this process is killed in its next pull.
    """
    transport = support.ReadersDie()
    asyncio.run(transport.open())
    for version in (1, 2):
        weights = support.random_weights(tied=True, seed=version)
        support.publish_from_here(transport, weights, stream="dying", version=version)
    yield transport
    asyncio.run(transport.close())


def spawn(transport, name: str, **fields) -> GeneratorClient:
    client = GeneratorClient.spawn(config(**fields), transport=transport, name=name)
    client.lines = []
    client.on_news(client.lines.append)
    assert client.pull_model_state_dict(1).result() == 1
    return client


@pytest.fixture(scope="module")
def single(transport):
    with spawn(transport, "single") as client:
        yield client


@pytest.fixture(scope="module")
def expected(single):
    """The completions of an undisturbed call with the weights of version 1."""
    return single.generate(PROMPTS, LONG).result()


def begin(generator: GeneratorClient):
    """Begin a call, and return its iterator of groups when all generators of the client are working on the call."""
    groups = generator.generate_each(PROMPTS, LONG)
    for replica in generator._fleet.replicas:
        mesh = replica.client._mesh
        wait_until(lambda mesh=mesh: not mesh.heartbeat.call_one().get(timeout=GUARD).is_idle)
    return groups


def in_order(groups) -> list:
    found = dict(iter(groups))
    return [found[index] for index in range(len(PROMPTS))]


def assert_close(groups, expected) -> None:
    """The tokens are the same, and the logprobs differ by at most 1e-5.

    Several generators may share the prompts, and after a death only unfinished prompts are sent again. So the batches
    differ from those of the undisturbed call, and the logprobs differ by rounding errors.
    """
    for group, wanted in zip(groups, expected, strict=True):
        for completion, other in zip(group, wanted, strict=True):
            assert replace(completion, logprobs=[]) == replace(other, logprobs=[])
            assert completion.logprobs == pytest.approx(other.logprobs, abs=1e-5, rel=0)


def gone(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_generator_killed_or_stopped_in_a_call_is_replaced_and_the_completions_are_the_same(single, expected, number):
    before, process = single.num_restarts, support.process_of("single-0")
    groups = begin(single)
    os.kill(process.pid, number)
    assert_close(in_order(groups), expected)
    assert single.num_restarts == before + 1 == single.info().result().restarts
    assert single.generate(PROMPTS, LONG).result() == expected
    assert gone(process) and support.process_of("single-0").pid != process.pid
    died, back = single.lines[-2:]
    cause = r"the process of rank 0" if number == signal.SIGKILL else f"no sign of life for {SILENT_AFTER:g} s during "
    assert f"single has died: single: {cause}" in died and "single is back after" in back


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_core_that_is_killed_or_stopped_is_replaced_together_with_its_generator(transport, expected, number):
    with spawn(transport, "owner", own_process=True) as generator:
        generator.generate(PROMPTS, SamplingParams(max_tokens=1)).result()
        core = core_below(name="owner")
        groups = begin(generator)
        core.send_signal(number)
        assert_close(in_order(groups), expected)
        assert generator.num_restarts == 1 and gone(core)
        # The only rank runs in the core's own process, so the message may name the core or the rank.
        cause = (
            r"vLLM's (engine core|worker of rank 0) \(pid \d+\)" if number == signal.SIGKILL else "no sign of life for"
        )
        assert re.search(cause, generator.lines[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_core_that_is_killed_or_stopped_in_its_first_start_is_replaced(transport, number):
    with GeneratorClient.spawn(config(own_process=True), transport=transport, name="early") as generator:
        lines: list[str] = []
        generator.on_news(lines.append)
        cores = []

        def core_has_started() -> bool:
            with contextlib.suppress(ValueError, psutil.Error):  # no core has started yet
                cores.append(core_below(name="early"))
            return bool(cores)

        wait_until(core_has_started)
        cores[0].send_signal(number)
        assert len(generator.generate(PROMPTS, SamplingParams(max_tokens=1)).result()) == len(PROMPTS)
        assert generator.num_restarts == 1 and gone(cores[0])
        cause = "vLLM's engine core ended at its start" if number == signal.SIGKILL else "no sign of life"
        assert cause in lines[0]


def test_a_generator_that_is_silent_in_its_setup_is_not_replaced_after_silent_after():
    with GeneratorClient.spawn(replace(config(), restarts=RestartPolicy(silent_after=1.0)), name="slow") as generator:
        wait_until(lambda: generator._fleet.replicas[0].client._mesh is not None)
        process = support.process_of("slow-0")
        process.suspend()
        time.sleep(5)  # five times silent_after
        process.resume()
        generator.ready().result()
        assert generator.num_restarts == 0 and support.process_of("slow-0").pid == process.pid


def test_two_generators_survive_the_death_of_one_in_a_call_and_of_the_other_in_a_pull(transport, expected):
    with spawn(transport, "pair", replicas=2) as pair:
        assert_close(pair.generate(PROMPTS, LONG).result(), expected)
        groups = begin(pair)
        support.process_of("pair-1-0").kill()
        assert_close(in_order(groups), expected)
        wait_until(lambda: pair.is_alive(GUARD).result())
        asyncio.run(transport.put_object("victim", "pair-0-0"))
        assert pair.pull_model_state_dict(2).result() == 2
        assert {one.policy_version for one in pair.info().result().replicas if one.state == "healthy"} == {2}
        [[completion]] = pair.generate([[5]], SamplingParams(max_tokens=4)).result()
        assert completion.policy_versions == [2] * 4
        wait_until(lambda: pair.is_alive(GUARD).result())
        assert [(one.policy_version, one.state) for one in pair.info().result().replicas] == [(2, "healthy")] * 2
        assert pair.num_restarts == 2
