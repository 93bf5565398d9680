"""A generator that sleeps, so that other processes can use its device memory. The generator falls asleep when its running requests have ended, and
refuses requests and pulls until it is woken. After a sleep of level 1 the generator has its weights again. After a sleep of level 2 it needs a pull.

On a CPU vLLM has no sleep mode, so these tests release no memory. tests/gpu/test_gpu_sleep.py checks the released memory.
"""

from dataclasses import replace

import pytest
import support
from support import forward_logprobs, worst

from rl_actors import GeneratorClient, SamplingParams
from rl_actors.config import LoRAConfig
from rl_actors.types import DeviceMemory
from rl_actors.vllm import sleeping
from rl_actors.vllm.requests import NO_VERSION

SEQUENCES = [[5, 6], list(range(30)), [7, 3] * 20]


def test_a_generator_falls_asleep_after_its_requests_and_wakes_with_its_weights(generator, trainer, synced):
    running = generator.generate([[5, 6, 7]], SamplingParams(max_tokens=100, ignore_stop=True))
    falling = generator.sleep()
    held = generator.generate([[5, 6, 7]])
    assert falling.result().num_bytes == 0  # a CPU releases nothing
    [[completion]] = running.result()
    assert len(completion.tokens) == 100
    assert generator.info().result().asleep == 1
    refused = [("generate", held), ("generate", generator.generate([[5, 6, 7]]))]
    refused.append(("compute_logprobs", generator.compute_logprobs(SEQUENCES)))
    for name, call in refused:
        with pytest.raises(RuntimeError, match=f"{name} is not possible while the generator sleeps: call wake first"):
            call.result()
    assert generator.sleep(2).result() == DeviceMemory()  # the generator sleeps already
    generator.wake().result()
    assert generator.wake().result() == DeviceMemory()
    info = generator.info().result()
    assert (info.asleep, info.policy_version) == (0, synced)
    assert worst(generator.compute_logprobs(SEQUENCES).result(), forward_logprobs(trainer, SEQUENCES)) < 1e-4


def test_after_a_sleep_of_level_2_a_pull_of_the_same_version_brings_the_weights_back(generator, trainer, synced):
    generator.sleep(level=2).result()
    with pytest.raises(RuntimeError, match="pull_model_state_dict is not possible while the generator sleeps"):
        generator.pull_model_state_dict(synced).result()
    generator.wake().result()
    assert generator.info().result().policy_version == NO_VERSION
    with pytest.raises(
        RuntimeError, match=r"the generator has no usable weights: sleep\(level=2\) released its weights"
    ):
        generator.generate([[5, 6, 7]]).result()
    assert generator.pull_model_state_dict(synced).result() == synced
    assert generator.last_pull.num_bytes > 0
    assert worst(generator.compute_logprobs(SEQUENCES).result(), forward_logprobs(trainer, SEQUENCES)) < 1e-4


def test_sleeps_that_are_not_possible_are_refused():
    config = support.generator_config()
    for level in (0, 3, "1"):
        with pytest.raises(ValueError, match=f"sleep: level={level!r}; it must be 1 or 2"):
            sleeping.require_possible(config, level, has_transport=True)
    with pytest.raises(ValueError, match=r"sleep is not possible with generator.sleep_mode=False"):
        sleeping.require_possible(replace(config, sleep_mode=False), 1, has_transport=True)
    with pytest.raises(ValueError, match=r"without a transport no pull can bring them back; use level 1"):
        sleeping.require_possible(config, 2, has_transport=False)
    adapters = replace(config, lora=LoRAConfig(rank=4, sync="adapter"))
    with pytest.raises(ValueError, match=r"would drop the base weights"):
        sleeping.require_possible(adapters, 2, has_transport=True)
    sleeping.require_possible(adapters, 1, has_transport=False)


@pytest.mark.slow
def test_replicas_whose_engines_have_their_own_processes_all_sleep(trainer, transport):
    config = replace(support.generator_config(), replicas=2, own_process=True)
    version = trainer.push_model_state_dict().result()
    with GeneratorClient.spawn(config, transport=transport) as generator:
        generator.pull_model_state_dict(version).result()
        expected = generator.compute_logprobs(SEQUENCES).result()
        generator.sleep(level=2).result()
        assert [info.asleep for info in generator.info().result().replicas] == [2, 2]
        generator.wake().result()
        generator.pull_model_state_dict(version).result()
        assert worst(generator.compute_logprobs(SEQUENCES).result(), expected) == 0
