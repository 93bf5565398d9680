"""Offload and onload through the client: totals over the ranks, errors that the call raises at once, and pushes of an offloaded trainer."""

import pytest
import support
import torch

from rl_actors import TrainerClient
from rl_actors.parts import PARTS


def test_a_move_answers_with_bytes_and_seconds_and_an_offloaded_trainer_pushes_its_weights(trainer, generator):
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


def test_a_wrong_part_is_refused_where_the_call_is_made(trainer):
    with pytest.raises(ValueError, match="offload: 'cache' is not a part; the parts are weights, gradients, optimizer"):
        trainer.offload(["cache"])
    with pytest.raises(TypeError, match="onload: parts is 'weights'; it must be a list of names"):
        trainer.onload("weights")


@pytest.mark.slow
def test_the_bytes_of_a_move_are_those_of_all_ranks(ranks, transport):
    mesh = ranks(2).spawn("offloaded", support.TestTrainer, support.trainer_config(shard=2), transport)
    with TrainerClient(mesh) as trainer:
        support.step(trainer)
        moved = trainer.offload().result()
        infos = trainer.info().result()
        assert moved.num_bytes == sum(sum(info.on_host.values()) for info in infos)
        assert trainer.onload().result().num_bytes == moved.num_bytes
