"""Compares advantages and returns with sums over the actions, which plain Python computes in float64."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from controllers.algorithms.gae import GAEConfig, estimate, whiten
from rl_actors.field_types import require_field_types

NUMBER = st.floats(-3, 3)
FACTOR = st.floats(0, 1)


@st.composite
def sequences(draw):
    """(values, rewards, is_action, last value) of one sequence."""
    length = draw(st.integers(1, 9))
    numbers = st.lists(NUMBER, min_size=length, max_size=length)
    is_action = draw(st.lists(st.booleans(), min_size=length, max_size=length).filter(any))
    return draw(numbers), draw(numbers), is_action, draw(NUMBER)


def summed(values, rewards, is_action, last_value, gamma, factor) -> list[float]:
    """sum_k (gamma * factor)^k (r_{a+k} + gamma V_{a+k+1} - V_{a+k}) at the position of the a-th action, 0 at other
    positions.

    r_a is the reward and V_a the value at the a-th action. After the last action, V is last_value. factor is λ.
    """
    actions = [index for index, is_one in enumerate(is_action) if is_one]
    following = [values[index] for index in actions[1:]] + [last_value]
    deltas = []
    for index, next_value in zip(actions, following, strict=True):
        deltas.append(rewards[index] + gamma * next_value - values[index])
    found = [0.0] * len(values)
    for place, index in enumerate(actions):
        found[index] = sum((gamma * factor) ** k * delta for k, delta in enumerate(deltas[place:]))
    return found


def run(batch, config: GAEConfig):
    values, rewards, is_action, last_values = zip(*batch, strict=True)
    as_tensors = [[torch.tensor(row, dtype=torch.float64) for row in rows] for rows in (values, rewards)]
    return estimate(*as_tensors, [torch.tensor(row) for row in is_action], last_values, config)


@settings(deadline=None, max_examples=150)
@given(st.lists(sequences(), min_size=1, max_size=4), FACTOR, FACTOR, FACTOR)
def test_advantages_and_returns_are_the_sums_over_the_actions(batch, gamma, actor_lambda, critic_lambda):
    config = GAEConfig(gamma=gamma, actor_lambda=actor_lambda, critic_lambda=critic_lambda)
    advantages, returns = run(batch, config)
    for (values, rewards, is_action, last), advantage, found in zip(batch, advantages, returns, strict=True):
        expected = summed(values, rewards, is_action, last, gamma, actor_lambda)
        assert advantage.tolist() == pytest.approx(expected, abs=1e-12)
        of_critic = summed(values, rewards, is_action, last, gamma, critic_lambda)
        for index, is_one in enumerate(is_action):
            wanted = values[index] + of_critic[index] if is_one else 0.0
            assert found[index].item() == pytest.approx(wanted, abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(st.lists(sequences(), min_size=1, max_size=4))
def test_numbers_at_positions_without_an_action_are_not_read(batch):
    spoiled = []
    for values, rewards, is_action, last in batch:
        keep = [(value if is_one else math.nan) for value, is_one in zip(values, is_action, strict=True)]
        keep_rewards = [(reward if is_one else math.inf) for reward, is_one in zip(rewards, is_action, strict=True)]
        spoiled.append((keep, keep_rewards, is_action, last))
    for plain, with_nan in zip(run(batch, GAEConfig()), run(spoiled, GAEConfig()), strict=True):
        for one, other in zip(plain, with_nan, strict=True):
            assert torch.equal(one, other) and one.isfinite().all()
    is_action = [torch.tensor(row[2]) for row in batch]
    whitened = whiten([torch.tensor(row[0]) for row in spoiled], is_action)
    assert all(row.isfinite().all() for row in whitened)


def test_with_lambda_1_the_returns_are_the_discounted_sums_of_the_rewards():
    rewards, is_action = [0.0, 1.0, 0.0, 2.0], [True, True, False, True]
    for values in ([0.3, -0.2, 9.0, 0.7], [0.0] * 4):
        _, [returns] = run([(values, rewards, is_action, 0.0)], GAEConfig(gamma=0.5, critic_lambda=1.0))
        assert returns.tolist() == pytest.approx([0.5 * 1 + 0.25 * 2, 1 + 0.5 * 2, 0.0, 2.0])


def test_the_value_of_the_last_state_stands_for_the_missing_rewards_of_a_sequence_that_was_cut_off():
    ended, cut_off = ([0.5], [0.0], [True], 0.0), ([0.5], [0.0], [True], 0.75)
    advantages, returns = run([ended, cut_off], GAEConfig(gamma=0.8))
    assert [row.item() for row in advantages] == pytest.approx([-0.5, 0.8 * 0.75 - 0.5])
    assert [row.item() for row in returns] == pytest.approx([0.0, 0.8 * 0.75])


@pytest.mark.parametrize("length, expected", [(10, 0.0), (20, 0.0), (40, 0.5), (200, 0.9)])
def test_an_adaptive_lambda_is_larger_for_a_longer_sequence(length, expected):
    config = GAEConfig(length_adaptive=0.05)
    assert config.actor_lambdas(torch.tensor([length])).item() == pytest.approx(expected)
    values, rewards = [0.1] * length, [0.0] * (length - 1) + [1.0]
    [advantages], _ = run([(values, rewards, [True] * length, 0.0)], config)
    assert advantages[0].item() == pytest.approx(summed(values, rewards, [True] * length, 0.0, 1.0, expected)[0])


@settings(deadline=None, max_examples=50)
@given(st.lists(sequences(), min_size=1, max_size=4))
def test_whitened_numbers_have_mean_0_and_standard_deviation_1_over_the_whole_batch(batch):
    rows = [torch.tensor(row[0], dtype=torch.float64) for row in batch]
    is_action = [torch.tensor(row[2]) for row in batch]
    flat = [value for row in batch for value, is_one in zip(row[0], row[2], strict=True) if is_one]
    mean, std = statistics.fmean(flat), statistics.stdev(flat) if len(flat) > 1 else 0.0
    for row, mask, found in zip(rows, is_action, whiten(rows, is_action), strict=True):
        expected = torch.where(mask, (row - mean) / (std + 1e-8), 0.0)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-6)


def test_an_error_names_wrong_lengths_and_sequences_without_an_action():
    row, mask = torch.ones(3), torch.ones(3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"the numbers of sequences differ: .* last_values have \[1, 1, 1, 2\]"):
        estimate([row], [row], [mask], [0.0, 0.0], GAEConfig())
    with pytest.raises(ValueError, match=r"the lengths of sequence 1 differ: .* have \[3, 2, 3\]"):
        estimate([row, row], [row, row[:2]], [mask, mask], [0.0, 0.0], GAEConfig())
    with pytest.raises(ValueError, match="sequence 0 of 3 positions has no action"):
        estimate([row], [row], [~mask], [0.0], GAEConfig())
    assert estimate([], [], [], [], GAEConfig()) == ([], []) and whiten([], []) == []


@pytest.mark.parametrize("fields", [{"gamma": 1.1}, {"actor_lambda": -0.1}, {"critic_lambda": math.nan}])
def test_factors_outside_0_to_1_are_refused(fields):
    with pytest.raises(ValueError, match=rf"gae\.{next(iter(fields))}=.*must be (in \[0, 1\]|a number)"):
        require_field_types(GAEConfig(**fields), "gae.")
    with pytest.raises(ValueError, match=r"gae\.length_adaptive=-1"):
        require_field_types(GAEConfig(length_adaptive=-1), "gae.")
