"""Tests of ReferenceClient, the client of a model that only infers, such as a reference or a teacher.

The model can load newer weights of a policy. It holds no gradients and no optimizer state.
"""

from dataclasses import replace

import pytest
import support
import torch

from rl_actors import KL, OptimParams, ReferenceClient, Reinforce, TrainerClient, num_loss_tokens


def logprobs(client) -> torch.Tensor:
    return torch.cat(client.forward(support.random_samples()).result().logprobs)


@pytest.mark.parametrize("shard", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_reference_gets_the_policys_weights_only_when_it_is_refreshed(ranks, transport, shard):
    config = support.trainer_config(seed=3)
    with TrainerClient.spawn(config, transport=transport, processes=ranks(1)) as policy:
        of_reference = support.trainer_config(shard=shard, seed=3)
        with policy.spawn_reference(of_reference, policy if shard == 1 else ranks(shard)) as reference:
            first = logprobs(policy)
            torch.testing.assert_close(logprobs(reference), first)
            version = support.step(policy)
            torch.testing.assert_close(logprobs(reference), first)
            assert support.worst([logprobs(policy)], [first]) > 0.1
            assert reference.refresh(policy.push_model_state_dict().result()).result() == version
            torch.testing.assert_close(logprobs(reference), logprobs(policy))
            assert {info.policy_version for info in reference.info().result()} == {version}
            second = logprobs(reference)
            support.step(policy, seed=1)
            torch.testing.assert_close(logprobs(reference), second, rtol=0, atol=0)


def test_a_teacher_and_a_reference_of_one_trainer_have_different_weights(trainer, ranks):
    config = support.trainer_config(seed=3)
    with trainer.spawn_reference(config, ranks(1)) as reference:
        teacher_config = replace(config, seed=4)
        with trainer.spawn_reference(teacher_config, ranks(1), name="teacher") as teacher:
            assert repr(teacher).startswith("<ReferenceClient teacher: ")
            assert support.worst([logprobs(teacher)], [logprobs(reference)]) > 0.1


def test_distillation_brings_a_student_nearer_to_its_teacher(trainer, ranks):
    """The column ref_logprobs has the teacher's logprobs. All advantages are 0, so the loss is only the KL divergence."""
    loss = Reinforce(kl=KL(coefficient=1.0, estimator="k2"))
    with trainer.spawn_reference(support.trainer_config(seed=4), ranks(1), name="teacher") as teacher:
        samples = []
        given = support.random_samples()
        for sample, logprobs in zip(given, teacher.forward(given).result().logprobs, strict=True):
            columns = {
                "loss_weights": sample.columns["loss_weights"],
                "advantages": torch.zeros(len(sample)),
                "ref_logprobs": logprobs,
            }
            samples.append(replace(sample, columns=columns))
        divergences = []
        for _ in range(8):
            divergences.append(trainer.forward_backward(samples, loss).result().metrics["kl_reference:mean"])
            trainer.optim_step(
                OptimParams(learning_rate=0.01, eps=1e-2, grad_divisor=num_loss_tokens(samples))
            ).result()
    assert divergences[-1] < 0.5 * divergences[0], divergences


def test_a_reference_holds_only_weights_and_refuses_the_calls_of_training(ranks, transport):
    config = support.trainer_config(optimizer=None)
    mesh = ranks(1).spawn("frozen", support.TestTrainer, config, transport)
    with ReferenceClient(mesh) as reference:
        logprobs(reference)
        [held] = mesh.held_bytes.call().get(timeout=60).values()
        parameters, gradients, moments, _ = held
        assert parameters >= 4 * reference.info().result()[0].num_parameters
        assert (gradients, moments) == (0, 0)
        samples = support.random_samples()
        for refused in (
            lambda: reference.forward_backward(samples, "cross_entropy"),
            lambda: reference.optim_step(OptimParams(learning_rate=0.1)),
            lambda: reference.save_checkpoint("checkpoint"),
            lambda: reference.load_checkpoint("checkpoint", optimizer=True),
        ):
            with pytest.raises(ValueError, match="optimizer=None: this trainer only infers"):
                refused()
    for call in ("push_model_state_dict", "spawn_generator", "new_tenant"):
        assert not hasattr(reference, call)


def test_a_failed_refresh_names_the_reason_and_leaves_the_weights_of_the_reference_unchanged(trainer, ranks, transport):
    support.step(trainer)
    version = trainer.push_model_state_dict().result()
    smaller = support.trainer_config()
    smaller.model = replace(smaller.model, intermediate_size=64)
    with ReferenceClient.spawn(smaller, transport=transport, processes=ranks(1)) as reference:
        before = logprobs(reference)
        with pytest.raises(ValueError, match=rf"the tensors of version {version} do not fit this model: 6 of another"):
            reference.refresh(version).result()
        torch.testing.assert_close(logprobs(reference), before, rtol=0, atol=0)
    with (
        ReferenceClient.spawn(smaller, processes=ranks(1)) as reference,
        pytest.raises(RuntimeError, match="made without a transport"),
    ):
        reference.refresh(version).result()
