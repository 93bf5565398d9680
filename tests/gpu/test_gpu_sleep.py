"""vLLM's sleep mode on a GPU: the memory that a sleep releases, and the logprobs of the generator after it has woken."""

from dataclasses import replace

import pytest
import torch
from test_gpu_generator import (
    PROMPTS,
    SAMPLED,
    assert_logprobs_are_the_trainers,
    generator_config,
    step,
    trainer_config,
)

from rl_actors import SamplingParams, TrainerClient

pytestmark = pytest.mark.gpu

CACHE = 8 << 30  # bytes of the key-value cache


@pytest.fixture(scope="module")
def actors(tiny_run):
    """A trainer that has taken one step, and a generator with the same weights, on one GPU."""
    # The GRPO run of the fixture tiny_run uses the same GPU. So the run must end before a test measures the memory of the GPU.
    tiny_run[0].wait()
    config = replace(generator_config(gpu=0), sleep_mode=True, kv_cache_bytes=CACHE)
    with TrainerClient.spawn(trainer_config()) as trainer, trainer.spawn_generator(config) as generator:
        generator.pull_model_state_dict(_next_version(trainer)).result()
        yield trainer, generator


def _next_version(trainer) -> int:
    step(trainer)
    return trainer.push_model_state_dict().result()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_releases_memory_and_a_pull_after_wake_gives_the_trainers_logprobs(actors, level):
    trainer, generator = actors
    generator.generate(PROMPTS, SAMPLED).result()  # fills the prefix cache
    weights = 2 * trainer.info().result()[0].num_parameters
    free = torch.cuda.mem_get_info()[0]
    released = generator.sleep(level).result()
    free_asleep = torch.cuda.mem_get_info()[0]
    print(f"level {level}: {released}; freed on GPU: {free_asleep - free:,}; weights {weights:,}, cache {CACHE:,}")
    assert 0.95 * (weights + CACHE) < released.num_bytes < 1.1 * (weights + CACHE)
    # The released memory is free on the GPU, so other processes can use it.
    assert abs(free_asleep - free - released.num_bytes) < 0.05 * CACHE
    with pytest.raises(RuntimeError, match="the generator sleeps: call wake first"):
        generator.generate(PROMPTS, SAMPLED).result()
    version = _next_version(trainer)
    taken = generator.wake().result()
    print(f"wake: {taken}")
    assert abs(taken.num_bytes - released.num_bytes) < 0.05 * CACHE
    assert generator.pull_model_state_dict(version).result() == version
    assert_logprobs_are_the_trainers(trainer, generator.generate(PROMPTS, SAMPLED).result())


def test_sleep_of_level_1_keeps_the_weights(actors):
    trainer, generator = actors
    greedy = SamplingParams(max_tokens=32, temperature=0.0)
    before = generator.generate(PROMPTS, greedy).result()
    generator.sleep(1).result()
    generator.wake().result()
    after = generator.generate(PROMPTS, greedy).result()
    assert [group[0].tokens for group in after] == [group[0].tokens for group in before]
    assert_logprobs_are_the_trainers(trainer, generator.generate(PROMPTS, SAMPLED).result())
