"""Learning rates of the schedules, compared with values worked out by hand."""

import pytest

from controllers.algorithms.schedules import ScheduleConfig


def test_constant_is_constant_after_its_warmup():
    rate = ScheduleConfig(kind="constant", learning_rate=2.0).build(10)
    assert [rate(step) for step in (1, 5, 10**6)] == [2.0, 2.0, 2.0]
    rate = ScheduleConfig(kind="constant", learning_rate=2.0, warmup_steps=4).build(10)
    assert [rate(step) for step in range(1, 7)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_decay_reaches_the_minimum_after_total_steps_and_stays_there():
    rate = ScheduleConfig(kind="linear_warmup_linear", learning_rate=1.0, warmup_steps=2, min_ratio=0.2).build(6)
    assert [rate(step) for step in range(1, 9)] == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_halfway_through_a_cosine_decay_the_rate_is_the_mean_of_the_highest_and_the_lowest():
    rate = ScheduleConfig(kind="linear_warmup_cosine", learning_rate=3.0, warmup_steps=10, min_ratio=0.1).build(110)
    assert [rate(step) for step in (1, 10, 11, 61, 111, 501)] == pytest.approx([0.3, 3.0, 3.0, 1.65, 0.3, 0.3])
    assert rate(36) == pytest.approx(3 * (0.1 + 0.9 * (1 + 2**-0.5) / 2))


def test_no_step_of_a_run_has_rate_zero():
    for kind in ("constant", "linear_warmup_cosine", "linear_warmup_linear"):
        rate = ScheduleConfig(kind=kind, learning_rate=1.0, warmup_steps=3).build(20)
        assert min(rate(step) for step in range(1, 21)) > 0


def test_a_schedule_is_stateless():
    rate = ScheduleConfig(kind="linear_warmup_cosine", learning_rate=1.0, warmup_steps=3).build(20)
    forwards = [rate(step) for step in range(20)]
    assert [rate(step) for step in reversed(range(20))] == forwards[::-1]


def test_the_decay_ends_with_the_run_unless_the_config_sets_total_steps():
    config = ScheduleConfig(kind="linear_warmup_linear", learning_rate=1.0, total_steps=4)
    assert [config.build(100)(step) for step in range(1, 6)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    config.total_steps = None
    assert config.build(100)(51) == 0.5


def test_a_run_shorter_than_its_warmup_only_warms_up():
    rate = ScheduleConfig(kind="linear_warmup_cosine", learning_rate=1.0, warmup_steps=10).build(5)
    assert [rate(step) for step in range(1, 6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"learning_rate": -1e-3}, "learning_rate=-0.001; it must be finite and at least 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"warmup_steps": -1}, "warmup_steps=-1; it must be at least 0"),
        ({"min_ratio": 1.5}, "min_ratio=1.5; it must be in \\[0, 1\\]"),
        ({"total_steps": 5, "warmup_steps": 5}, "total_steps=5 must exceed warmup_steps=5"),
    ],
)
def test_values_out_of_range_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**fields).build(10)
