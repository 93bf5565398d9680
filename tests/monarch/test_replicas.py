"""Tests completions, logprobs and pulls of two generators behind one client, in real processes. test_dying_generators.py
tests generators that die."""

import asyncio
from dataclasses import replace

import pytest
import support

from rl_actors import GeneratorClient, MemoryTransport, SamplingParams

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11], [12, 13]]
SAMPLED = SamplingParams(max_tokens=24, n=4, seed=7)


@pytest.mark.slow
def test_two_replicas_give_the_completions_of_one_generator():
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
    asyncio.run(transport.close())
