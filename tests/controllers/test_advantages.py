"""Advantages, compared with numbers worked out by hand or by loops over plain floats.

Rewards and advantages have the shape [G, N], for G groups of N completions.
"""

import math
import statistics

import pytest
import torch

from controllers.rollouts.advantages import ADVANTAGES, dr_grpo, grpo, reinforce_plus_plus, rloo

REWARDS_GN = [[1.0, 0.0, 0.0, 0.5], [0.2, 0.9, 0.4, 0.4]]


def expect(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_grpo_divides_by_the_sample_standard_deviation_of_the_group():
    expected = []
    for group in REWARDS_GN:
        mean, deviation = statistics.mean(group), statistics.stdev(group)  # stdev has N - 1 degrees of freedom
        expected.append([(reward - mean) / (deviation + 1e-6) for reward in group])
    expect(grpo(torch.tensor(REWARDS_GN)), expected)


def test_dr_grpo_only_subtracts_the_mean():
    expect(dr_grpo(torch.tensor([[1.0, 0.0, 0.0, 1.0]])), [[0.5, -0.5, -0.5, 0.5]])


def test_rloo_subtracts_the_mean_of_the_other_rewards_of_the_group():
    expected = [[r - (sum(g) - r) / 3 for r in g] for g in REWARDS_GN]
    expect(rloo(torch.tensor(REWARDS_GN)), expected)


def test_reinforce_plus_plus_subtracts_the_group_mean_and_divides_by_the_deviation_of_the_batch():
    centered = [[r - statistics.mean(g) for r in g] for g in REWARDS_GN]
    std = statistics.stdev([a for g in centered for a in g])
    expect(reinforce_plus_plus(torch.tensor(REWARDS_GN)), [[a / (std + 1e-6) for a in g] for g in centered])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_of_equal_rewards_gets_advantages_near_zero(name):
    advantages = ADVANTAGES[name](torch.tensor([[0.1, 0.1, 0.1], [0.0, 1.0, 0.0]]))
    assert advantages[0].abs().max() < 1e-2 and advantages[1].abs().min() > 0.1
    assert math.isclose(advantages[1].sum().item(), 0.0, abs_tol=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_integer_rewards_are_accepted_and_bad_shapes_and_nan_are_refused(name):
    assert ADVANTAGES[name](torch.tensor([[1, 0]])).dtype == torch.float32
    with pytest.raises(ValueError, match=r"shape \(3,\); expected \[G, N\]"):
        ADVANTAGES[name](torch.zeros(3))
    with pytest.raises(ValueError, match=r"shape \(3, 1\).*N >= 2"):
        ADVANTAGES[name](torch.zeros(3, 1))
    with pytest.raises(ValueError, match="1 of 2 rewards are not finite"):
        ADVANTAGES[name](torch.tensor([[float("nan"), 0.0]]))


@pytest.mark.parametrize("rule", ADVANTAGES.values())
def test_differences_of_large_rewards_are_not_lost(rule):
    small = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    assert rule(small + 1e8).tolist() == rule(small).tolist() != [[0.0] * 4]


def test_an_advantage_that_float32_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="an advantage of 5e\\+38 is not finite in float32"):
        dr_grpo(torch.tensor([[1e39, 0.0]], dtype=torch.float64))
