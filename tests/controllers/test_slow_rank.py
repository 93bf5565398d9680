"""SlowRank compares the slowest rank with the other ranks, and names a rank that stays slow."""

from controllers.run.slow_rank import SlowRank


def lines(steps: list[list[float | None]]) -> list[str]:
    comparison = SlowRank()
    return [comparison.step(seconds)[1] for seconds in steps]


# Seconds of each of four ranks in one step.
SLOW, EVEN = [1.0, 1.2, 0.9, 2.1], [1.0, 1.0, 1.1, 1.2]


def test_the_slowest_rank_is_compared_with_the_median_of_the_others():
    metrics, _ = SlowRank().step(SLOW)
    assert metrics == {"ranks/slowest": 3, "ranks/slowest_ratio": 2.1}
    metrics, _ = SlowRank().step([0.5, 1.0])
    assert metrics == {"ranks/slowest": 1, "ranks/slowest_ratio": 2.0}


def test_a_slow_rank_is_named_after_three_slow_steps_in_a_row_and_its_recovery_is_printed_after_three_even_steps():
    slow = "rank 3 of the trainer is slow: 2.1 times the median of the other ranks, which wait for it"
    assert lines([SLOW, SLOW, EVEN, SLOW, SLOW, SLOW, SLOW]) == ["", "", "", "", "", slow, ""]
    over = "rank 3 of the trainer is no longer slow"
    assert lines([SLOW, SLOW, SLOW, EVEN, EVEN, EVEN, EVEN]) == ["", "", slow, "", "", over, ""]


def test_a_second_slow_rank_is_named_after_three_slow_steps_of_its_own():
    first = [2.0, 1.0, 1.0]
    found = lines([first] * 3 + [[1.0, 2.0, 1.0]] * 3)
    assert [line[:6] for line in found] == ["", "", "rank 0", "", "", "rank 1"]


def test_ranks_without_a_measurement_are_left_out():
    assert SlowRank().step([1.0]) == ({}, "")
    assert SlowRank().step([None, None]) == ({}, "")
    assert SlowRank().step([None, 1.0, 3.0])[0] == {"ranks/slowest": 2, "ranks/slowest_ratio": 3.0}
