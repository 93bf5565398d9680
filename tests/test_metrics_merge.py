"""Tests of partials, the form in which metrics are merged. Partials that are merged in any order give the same metrics."""

import math
from itertools import permutations

import pytest
import torch

from rl_actors.metrics import PartialsCopy, finish, merge

PARTS = [
    {"a:sum": 1.0, "b:mean": (2.0, 4.0), "c:max": -5.0, "d:min": 3.0},
    {"a:sum": 2.5, "b:mean": (1.0, 1.0), "c:max": -7.0, "d:min": -1.0},
    {"a:sum": -4.0, "b:mean": (0.0, 3.0), "c:max": -6.0, "d:min": 2.0, "e:sum": 9.0},
    {},
]
MERGED = {"a:sum": -0.5, "b:mean": (3.0, 8.0), "c:max": -5.0, "d:min": -1.0, "e:sum": 9.0}


def test_merge_adds_sums_numerators_and_denominators_and_keeps_extremes():
    assert merge(PARTS) == MERGED


def test_merge_does_not_depend_on_the_order():
    assert all(merge(order) == MERGED for order in permutations(PARTS))


def test_merge_does_not_depend_on_the_grouping():
    assert merge([merge(PARTS[:2]), merge(PARTS[2:])]) == MERGED


def test_merge_does_not_change_its_arguments():
    parts = [dict(part) for part in PARTS]
    merge(parts)
    assert parts == PARTS


@pytest.mark.parametrize("name", ["a:max", "a:min"])
def test_an_extreme_is_nan_if_one_value_is_nan_in_any_order(name):
    for values in permutations([1.0, math.nan, 2.0]):
        assert math.isnan(merge({name: value} for value in values)[name])
        assert math.isnan(merge({name: torch.tensor(value)} for value in values)[name])


def test_scalar_tensors_merge_like_numbers():
    def tensors(part):
        return {n: tuple(map(torch.tensor, v)) if isinstance(v, tuple) else torch.tensor(v) for n, v in part.items()}

    assert PartialsCopy(merge(tensors(part) for part in PARTS)).wait() == MERGED
    assert PartialsCopy({}).wait() == {}


@pytest.mark.parametrize("name, merged", [("a:max", 2.0), ("a:min", 1.0), ("a:sum", 3.0)])
def test_a_tensor_and_a_number_merge_in_any_order(name, merged):
    values = [torch.tensor(1.0), 2.0]
    for order in (values, values[::-1]):
        assert merge({name: value} for value in order)[name].item() == merged
    for order in ([torch.tensor(2.0), math.nan], [math.nan, torch.tensor(2.0)]):
        assert math.isnan(merge({name: value} for value in order)[name])


def test_numbers_merge_in_double_precision():
    assert merge([{"a:max": 1 + 1e-12}, {"a:max": 1.0}])["a:max"] == 1 + 1e-12


def test_finish_divides_means_and_a_mean_over_no_values_is_0():
    assert finish(MERGED) == {"a:sum": -0.5, "b:mean": 0.375, "c:max": -5.0, "d:min": -1.0, "e:sum": 9.0}
    assert finish({"a:mean": (0.0, 0.0)}) == {"a:mean": 0.0}


def test_an_extreme_over_no_values_is_0_and_does_not_change_other_extremes_in_a_merge():
    nothing = {"a:min": math.inf, "b:max": -math.inf}
    assert finish(nothing) == {"a:min": 0.0, "b:max": 0.0}
    assert finish(merge([nothing, {"a:min": 2.0, "b:max": -3.0}, nothing])) == {"a:min": 2.0, "b:max": -3.0}
    assert finish({"a:max": math.inf, "b:min": -math.inf}) == {"a:max": math.inf, "b:min": -math.inf}


@pytest.mark.parametrize("parts", [[{"loss": 1.0}], [{"loss": 1.0}, {"loss": 2.0}], [{"loss:median": 1.0}]])
def test_a_metric_without_a_known_reduction_is_refused_even_if_it_occurs_once(parts):
    with pytest.raises(ValueError, match="metric 'loss.*': the name must end in :sum, :mean, :max or :min"):
        merge(parts)
