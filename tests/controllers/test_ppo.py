"""Tests the parts of PPO's loop: minibatches, rewards of tokens, and the critic's advantages and returns.

A fake with known values stands for the value model.
"""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from configs.tiny_ppo import tiny_ppo
from controllers.algorithms.critic import AdvantageSamples, Critic, CriticConfig
from controllers.algorithms.gae import GAEConfig
from controllers.environments import Problem
from controllers.ppo import is_cut_off, minibatches, token_rewards
from controllers.rollouts.episodes import PlayedEpisode
from controllers.rollouts.groups import Group, RolloutBatch, RolloutConfig
from rl_actors import KL, Completion, Sample
from rl_actors.types import ForwardBackwardOutput


def completion(tokens: list[int], reason: str = "stop") -> Completion:
    return Completion(
        tokens=tokens, logprobs=[-0.5] * len(tokens), policy_versions=[3] * len(tokens), finish_reason=reason
    )


def batch_of(*rewards: float) -> RolloutBatch:
    """One group for each reward, with one completion. The first completion ends with a stop token. A token limit cuts off the others."""
    groups = []
    for index, reward in enumerate(rewards):
        one = completion([7, 8, 9][: index + 1], "stop" if index == 0 else "length")
        group = Group(
            problem=Problem(prompt="p", answer="a", key="k"),
            prompt=[5, 6],
            completions=[one],
            texts=["x"],
            task_rewards=[reward],
            rewards=[reward],
            drop_if_equal=False,
        )
        groups.append(group)
    config = RolloutConfig(advantage="gae", group_size=1, dynamic_sampling_rounds=0)
    return RolloutBatch.of(groups, config, num_refills=0, num_retries=0, version=3)


def rewards_of(batch: RolloutBatch) -> list[torch.Tensor]:
    """The rewards of every token in a run without a reference model."""
    config = tiny_ppo()
    rows, measured = asyncio.run(token_rewards(config, batch, batch.samples, None, config.kl()))
    assert measured == {}
    return rows


class ValueModel:
    """Stands for the client of a value model. The value of a state is the number of its tokens."""

    async def forward(self, samples):
        rows = [torch.arange(1, len(sample) + 1, dtype=torch.float32) for sample in samples]
        return ForwardBackwardOutput(metrics={}, partials={}, logprobs=[], values=rows, policy_version=0)


def critic(**fields) -> Critic:
    gae = GAEConfig(**({"whiten": False, "actor_lambda": 1.0} | fields))
    run_config = SimpleNamespace(samples_per_forward_backward=2)
    return Critic(trainer=ValueModel(), config=CriticConfig(), gae=gae, run_config=run_config)


def judged_by(critic: Critic, batch: RolloutBatch, rewards: list[torch.Tensor]) -> AdvantageSamples:
    values = asyncio.run(critic.values(batch.samples))
    return critic.estimate_advantages(batch.samples, values, rewards, is_cut_off(batch))


def test_every_group_of_a_ppo_batch_is_trained_on_and_its_reward_is_at_its_last_token():
    batch = batch_of(1.0, 0.0, 0.25)
    assert len(batch.samples) == 3 and is_cut_off(batch) == [False, True, True]
    rows = rewards_of(batch)
    assert [row.tolist() for row in rows] == [[0, 1.0], [0, 0, 0], [0, 0, 0, 0.25]]


def test_the_reward_of_a_turn_is_at_the_turns_last_token_and_the_environments_tokens_are_no_actions():
    turns = completion([7, 8, 1, 9], "length")
    episode = PlayedEpisode(
        prompt=[5, 6],
        completion=turns,
        is_action=[True, True, False, True],
        rewards_per_token=[0, 0.5, 0, 1.0],
        lines=[],
    )
    [group] = batch_of(1.5).groups
    group = replace(group, completions=[turns], episodes=[episode])
    config = RolloutConfig(advantage="gae", group_size=1, dynamic_sampling_rounds=0)
    batch = RolloutBatch.of([group], config, num_refills=0, num_retries=0, version=3)
    [row] = rewards_of(batch)
    assert row.tolist() == [0, 0, 0.5, 0, 1.0] and is_cut_off(batch) == [True]
    estimated = judged_by(critic(bootstrap=False), batch, [row])
    # Values are 2, 3 and 5 before the three actions. The position between the turns is skipped.
    assert estimated.for_critic[0].columns["returns"].tolist() == [0, 1.5, 1.5, 0, 1.0]
    assert estimated.for_policy[0].columns["advantages"].tolist() == [0, -0.5, -1.5, 0, -4.0]


def test_the_kl_penalty_is_subtracted_from_the_reward_of_every_sampled_token():
    batch = batch_of(1.0, 0.5)

    async def logprobs(samples):
        return [torch.full((len(sample),), -0.75) for sample in samples]

    config = replace(tiny_ppo(), reference_kl=0.3, reference_kl_in="reward")
    kl = KL(coefficient=0.1, estimator="k1")  # a step's coefficient may differ from reference_kl
    reference = SimpleNamespace(logprobs=logprobs)
    rows, measured = asyncio.run(token_rewards(config, batch, batch.samples, reference, kl))
    # The policy's logprob is 0.25 above the reference's at each token of the completion. Tokens of the prompt have the
    # old logprob 0, but they are not actions, so nothing is subtracted at these tokens.
    assert rows[0].tolist() == pytest.approx([0, 1 - 0.025]) and rows[1].tolist() == pytest.approx([0, -0.025, 0.475])
    assert measured == {"kl/reference": pytest.approx(0.25)}


def test_the_loss_takes_the_kl_coefficient_of_kl_control_and_a_kl_target_needs_a_reference_kl_above_0():
    config = replace(tiny_ppo(), reference_kl=0.3)
    assert config.make_loss().kl == KL(coefficient=0.3, estimator="k3")
    # Without a target, next_kl does not change the coefficient.
    moved = config.kl_control.next_kl(config.kl(), 5.0)
    assert config.make_loss(moved).kl == KL(coefficient=0.3, estimator="k3")
    config.kl_control.target = 0.01
    assert config.make_loss(config.kl_control.next_kl(config.kl(), 5.0)).kl.coefficient == pytest.approx(0.306)
    config.validate()
    config.reference_kl = 0.0
    with pytest.raises(ValueError, match="kl_control.target=0.01 with reference_kl=0"):
        config.validate()


def test_the_critic_gives_advantages_returns_and_old_values_at_the_actions():
    batch = batch_of(1.0, 0.5)
    rewards = rewards_of(batch)
    estimated = judged_by(critic(), batch, rewards)
    # The state at position i has i + 1 tokens, so its value is i + 1. After the first sample's end the value is 0. The
    # second sample was cut off, so its returns contain the value 4 of the state after its last token.
    assert [sample.columns["returns"].tolist() for sample in estimated.for_critic] == [[0, 1.0], [0, 4.5, 4.5]]
    assert [sample.columns["advantages"].tolist() for sample in estimated.for_policy] == [[0, -1.0], [0, 2.5, 1.5]]
    assert estimated.for_critic[1].columns["old_values"].tolist() == [1, 2, 3]
    ended = judged_by(critic(bootstrap=False), batch, rewards)
    assert ended.for_critic[1].columns["returns"].tolist() == [0, 0.5, 0.5]
    whitened = judged_by(critic(whiten=True), batch, rewards)
    actions = torch.tensor([-1.0, 2.5, 1.5])
    found = torch.cat([sample.columns["advantages"][1:] for sample in whitened.for_policy])
    torch.testing.assert_close(found, (actions - actions.mean()) / actions.std())


def test_every_epoch_shuffles_all_samples_into_minibatches_that_depend_on_the_seed_and_the_step():
    config = replace(tiny_ppo(), updates_per_step=3, epochs_per_step=2)
    samples = [Sample.from_tokens([index], [1]) for index in range(8)]

    def orders(step: int, seed: int = 0) -> list[list[int]]:
        parts = minibatches(replace(config, seed=seed), samples, step)
        return [[int(sample.tokens[0]) for sample in part] for part in parts]

    parts = orders(5)
    assert [len(part) for part in parts] == [3, 3, 2, 3, 3, 2]
    first, second = sum(parts[:3], []), sum(parts[3:], [])
    assert sorted(first) == sorted(second) == list(range(8)) and first != second
    assert orders(5) == parts and orders(6) != parts and orders(5, seed=1) != parts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollouts": RolloutConfig(group_size=2)}, "rollouts.advantage='grpo'; PPO needs 'gae'"),
        ({"rollouts": RolloutConfig(group_size=1)}, "PPO needs 'gae'. A preset of --algorithm sets another rule"),
        ({"critic": CriticConfig(clip=0.0)}, "critic.clip=0.0; it must be positive and finite"),
        ({"critic": CriticConfig(warmup_steps=-1)}, "critic.warmup_steps=-1; it must be at least 0"),
        ({"gae": GAEConfig(gamma=2.0)}, r"gae.gamma=2.0; it must be in \[0, 1\]"),
    ],
)
def test_wrong_values_are_refused_and_the_error_names_the_field(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(tiny_ppo(), **fields).validate()


def test_only_ppo_takes_advantages_from_a_value_model():
    from configs.tiny import tiny

    with pytest.raises(
        ValueError, match="rollouts.advantage='gae' needs a value model; python -m controllers.ppo has one"
    ):
        replace(tiny(), rollouts=RolloutConfig(advantage="gae", group_size=1)).validate()
    tiny_ppo().validate()


def test_a_max_model_len_above_the_longest_sequence_that_the_critic_can_read_is_refused():
    config = tiny_ppo()
    config.validate()
    config.generator.max_model_len += 1
    with pytest.raises(ValueError, match="generator.max_model_len=65 exceeds trainer.max_sequence_length=64"):
        config.validate()
