"""Tests of KL control: the penalty in the rewards of tokens, and the rule that changes the penalty's coefficient.

The expected values are plain Python sums in float64.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from controllers.algorithms.kl_control import KLControlConfig, mean_divergence, penalised_rewards
from rl_actors import KL
from rl_actors.field_types import require_field_types

ESTIMATES = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}
LOGPROB = st.floats(-4, 0)


@st.composite
def sequences(draw):
    """Draws (rewards, logprobs, logprobs of the reference, is_action) of one sequence.

    Each of the four has one value per token.
    """
    length = draw(st.integers(1, 8))
    rows = [draw(st.lists(number, min_size=length, max_size=length)) for number in (st.floats(-2, 2), LOGPROB, LOGPROB)]
    is_action = draw(st.lists(st.booleans(), min_size=length, max_size=length).filter(any))
    return *rows, is_action


def columns(batch, fill: float | None = None) -> list[list[torch.Tensor]]:
    """Four lists with one tensor for each sequence: rewards, logprobs, logprobs of the reference, is_action.

    fill: replaces the numbers at every position that is not an action. None: the numbers stay.
    """
    found: list[list[torch.Tensor]] = [[], [], [], []]
    for *numbers, is_action in batch:
        action_T = torch.tensor(is_action)
        for rows, row in zip(found, numbers, strict=False):
            tensor = torch.tensor(row, dtype=torch.float64)
            rows.append(tensor if fill is None else torch.where(action_T, tensor, fill))
        found[3].append(action_T)
    return found


@settings(deadline=None, max_examples=60)
@given(st.lists(sequences(), min_size=1, max_size=3), st.sampled_from(sorted(ESTIMATES)), st.floats(0, 2))
def test_the_penalty_of_every_action_is_the_coefficient_times_the_estimate_at_that_action(
    batch, estimator, coefficient
):
    kl = KL(coefficient=coefficient, estimator=estimator)
    rows = columns(batch)
    estimates = []
    for (rewards, logprobs, references, is_action), found in zip(batch, penalised_rewards(*rows, kl), strict=True):
        expected = []
        for reward, logprob, reference, is_one in zip(rewards, logprobs, references, is_action, strict=True):
            divergence = ESTIMATES[estimator](logprob - reference)
            estimates += [divergence] if is_one else []
            expected.append(reward - coefficient * divergence if is_one else 0.0)
        assert found.tolist() == pytest.approx(expected, abs=1e-12)
    mean = math.fsum(estimates) / len(estimates)
    assert mean_divergence(*rows[1:], kl) == pytest.approx(mean, abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(st.lists(sequences(), min_size=1, max_size=3), st.sampled_from(sorted(ESTIMATES)))
def test_nan_at_positions_that_are_not_actions_changes_neither_rewards_nor_mean(batch, estimator):
    kl = KL(coefficient=0.5, estimator=estimator)
    plain, broken = columns(batch), columns(batch, fill=math.nan)
    for expected, found in zip(penalised_rewards(*plain, kl), penalised_rewards(*broken, kl), strict=True):
        assert torch.equal(expected, found)
    assert mean_divergence(*plain[1:], kl) == mean_divergence(*broken[1:], kl)


def test_the_mean_over_sequences_without_an_action_is_an_error():
    row = torch.zeros(3)
    with pytest.raises(ValueError, match="1 sequences have no action"):
        mean_divergence([row], [row], [torch.zeros(3, dtype=torch.bool)], KL(coefficient=1.0))


@given(st.floats(1e-3, 10), st.floats(-1, 10), st.floats(1e-3, 1))
def test_the_coefficient_follows_the_rule_of_the_paper(coefficient, divergence, target):
    """The paper is arXiv 1909.08593. Its gain 0.1 and its limit 0.2 for the error are KLControlConfig's defaults."""
    config = KLControlConfig(target=target)
    error = divergence / target - 1
    error = 0.2 if error > 0.2 else -0.2 if error < -0.2 else error
    expected = coefficient + coefficient * 0.1 * error
    assert config.next_kl(KL(coefficient=coefficient), divergence).coefficient == pytest.approx(expected, rel=1e-12)


def test_without_a_target_the_coefficient_does_not_change():
    assert KLControlConfig().next_kl(KL(coefficient=0.3), 5.0).coefficient == 0.3


def test_the_coefficient_converges_to_the_value_at_which_the_divergence_is_the_target():
    """The policy's divergence is 0.03 / (1 + coefficient), so it is at the target 0.01 when the coefficient is 2."""
    config = KLControlConfig(target=0.01, gain=0.5)
    for start in (1e-2, 100.0):
        coefficient = start
        for _ in range(200):
            coefficient = config.next_kl(KL(coefficient=coefficient), 0.03 / (1 + coefficient)).coefficient
        assert coefficient == pytest.approx(2.0, rel=1e-3)


def test_the_examples_in_the_docstrings_are_right():
    config = KLControlConfig(target=0.01)
    assert config.next_kl(KL(coefficient=1.0), 0.02).coefficient == pytest.approx(1.02)
    assert config.next_kl(KL(coefficient=1.0), 0.009).coefficient == pytest.approx(0.99)
    rows = [torch.tensor([row]).double()[0] for row in ([0.0, 1.0], [-0.5, -1.0], [-1.0, -1.0])]
    [found] = penalised_rewards(*([row] for row in rows), [torch.ones(2)], KL(coefficient=0.1, estimator="k1"))
    assert found.tolist() == pytest.approx([-0.05, 1.0])


def test_a_nan_divergence_is_an_error():
    with pytest.raises(ValueError, match="reference is NaN"):
        KLControlConfig(target=0.1).next_kl(KL(coefficient=1.0), math.nan)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"target": 0.0}, "kl_control.target=0.0; it must be positive and finite"),
        ({"target": math.inf}, "kl_control.target=inf"),
        ({"gain": -0.1}, "kl_control.gain=-0.1"),
        ({"gain": 5.0, "max_error": 0.2}, "is 1; it must be below 1"),
    ],
)
def test_a_config_with_an_impossible_target_gain_or_max_error_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        config = KLControlConfig(**options)
        require_field_types(config, "kl_control.")
        config.validate()
