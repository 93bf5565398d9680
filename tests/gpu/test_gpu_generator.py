"""Tests of a generator on GPUs: vLLM's engine core in its own process, weight pulls, two ranks, two replicas."""

import os
import signal

import psutil
import pytest
import torch

from rl_actors import GeneratorConfig, ModelConfig, OptimParams, Sample, SamplingParams, TrainerClient, TrainerConfig

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, head_dim=64)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11], list(range(40))]
SAMPLED = SamplingParams(max_tokens=64, n=4, seed=7)
BFLOAT16 = 0.15
"""Largest allowed difference of a logprob between the trainer and vLLM. Both compute in bfloat16, but they sum in different orders."""

FLOAT8_MEAN = 0.1
"""Largest allowed mean difference of a logprob between the trainer in bfloat16 and vLLM in float8."""


def trainer_config() -> TrainerConfig:
    return TrainerConfig(model=MODEL, compute_dtype="bfloat16", max_sequence_length=511, tokens_per_row=512)


def generator_config(**fields) -> GeneratorConfig:
    limits = {"max_model_len": 512, "max_num_seqs": 32, "kv_cache_bytes": 1 << 28, "dtype": "bfloat16"}
    return GeneratorConfig(model=MODEL, **(limits | fields))


def core_below(pid: int | None = None) -> psutil.Process:
    [core] = [process for process in psutil.Process(pid).children(recursive=True) if "EngineCore" in process.name()]
    return core


def step(trainer: TrainerClient) -> int:
    """Take a training step that changes the weights so much that other tokens are sampled. Returns the new policy_version."""
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(MODEL.vocab_size, (8, 32), generator=draw).tolist()
    trainer.forward_backward([Sample.from_tokens(row[:1], row[1:]) for row in rows], loss="cross_entropy").result()
    return trainer.optim_step(OptimParams(learning_rate=0.01, grad_divisor=8 * 31)).result().policy_version


def assert_logprobs_are_the_trainers(trainer: TrainerClient, groups) -> None:
    samples, sampled = [], []
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            samples.append(Sample.from_tokens(prompt, completion.tokens))
            sampled.append(torch.tensor(completion.logprobs))
    for ours, theirs in zip(sampled, trainer.forward(samples).result().logprobs, strict=True):
        torch.testing.assert_close(ours, theirs[-len(ours) :], atol=BFLOAT16, rtol=0)


def assert_pulls_replace_the_weights(config: GeneratorConfig) -> None:
    """Take two steps, with a pull after each, and check the completions' policy_versions and logprobs.

    The second pull comes while requests run.
    """
    with TrainerClient.spawn(trainer_config()) as trainer, trainer.spawn_generator(config) as generator:
        first = step(trainer)
        generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()
        groups = generator.generate(PROMPTS, SAMPLED).result()
        assert {version for group in groups for one in group for version in one.policy_versions} == {first}
        assert_logprobs_are_the_trainers(trainer, groups)
        running = generator.generate_each(PROMPTS, SamplingParams(max_tokens=400, n=8, ignore_stop=True))
        second = step(trainer)
        generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()
        for _, completions in running:
            for completion in completions:
                num_old = completion.policy_versions.count(first)
                num_new = len(completion.tokens) - num_old
                assert completion.policy_versions == [first] * num_old + [second] * num_new
        after = generator.generate(PROMPTS, SAMPLED).result()
        assert [group[0].tokens for group in after] != [group[0].tokens for group in groups]
        assert_logprobs_are_the_trainers(trainer, after)


def test_an_engine_core_in_its_own_process_samples_with_the_pulled_weights():
    assert_pulls_replace_the_weights(generator_config())


def test_an_engine_in_float8_quantizes_every_pull_with_fresh_scales():
    config = generator_config(quantization="fp8")
    sequences = [prompt * 8 for prompt in PROMPTS]
    with TrainerClient.spawn(trainer_config()) as trainer, trainer.spawn_generator(config) as generator:
        for _ in range(2):
            step(trainer)
            generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()
        # one sequence at a time, so that both engines compute with the same batches
        found = [generator.compute_logprobs([sequence]).result()[0] for sequence in sequences]
        with trainer.spawn_generator(config, name="fresh") as fresh:
            fresh.pull_model_state_dict(trainer.info().result()[0].policy_version).result()
            fresh_ones = [fresh.compute_logprobs([sequence]).result()[0] for sequence in sequences]
        differences = [(ours - other).abs().max().item() for ours, other in zip(found, fresh_ones, strict=True)]
        print(f"largest differences from an engine that pulled only the second version: {differences}")
        assert differences == [0.0] * len(sequences)
        samples = [Sample.from_tokens(sequence[:1], sequence[1:]) for sequence in sequences]
        expected = torch.cat(trainer.forward(samples).result().logprobs)
        differences = (torch.cat(found) - expected).abs()
        print(f"logprobs in float8: mean difference {differences.mean():.4f}, largest {differences.max():.4f}")
        assert 0 < differences.mean() < FLOAT8_MEAN


def test_a_call_fails_with_an_error_that_names_the_killed_engine_core():
    from rl_actors import GeneratorClient
    from rl_actors.config import RestartPolicy

    config = generator_config(restarts=RestartPolicy(max_per_hour=0))
    with GeneratorClient.spawn(config) as generator:
        generator.generate(PROMPTS, SAMPLED).result()
        core = core_below()
        call = generator.generate(PROMPTS, SamplingParams(max_tokens=400, n=8, ignore_stop=True))
        os.kill(core.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=rf"vLLM's engine core \(pid {core.pid}\) was killed by signal 9"):
            call.result()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_sample_with_the_pulled_weights():
    assert_pulls_replace_the_weights(generator_config(tensor_parallel=2))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_replicas_sample_with_the_pulled_weights():
    assert_pulls_replace_the_weights(generator_config(replicas=2))
