"""vLLM's prefix cache after the weights were replaced, without a new computation for running requests."""

from dataclasses import replace

import pytest
import support
import torch

from rl_actors import SamplingParams, TrainerClient

pytestmark = pytest.mark.slow


def test_no_request_uses_a_prefix_of_other_weights_that_had_the_same_version(tmp_path):
    """A trainer that has loaded a checkpoint publishes other weights under a version number that it has used before."""
    config = replace(support.generator_config(), recompute_running=False)
    # vLLM caches whole blocks. On a CPU a block has 128 tokens.
    prompt = [index % support.VOCAB_SIZE for index in range(140)]
    with TrainerClient.spawn(support.trainer_config()) as trainer, trainer.spawn_generator(config) as generator:
        trainer.save_checkpoint(str(tmp_path / "start")).result()
        for seed in (0, 1):
            version = support.step(trainer, seed=seed)
            assert version == 1
            generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()
            [[completion]] = generator.generate([prompt], SamplingParams(max_tokens=4, seed=2)).result()
            [expected] = support.forward_logprobs(trainer, [[*prompt, *completion.tokens]])
            assert support.worst([torch.tensor(completion.logprobs)], [expected[-len(completion.tokens) :]]) < 1e-4
            trainer.load_checkpoint(str(tmp_path / "start")).result()
