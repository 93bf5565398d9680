"""The plan of a call, over generated sample lengths and limits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_actors.engine.packing import Microbatch, first_fit_decreasing, plan


@st.composite
def calls(draw):
    """Arguments of `plan`; capacities of 1 to 300 positions and multiples that divide tokens_per_row or do not."""
    multiple = draw(st.sampled_from([1, 7, 64, 128]))
    tokens_per_row = draw(st.integers(multiple, 300))
    lengths = draw(st.lists(st.integers(1, tokens_per_row // multiple * multiple), min_size=1, max_size=60))
    limits = {"rows_per_microbatch": draw(st.integers(1, 5)), "num_ranks": draw(st.integers(1, 5))}
    return lengths, {
        "tokens_per_row": tokens_per_row,
        "row_multiple": multiple,
        "uniform": draw(st.booleans()),
        **limits,
    }


plans = settings(derandomize=True, deadline=None, max_examples=300)


@plans
@given(calls())
def test_every_sample_appears_exactly_once(call):
    lengths, limits = call
    placed = [index for rank in plan(lengths, **limits) for batch in rank for row in batch.rows for index in row]
    assert sorted(placed) == list(range(len(lengths)))


@plans
@given(calls())
def test_no_row_holds_more_than_its_length_nor_is_longer_than_tokens_per_row(call):
    lengths, limits = call
    for rank in plan(lengths, **limits):
        for batch in rank:
            assert batch.row_length <= limits["tokens_per_row"]
            assert all(sum(lengths[index] for index in row) <= batch.row_length for row in batch.rows)


@plans
@given(calls())
def test_all_ranks_get_the_same_number_of_microbatches_of_equal_shapes(call):
    lengths, limits = call
    ranks = plan(lengths, **limits)
    shapes = [[(len(batch.rows), batch.row_length) for batch in rank] for rank in ranks]
    assert len(ranks) == limits["num_ranks"]
    assert all(shape == shapes[0] for shape in shapes)
    assert all(1 <= num_rows <= limits["rows_per_microbatch"] for num_rows, _ in shapes[0])


@plans
@given(calls())
def test_row_lengths_are_multiples(call):
    lengths, limits = call
    assert all(batch.row_length % limits["row_multiple"] == 0 for batch in plan(lengths, **limits)[0])


@plans
@given(calls())
def test_uniform_microbatches_have_one_shape(call):
    lengths, limits = call
    (rank, *_) = plan(lengths, **{**limits, "uniform": True})
    assert len({(len(batch.rows), batch.row_length) for batch in rank}) == 1


@plans
@given(calls())
def test_at_most_one_row_is_filled_to_half_or_less(call):
    lengths, limits = call
    rows = first_fit_decreasing(lengths, limits["tokens_per_row"])
    assert sum(2 * sum(lengths[index] for index in row) <= limits["tokens_per_row"] for row in rows) <= 1


@plans
@given(calls())
def test_rows_are_those_of_the_naive_first_fit_decreasing(call):
    lengths, limits = call
    naive: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = (row for row in naive if sum(lengths[i] for i in row) + lengths[index] <= limits["tokens_per_row"])
        row = next(fits, None)
        if row is None:
            naive.append([index])
        else:
            row.append(index)
    found = first_fit_decreasing(lengths, limits["tokens_per_row"])
    assert sorted(found) == sorted(tuple(row) for row in naive)


def test_worked_example_of_the_docstring():
    rank0, rank1 = plan([3, 2, 4], tokens_per_row=5, row_multiple=1, rows_per_microbatch=1, num_ranks=2)
    assert rank0 == [Microbatch(rows=((0, 1),), row_length=5)]
    assert rank1 == [Microbatch(rows=((2,),), row_length=5)]


def test_a_rank_without_samples_gets_rows_of_padding():
    ranks = plan([7], tokens_per_row=64, rows_per_microbatch=4, num_ranks=3)
    assert [rank[0].rows for rank in ranks] == [((0,),), ((),), ((),)]


def test_tokens_per_row_is_rounded_down_to_the_multiple():
    limits = {"tokens_per_row": 200, "rows_per_microbatch": 1, "num_ranks": 1}
    assert [batch.row_length for batch in plan([70, 64], row_multiple=64, **limits)[0]] == [192]
    message = "sample 1 has 193 positions but tokens_per_row=200, of which 192 are a multiple of 64"
    with pytest.raises(ValueError, match=message):
        plan([8, 193], row_multiple=64, **limits)


def test_a_sample_longer_than_a_row_is_refused_by_name():
    with pytest.raises(ValueError, match="sample 1 has 9 positions but tokens_per_row=8"):
        plan([8, 9], tokens_per_row=8, row_multiple=8, rows_per_microbatch=1, num_ranks=1)
