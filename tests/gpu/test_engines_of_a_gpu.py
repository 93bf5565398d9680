"""Two engines on one GPU behave as one: pulls, seeded requests, adapters, sleep, and the death of one of them."""

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from monarch.actor import concurrent_endpoint
from test_gpu_generator import (
    BFLOAT16,
    MODEL,
    PROMPTS,
    SAMPLED,
    assert_logprobs_are_the_trainers,
    assert_pulls_replace_the_weights,
    generator_config,
    step,
    trainer_config,
)
from waiting import wait_until

from benchmarks.harness import random_weights
from rl_actors import GeneratorClient, LoRAConfig, Sample, SamplingParams, TrainerClient
from rl_actors.clients import one_generator
from rl_actors.clients.call import in_background
from rl_actors.generator import Generator
from rl_actors.processes import mps

pytestmark = pytest.mark.gpu

TWO = {"engines_per_gpu": 2, "max_num_seqs": 64, "gpu_memory_utilization": 0.5, "kv_cache_bytes": 1 << 29}
MANY = [[index, index + 1] for index in range(2, 34)]  # with n=4 more requests than one engine gets first
NUM_PULLS = 50


class CheckedGenerator(Generator):
    """A Generator whose engine tells the checksums of its weights."""

    @concurrent_endpoint
    async def checksums(self) -> dict[str, str]:
        engine = self.engine.engine
        found = self.engine.submit(lambda: engine.collective_rpc("compute_weight_checksums"))
        return (await asyncio.wrap_future(found))[0]


def of_every_engine(generator: GeneratorClient, method: str, *arguments):
    """The answers of all engines to one method of OneGenerator."""

    async def ask():
        return [await getattr(replica.client, method)(*arguments) for replica in generator._fleet.replicas]

    return in_background(ask(), method).result()


def next_version(trainer: TrainerClient) -> int:
    step(trainer)
    return trainer.push_model_state_dict().result()


@pytest.fixture
def two_engines():
    """A trainer and a generator of two engines, which have its weights."""
    with (
        TrainerClient.spawn(trainer_config()) as trainer,
        trainer.spawn_generator(generator_config(**TWO)) as generator,
    ):
        generator.pull_model_state_dict(next_version(trainer)).result()
        yield trainer, generator


@pytest.mark.skipif(shutil.which(mps.PROGRAM) is None, reason=f"this machine has no {mps.PROGRAM}")
def test_a_program_with_two_engines_has_a_daemon_that_ends_with_it(two_engines):
    trainer, generator = two_engines
    folder = Path(mps.environment()[mps.PIPES])
    named = [process for process in psutil.process_iter() if process.name() == "nvidia-cuda-mps-server"]
    servers = [server for server in named if server.environ().get(mps.PIPES) == str(folder)]
    assert len(servers) == 1 and folder.is_dir()
    generator.close()
    wait_until(lambda: not folder.exists(), "the end of the daemon's folder")
    assert not any(server.is_running() and server.status() != psutil.STATUS_ZOMBIE for server in servers)


def test_two_engines_sample_with_the_pulled_weights():
    assert_pulls_replace_the_weights(generator_config(**TWO))


def test_after_fifty_pulls_with_requests_under_way_both_engines_have_the_same_checksums(monkeypatch):
    monkeypatch.setattr(one_generator, "Generator", CheckedGenerator)
    with (
        TrainerClient.spawn(trainer_config()) as trainer,
        trainer.spawn_generator(generator_config(**TWO)) as generator,
    ):
        seen = set()
        for _ in range(NUM_PULLS):
            running = generator.generate(MANY, SamplingParams(max_tokens=64, n=4, ignore_stop=True))
            generator.pull_model_state_dict(next_version(trainer)).result()
            running.result()
            first, second = (answer for [answer] in of_every_engine(generator, "ask", "checksums"))
            assert first == second
            seen.add(tuple(sorted(first.items())))
        assert len(seen) == NUM_PULLS
        assert generator.info().result().restarts == 0


def test_seeded_requests_give_the_tokens_of_one_engine():
    invariant = {"batch_invariant": True}
    with TrainerClient.spawn(trainer_config()) as trainer:
        version = next_version(trainer)
        tokens = []
        for config in (generator_config(**invariant), generator_config(**TWO, **invariant)):
            with trainer.spawn_generator(config) as generator:
                generator.pull_model_state_dict(version).result()
                groups = generator.generate(MANY, SAMPLED).result()
            tokens.append([completion.tokens for group in groups for completion in group])
    assert tokens[0] == tokens[1]


def test_both_engines_apply_a_loaded_adapter(tmp_path):
    random_weights.write(MODEL, tmp_path / "base")
    lora = replace(trainer_config(), lora=LoRAConfig(rank=8, sync="merged"), hf_path=str(tmp_path / "base"))
    config = generator_config(**TWO, max_adapters=1)
    directory = str(tmp_path / "adapter")
    with TrainerClient.spawn(lora) as trainer, trainer.spawn_generator(config) as generator:
        generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()
        step(trainer)
        trainer.export_lora(directory).result()
        generator.load_adapter("taught", directory).result()
        [expected] = trainer.forward([Sample.from_tokens(PROMPTS[1][:1], PROMPTS[1][1:])]).result().logprobs
        for [logprobs] in of_every_engine(generator, "compute_logprobs", PROMPTS[1:2], "taught"):
            torch.testing.assert_close(logprobs, expected, atol=BFLOAT16, rtol=0)
        generator.unload_adapter("taught").result()


def test_both_engines_sleep_and_wake():
    config = generator_config(**TWO, sleep_mode=True)
    with TrainerClient.spawn(trainer_config()) as trainer, trainer.spawn_generator(config) as generator:
        generator.pull_model_state_dict(next_version(trainer)).result()
        released = generator.sleep(2).result()
        assert released.num_bytes > 1 << 29  # both caches
        generator.wake().result()
        generator.pull_model_state_dict(next_version(trainer)).result()
        assert_logprobs_are_the_trainers(trainer, generator.generate(PROMPTS, SAMPLED).result())


def test_the_death_of_an_engine_costs_the_other_nothing_and_the_call_ends(two_engines):
    trainer, generator = two_engines
    cores = [process for process in psutil.Process().children(recursive=True) if "EngineCore" in process.name()]
    assert len(cores) == 2
    running = generator.generate(MANY, SamplingParams(max_tokens=400, n=4, ignore_stop=True))
    generator.generate(PROMPTS, SamplingParams(max_tokens=8)).result()  # until requests are under way
    os.kill(cores[0].pid, signal.SIGKILL)
    groups = running.result()
    assert [len(completion.tokens) for group in groups for completion in group] == [400] * (4 * len(MANY))
    assert cores[1].is_running()
    generator.pull_model_state_dict(next_version(trainer)).result()
    wait_until(lambda: {replica.state for replica in generator.info().result().replicas} == {"healthy"})
    assert generator.info().result().restarts == 1
    assert_logprobs_are_the_trainers(trainer, generator.generate(PROMPTS, SAMPLED).result())
