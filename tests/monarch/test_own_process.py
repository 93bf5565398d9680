"""Tests of a generator whose engine core runs in a process of its own. The engine core is the part of vLLM that
schedules requests and computes.

The generator computes the right logprobs, ends without a hang, and leaves no process behind. The core has a process of
its own by default on a GPU and with tensor parallelism. Here the core runs on a CPU. The start of a core takes at least
15 s, so most tests are slow.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import support
import torch
from support import reference_logprobs
from test_lifecycle import Program
from waiting import GUARD

from rl_actors import GeneratorClient, SamplingParams
from rl_actors.config import GeneratorConfig, RestartPolicy
from rl_actors.vllm.core import _executable

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11]]
SAMPLED = SamplingParams(max_tokens=24, n=4, seed=7)
LONG = SamplingParams(max_tokens=400, n=2, seed=1)
ENDLESS = SamplingParams(max_tokens=500, n=16, ignore_stop=True)


def test_a_child_started_through_the_executable_ends_with_the_thread_that_started_it(tmp_path):
    """`_executable` writes a program that runs Python. When the thread that has started the program ends, the kernel kills
    the program.

    The engine's thread starts vLLM's core in this way. This thread lives as long as the actor's process, so the core ends
    with the actor's process.
    """
    program, children = _executable(tmp_path, sys.executable), []

    def start() -> None:
        child = subprocess.Popen([program, "-c", "print('up', flush=True); input()"], stdout=-1, stdin=-1, text=True)
        children.append((child, child.stdout.readline()))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(GUARD)
    [(child, line)] = children
    assert line == "up\n"
    assert child.wait(GUARD) == -signal.SIGKILL
    child.stdin.close()
    child.stdout.close()


def test_a_worker_ends_when_its_parent_is_stopped_and_then_killed(tmp_path):
    """The parent is a child of this test. It stands for vLLM's core, which also starts its workers with multiprocessing's
    spawn.

    When a core is killed, its workers must end, even while they are still starting.
    """
    code = (
        "import multiprocessing, time\n"
        "worker = multiprocessing.get_context('spawn').Process(target=time.sleep, args=(3600,))\n"
        "worker.start(); print(worker.pid, flush=True); input()"
    )
    child = subprocess.Popen([_executable(tmp_path, sys.executable), "-c", code], stdout=-1, stdin=-1, text=True)
    worker = psutil.Process(int(child.stdout.readline()))
    child.send_signal(signal.SIGSTOP)
    child.kill()
    child.wait(GUARD)
    worker.wait(GUARD)  # raises TimeoutExpired if the worker lives on
    assert not worker.is_running()
    child.stdin.close()
    child.stdout.close()


def never_restarted(**fields) -> GeneratorConfig:
    """The config of a generator that is not started again, so that its death is an error.

    tests/monarch/test_dying_generators.py has generators that are started again.
    """
    return replace(support.generator_config(), restarts=RestartPolicy(max_per_hour=0), **fields)


@pytest.fixture(scope="module")
def published():
    """A transport with versions 1 and 2 of random weights, and a dict {version: transformers' model with the weights of
    this version}.
    """
    transport, models = support.WorkersFail(), {}
    asyncio.run(transport.open())
    for version in (1, 2):
        weights = support.random_weights(tied=True, seed=version)
        support.publish_from_here(transport, weights, stream="own", version=version)
        models[version] = support.hf_model(weights)
    yield transport, models
    asyncio.run(transport.close())


@pytest.fixture(scope="module")
def generator(published):
    transport, _ = published
    config = replace(support.generator_config(), own_process=True)
    with GeneratorClient.spawn(config, transport=transport) as client:
        client.ready().result()
        yield client


def core_below(parent: int | None = None, name: str = "generator") -> psutil.Process:
    """The engine core of the generator with this name.

    parent: pid of the process that spawned the generator; None: this process.
    """
    found = []
    for process in psutil.Process(parent).children(recursive=True):
        # vLLM sets the title of a core's process. The title is written into the memory of the process's environment, so
        # this function reads the environment of the core's parent.
        if "EngineCore" in process.name() and process.parent().environ()["RL_ACTORS_PROCESS"] == f"{name}-0":
            found.append(process)
    [core] = found
    return core


def republish(transport, version: int) -> None:
    """Publish a version again, so that it is the newest."""
    weights = support.random_weights(tied=True, seed=version)
    support.publish_from_here(transport, weights, stream="own", version=version)


@pytest.mark.slow
def test_a_pull_in_flight_takes_effect_between_two_tokens_and_for_all_later_requests(generator, published):
    transport, models = published
    republish(transport, 1)
    generator.pull_model_state_dict(1).result()
    groups = generator.generate_each(PROMPTS, LONG)
    republish(transport, 2)
    generator.pull_model_state_dict(2).result()
    splits = set()
    for index, completions in groups:
        for completion in completions:
            num_old = completion.policy_versions.count(1)
            splits.add(0 < num_old < 400)
            assert completion.policy_versions == [1] * num_old + [2] * (400 - num_old)
            for version, part in ((1, slice(0, num_old)), (2, slice(num_old, None))):
                expected = reference_logprobs(models[version], PROMPTS[index], completion.tokens)[part]
                torch.testing.assert_close(torch.tensor(completion.logprobs)[part], expected, atol=1e-4, rtol=0)
    assert splits == {True}
    after = generator.generate(PROMPTS, SAMPLED).result()
    assert after == generator.generate(PROMPTS, SAMPLED).result()
    for prompt, group in zip(PROMPTS, after, strict=True):
        for completion in group:
            expected = reference_logprobs(models[2], prompt, completion.tokens)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_closing_a_loop_over_completions_frees_the_core_for_later_calls(generator):
    for _ in range(4):
        groups = generator.generate_each(PROMPTS, ENDLESS)
        groups.close()
    assert generator.generate(PROMPTS, SAMPLED).result()


@pytest.mark.slow
def test_compute_logprobs_works_and_a_pull_of_an_unpublished_version_fails(generator, published):
    transport, models = published
    republish(transport, 1)
    generator.pull_model_state_dict(1).result()
    [logprobs] = generator.compute_logprobs([[5, 6, 7, 8]]).result()
    expected = reference_logprobs(models[1], [5], [6, 7, 8])
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    with pytest.raises(TimeoutError, match="version 77 was not published"):
        generator.pull_model_state_dict(77, timeout=0.1).result()
    assert generator.generate(PROMPTS, SAMPLED).result()


@pytest.mark.slow
def test_kill_9_of_the_core_ends_every_waiting_call_with_an_error_that_names_the_core(published):
    config = never_restarted(own_process=True)
    with GeneratorClient.spawn(config, transport=published[0], name="victim") as generator:
        generator.generate(PROMPTS, SAMPLED).result()
        core = core_below(name="victim")
        calls = [generator.generate([prompt], ENDLESS) for prompt in PROMPTS]
        groups = generator.generate_each(PROMPTS, ENDLESS)
        os.kill(core.pid, signal.SIGKILL)
        message = rf"vLLM's engine core \(pid {core.pid}\) was killed by signal 9; spawn the generator again"
        for answer in (*(call.result for call in calls), lambda: next(groups)):
            with pytest.raises(RuntimeError, match=f"victim: {message}"):
                answer()
        for later in (
            lambda: generator.generate(PROMPTS, SAMPLED).result(),
            lambda: generator.compute_logprobs(PROMPTS).result(),
            lambda: generator.pull_model_state_dict(2).result(),
        ):
            with pytest.raises(RuntimeError, match=message):
                later()


def fail_to_open(generator: GeneratorClient, transport: support.WorkersFail, version: int, worker: int | None) -> None:
    """Pull twice a version that one worker cannot open. worker: rank of this worker; None: do nothing.

    The other worker answers both pulls. A later call must get its own answer, and not one of these two.
    """
    if worker is None:
        return
    republish(transport, version)
    asyncio.run(transport.put_object("failing_worker", worker))
    for _ in range(2):
        with pytest.raises(OSError, match=f"worker {worker} lost its disk"):
            generator.pull_model_state_dict(version).result()
    asyncio.run(transport.put_object("failing_worker", None))


@pytest.mark.slow
def test_tensor_parallel_ranks_pull_sample_and_end_together(published):
    """vLLM's own executor runs two ranks on the CPU. They communicate through shared memory and gloo."""
    transport, models = published
    config = never_restarted(tensor_parallel=2)
    with GeneratorClient.spawn(config, transport=transport, name="parallel") as generator:
        for version, failing_worker in ((1, 0), (2, 1), (1, None)):
            republish(transport, version)
            generator.pull_model_state_dict(version).result()
            fail_to_open(generator, transport, 3 - version, failing_worker)
            for prompt, group in zip(PROMPTS, generator.generate(PROMPTS, SAMPLED).result(), strict=True):
                for completion in group:
                    assert set(completion.policy_versions) == {version}
                    expected = reference_logprobs(models[version], prompt, completion.tokens)
                    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
        core = core_below(name="parallel")
        workers = core.children()
        assert len(workers) == 2
        # The generator has already removed the names of the ranks' shared memory, so that a kill leaves nothing behind.
        assert not list(Path("/dev/shm").glob("*-cpushm_*"))
        call = generator.generate(PROMPTS, ENDLESS)
        workers[1].kill()
        # The error names the worker. But if the core ends before the generator notices the worker's end, the error
        # names the core.
        with pytest.raises(
            RuntimeError, match=r"vLLM's (worker of rank 1|engine core) \(pid \d+\) .*; spawn the generator again"
        ):
            call.result()
        for process in (core, *workers):
            process.wait(GUARD)


@pytest.mark.slow
def test_all_calls_fail_after_a_pull_that_a_tensor_parallel_rank_does_not_answer(published):
    transport, _ = published
    config = never_restarted(tensor_parallel=2)
    with GeneratorClient.spawn(config, transport=transport, name="parallel") as generator:
        republish(transport, 1)
        generator.pull_model_state_dict(1).result()
        core = core_below(name="parallel")
        processes = [core, *core.children()]
        republish(transport, 2)
        asyncio.run(transport.put_object("hanging_worker", 1))
        silent = r"pull of own/2: parallel-0 \(pid \d+\): read was not done by every worker within 12 s"
        with pytest.raises(RuntimeError, match=silent):
            generator.pull_model_state_dict(2).result()
        asyncio.run(transport.put_object("hanging_worker", None))
        for later in (generator.generate(PROMPTS, SAMPLED), generator.pull_model_state_dict(2)):
            with pytest.raises(RuntimeError, match=silent):
                later.result()
    for process in processes:
        process.wait(GUARD)


@pytest.mark.slow
def test_tensor_parallel_ranks_end_when_their_actor_is_killed_in_the_middle_of_a_step():
    config = never_restarted(tensor_parallel=2)
    with GeneratorClient.spawn(config, name="parallel") as generator:
        generator.generate(PROMPTS, SAMPLED).result()
        core = core_below(name="parallel")
        processes = [core, *core.children()]
        assert len(processes) == 3
        call = generator.generate(PROMPTS, ENDLESS)
        core.parent().kill()
        with pytest.raises(RuntimeError, match="parallel: the process of rank 0"):
            call.result()
        for process in processes:
            process.wait(GUARD)


PROGRAM = """
import dataclasses
import support
from rl_actors import *
config = dataclasses.replace(support.generator_config(), own_process=True)
generator = GeneratorClient.spawn(config)
generator.generate([[1, 2]]).result()
print("generated")
"""


@pytest.fixture
def program():
    started = Program("-c", PROGRAM + "input(); generator.generate([[1, 2]]).result(); print('again')")
    started.read_until("generated")
    yield started
    started.end()


def enter(program: Program) -> None:
    program.process.stdin.write("\n")
    program.process.stdin.flush()


@pytest.mark.slow
def test_the_core_is_out_of_reach_of_ctrl_c_and_ends_when_its_program_ends(program):
    core = core_below(program.process.pid)
    # Ctrl-C in a terminal reaches only the processes in the foreground of the program's session. The core is in a
    # session of its own, so Ctrl-C does not reach it.
    assert os.getsid(core.pid) == core.pid
    enter(program)
    program.read_until("again")
    assert program.process.wait(GUARD) == 0
    core.wait(GUARD)
    program.assert_nothing_is_left(set())


@pytest.mark.slow
def test_the_core_ends_when_its_actor_is_killed(program):
    core = core_below(program.process.pid)
    core.parent().kill()
    core.wait(GUARD)


@pytest.mark.slow
def test_the_core_ends_when_its_program_is_killed(program):
    core = core_below(program.process.pid)
    program.process.kill()
    program.process.wait(GUARD)
    core.wait(GUARD)
    program.assert_nothing_is_left(set())
