"""A value model, called through its client: training, checkpoints and refused calls. A value model gives one number for each position
instead of logprobs, as the critic of PPO does. It runs in processes that the tests have started, or in the processes of a policy.
"""

import asyncio
from dataclasses import replace

import pytest
import support
import torch
from torch import Tensor
from torch.testing import assert_close

from rl_actors import CrossEntropy, OptimParams, Sample, TrainerClient, ValueLoss, ValueTrainerClient

STEP = OptimParams(learning_rate=0.02, eps=1e-2, grad_divisor=96)


def value_samples(seed: int = 0) -> list[Sample]:
    """Samples with a random return at every position."""
    draw = torch.Generator().manual_seed(seed)
    samples = []
    for sample in support.random_samples(seed=seed):
        columns = {"loss_weights": sample.columns["loss_weights"], "returns": torch.randn(len(sample), generator=draw)}
        samples.append(replace(sample, columns=columns))
    return samples


def fit(critic: TrainerClient, steps: int) -> Tensor:
    """Train the critic for this many steps, and return its values."""
    for _ in range(steps):
        critic.forward_backward(value_samples(), ValueLoss()).result()
        critic.optim_step(STEP).result()
    return values_of(critic)


def values_of(critic: TrainerClient) -> Tensor:
    found = critic.forward(value_samples()).result().values
    assert found is not None
    return torch.cat(found)


@pytest.fixture
def critic(trainer, ranks):
    with trainer.spawn_value_trainer(support.trainer_config(), ranks(1)) as client:
        yield client


def test_a_value_model_gives_one_value_for_each_target_and_learns_the_returns(critic):
    samples = value_samples()
    output = critic.forward(samples, ValueLoss()).result()
    assert [len(row) for row in output.values] == [len(sample) for sample in samples]
    assert output.logprobs == [] and not torch.cat(output.values).any()
    fit(critic, 15)
    assert critic.forward(samples, ValueLoss()).result().metrics["loss:sum"] < output.metrics["loss:sum"] * 0.8
    assert [(info.head, info.policy_version) for info in critic.info().result()] == [("values", 15)]


def test_a_value_depends_on_the_tokens_up_to_its_position_and_on_no_later_tokens(critic):
    fit(critic, 3)
    tokens = list(range(10))
    changed = [*tokens[:6], 20, *tokens[7:]]
    [first], [second] = (
        critic.forward([Sample.from_tokens(ids[:1], ids[1:])]).result().values for ids in (tokens, changed)
    )
    # Value i depends on tokens 0 to i, which are the state before target i. So token 6, which is target 5, does not change value 5.
    assert_close(first[:6], second[:6], rtol=0, atol=0)
    assert (first[6:] != second[6:]).all()


def test_a_value_model_starts_from_the_checkpoint_of_a_policy_or_of_a_value_model(trainer, ranks, tmp_path):
    support.step(trainer)
    saved = trainer.save_checkpoint(str(tmp_path / "policy")).result()
    saved.wait().result()
    config = support.trainer_config(seed=7)
    with trainer.spawn_value_trainer(config, ranks(1), checkpoint=saved.path) as critic:
        assert not values_of(critic).any()  # a policy's checkpoint has no value head, so the head starts at zero
        trained = fit(critic, 2)
        assert trained.any()
        critic.save_checkpoint(str(tmp_path / "critic")).result().wait().result()
        following = fit(critic, 1)
    with trainer.spawn_value_trainer(config, ranks(1), checkpoint=str(tmp_path / "critic")) as again:
        assert torch.equal(values_of(again), trained)
    with ValueTrainerClient.spawn(config, processes=ranks(1)) as resumed:
        assert resumed.load_checkpoint(str(tmp_path / "critic")).result() == saved.policy_version + 2
        # One more step gives the values in `following`, because the checkpoint also has the optimizer's state.
        assert_close(fit(resumed, 1), following, rtol=0, atol=0)


def test_a_loss_that_the_caller_writes_trains_a_value_model_like_the_librarys_loss(critic):
    samples = value_samples()

    def squares(samples, values):
        errors = [(v - s.columns["returns"]).square() for s, v in zip(samples, values, strict=True)]
        weighted = [s.columns["loss_weights"] * error for s, error in zip(samples, errors, strict=True)]
        return torch.cat(weighted).sum() / 2, {}

    fit(critic, 1)
    own = critic.forward_backward_custom(samples, squares).result().metrics["loss:sum"]
    norm = critic.optim_step(OptimParams(learning_rate=0.0)).result().grad_norm
    theirs = critic.forward_backward(samples, ValueLoss()).result().metrics["loss:sum"]
    assert own == pytest.approx(theirs, rel=1e-5)
    assert critic.optim_step(OptimParams(learning_rate=0.0)).result().grad_norm == pytest.approx(norm, rel=1e-5)


def test_a_value_model_refuses_calls_that_need_a_language_model(critic, tmp_path):
    critic.ready().result()
    samples = support.random_samples()
    for call in (
        lambda: critic.forward(samples, CrossEntropy()),
        lambda: critic.push_model_state_dict(),
        lambda: critic.export_hf(str(tmp_path / "exported")),
        lambda: critic.spawn_generator(),
    ):
        with pytest.raises(ValueError, match="head='values'"):
            call().result()


def test_policy_and_value_model_of_two_ranks_share_processes_and_take_turns(ranks):
    """Policy and value model both start collectives. If their calls did not take turns, the two ranks could start the
    collectives in different orders. Then the ranks would wait for each other for ever.
    """
    config = support.trainer_config(shard=2)

    async def both(policy, critic):
        for seed in range(4):
            await asyncio.gather(
                policy.forward_backward(support.random_samples(seed=seed), "cross_entropy"),
                critic.forward_backward(value_samples(seed=seed), ValueLoss()),
                policy.optim_step(STEP),
                critic.optim_step(STEP),
            )
        return policy.forward(support.random_samples()), critic.forward(value_samples())

    with TrainerClient.spawn(config, processes=ranks(2)) as policy:
        with policy.spawn_value_trainer(processes=policy) as critic:
            trained, judged = asyncio.run(both(policy, critic))
            expected = critic.forward(value_samples(), ValueLoss()).result()
            assert all(map(torch.equal, judged.result().values, expected.values))
            assert [info.pid for info in critic.info().result()] == [info.pid for info in policy.info().result()]
            assert len(trained.result().logprobs) == 8
        again = policy.forward(support.random_samples()).result()  # closing the critic does not change the policy
        assert all(map(torch.equal, trained.result().logprobs, again.logprobs))
        orphan = policy.spawn_value_trainer(processes=policy)
        orphan.ready().result()
    with pytest.raises(RuntimeError, match="whose processes it uses, is closed"):
        orphan.forward(value_samples())
    orphan.close().result()


def test_wrong_arguments_of_spawn_value_trainer_are_refused_before_anything_starts(trainer, ranks, tmp_path):
    with pytest.raises(ValueError, match="processes has 1 processes, but the layout of the config needs 2"):
        trainer.spawn_value_trainer(support.trainer_config(shard=2), ranks(1))
    with pytest.raises(ValueError, match="that client did not spawn its mesh"):
        trainer.spawn_value_trainer(support.trainer_config(), trainer)
    with pytest.raises(ValueError, match="spawn_value_trainer needs a TrainerConfig"):
        trainer.spawn_value_trainer()
    with pytest.raises(ValueError, match="checkpoint='.*nowhere' is not a directory"):
        trainer.spawn_value_trainer(support.trainer_config(), ranks(1), checkpoint=str(tmp_path / "nowhere"))
