"""Tests of a TrainerClient's `offload`, which moves parts of the trainer's memory to the host, and `onload`, which moves them back.

The tests cover the sums over the ranks, the errors for wrong arguments, and a push of an offloaded trainer.
"""

import pytest
import support
import torch

from rl_actors import TrainerClient
from rl_actors.parts import PARTS


def test_offload_returns_bytes_and_seconds_and_an_offloaded_trainer_can_push_its_weights(trainer, generator):
    support.step(trainer)
    moved = trainer.offload().result()
    [info] = trainer.info().result()
    assert moved.num_bytes == sum(info.on_host.values()) > 0 and moved.seconds > 0
    assert generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result() == info.policy_version
    assert set(trainer.info().result()[0].on_host) == set(PARTS) - {"weights", "gradients"}
    sequence = [1, 2, 3, 4, 5]
    sampled = generator.compute_logprobs([sequence]).result()[0]
    sample = support.Sample.from_tokens(sequence[:1], sequence[1:])
    assert torch.allclose(trainer.forward([sample]).result().logprobs[0], sampled, atol=1e-4)
    assert trainer.onload().result().num_bytes == info.on_host["optimizer"]


def test_offload_and_onload_raise_at_once_for_wrong_parts(trainer):
    with pytest.raises(ValueError, match="offload: 'cache' is not a part; the parts are weights, gradients, optimizer"):
        trainer.offload(["cache"])
    with pytest.raises(TypeError, match="onload: parts is 'weights'; it must be a list of names"):
        trainer.onload("weights")


@pytest.mark.slow
def test_num_bytes_is_the_sum_over_all_ranks(ranks, transport):
    mesh = ranks(2).spawn("offloaded", support.TestTrainer, support.trainer_config(shard=2), transport)
    with TrainerClient(mesh) as trainer:
        support.step(trainer)
        moved = trainer.offload().result()
        infos = trainer.info().result()
        assert moved.num_bytes == sum(sum(info.on_host.values()) for info in infos)
        assert trainer.onload().result().num_bytes == moved.num_bytes
