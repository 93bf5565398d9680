"""Two generators behind one client, with real processes: completions, pulls, and the end of one of them."""

import asyncio
import os
import signal
from dataclasses import replace

import psutil
import pytest
import support
from waiting import GUARD

from rl_actors import GeneratorClient, MemoryTransport, SamplingParams

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11], [12, 13]]
SAMPLED = SamplingParams(max_tokens=24, n=4, seed=7)


def actor_of(name: str) -> psutil.Process:
    for process in psutil.Process().children(recursive=True):
        if process.environ().get("RL_ACTORS_PROCESS") == name:
            return process
    raise AssertionError(f"no process {name}")


@pytest.mark.slow
def test_two_replicas_give_the_completions_of_one_generator_and_an_end_of_one_is_named():
    transport = MemoryTransport()
    asyncio.run(transport.open())
    weights = support.random_weights(tied=True, seed=1)
    support.publish_from_here(transport, weights, stream="replicas", version=1)
    config = replace(support.generator_config(), replicas=2)
    with (
        GeneratorClient.spawn(replace(config, replicas=1), transport=transport, name="single") as single,
        GeneratorClient.spawn(config, transport=transport, name="pair") as pair,
    ):
        for client in (single, pair):
            assert client.pull_model_state_dict(1).result() == 1
        expected = single.generate(PROMPTS, SAMPLED).result()
        assert pair.generate(PROMPTS, SAMPLED).result() == expected
        each = dict(iter(pair.generate_each(PROMPTS, SAMPLED)))
        assert [each[index] for index in range(4)] == expected
        for ours, theirs in zip(
            pair.compute_logprobs(PROMPTS[:2]).result(), single.compute_logprobs(PROMPTS[:2]).result(), strict=True
        ):
            assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-5)
        info = pair.info().result()
        assert [one.policy_version for one in info.replicas] == [1, 1]
        assert len({one.logs for one in info.replicas}) == 2
        assert pair.is_alive().result()

        calls = [pair.generate([prompt], SamplingParams(max_tokens=400, n=8)) for prompt in PROMPTS]
        os.kill(actor_of("pair-1-0").pid, signal.SIGKILL)
        outcomes = [call._future.exception(GUARD) for call in calls]
        errors = [str(error) for error in outcomes if error is not None]
        assert errors and all(error.startswith("pair-1: the process of rank 0") for error in errors)
        assert not pair.is_alive().result()
    asyncio.run(transport.close())
