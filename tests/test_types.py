"""Tests of Sample.from_tokens, of pickled samples, and of num_loss_tokens.

Sample.from_tokens is the only code in the project that shifts tokens to get targets.
"""

import pickle

import pytest
import torch

from rl_actors.types import Sample, SampleList, num_loss_tokens


def assert_equal(a: Sample, b: Sample):
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets)
    assert a.temperature == b.temperature
    assert a.columns.keys() == b.columns.keys()
    assert all(torch.equal(a.columns[name], b.columns[name]) for name in a.columns)


def test_from_tokens_shifts_the_targets_by_one_token():
    sample = Sample.from_tokens([5, 6], [7, 8])
    assert sample.tokens.tolist() == [5, 6, 7]
    assert sample.targets.tolist() == [6, 7, 8]
    assert sample.tokens.dtype == sample.targets.dtype == torch.int64
    assert len(sample) == 3


def test_from_tokens_puts_a_column_on_the_completion_and_0_on_the_prompt():
    sample = Sample.from_tokens([5, 6, 7], [8, 9], advantages=2.0, old_logprobs=[-1.0, -2.0])
    assert sample.columns["advantages"].tolist() == [0, 0, 2, 2]
    assert sample.columns["old_logprobs"].tolist() == [0, 0, -1, -2]
    assert sample.columns["loss_weights"].tolist() == [0, 0, 1, 1]
    assert all(column.dtype == torch.float32 for column in sample.columns.values())


def test_from_tokens_takes_tensors_and_the_callers_loss_weights():
    column = torch.tensor([3, 4])
    sample = Sample.from_tokens(torch.tensor([1, 2]), torch.tensor([3, 4]), loss_weights=[0.0, 1.0], values=column)
    assert sample.tokens.tolist() == [1, 2, 3]
    assert sample.columns["loss_weights"].tolist() == [0, 0, 1]
    assert sample.columns["values"].tolist() == [0, 3, 4]


def test_masking_a_target_changes_no_token():
    sample = Sample.from_tokens([5, 6], [7, 8])
    sample.targets[0] = -100
    assert sample.tokens.tolist() == [5, 6, 7]


def test_from_tokens_keeps_the_temperature():
    assert Sample.from_tokens([1], [2]).temperature == 1.0
    assert Sample.from_tokens([1], [2], temperature=0.6).temperature == 0.6


@pytest.mark.parametrize(
    "prompt, completion, words", [([], [1, 2], "prompt has 0 "), ([1], [], "completion has 0; both need")]
)
def test_from_tokens_refuses_an_empty_prompt_or_completion(prompt, completion, words):
    with pytest.raises(ValueError, match=words):
        Sample.from_tokens(prompt, completion)


@pytest.mark.parametrize("column", [[1.0], [1.0, 2.0, 3.0], [[1.0, 2.0]]], ids=["short", "long", "matrix"])
def test_from_tokens_refuses_a_column_of_a_wrong_shape(column):
    with pytest.raises(ValueError, match=r"column 'advantages' has shape \(.*\), but the completion has 2 tokens"):
        Sample.from_tokens([1], [2, 3], advantages=column)


def test_a_pickled_sample_comes_back_equal():
    sample = Sample.from_tokens([5, 6], [7, 8], advantages=[0.5, -0.25], temperature=0.8)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert_equal(pickle.loads(pickle.dumps(sample, protocol)), sample)


def test_a_column_that_requires_a_gradient_is_pickled_as_its_values():
    column = torch.ones(1, requires_grad=True)
    sample = Sample(tokens=torch.tensor([1]), targets=torch.tensor([2]), columns={"values": column})
    assert pickle.loads(pickle.dumps(sample)).columns["values"].tolist() == [1.0]


def test_num_loss_tokens_counts_positions_whose_weight_is_not_0():
    samples = [Sample.from_tokens([1], [2, 3]), Sample.from_tokens([1], [2, 3], loss_weights=[0.5, 0.0])]
    assert num_loss_tokens(samples) == 3.0


def test_num_loss_tokens_counts_no_position_without_a_target():
    sample = Sample.from_tokens([1], [2, 3, 4])
    sample.targets[1] = -100
    assert num_loss_tokens([sample]) == 2.0


def test_a_pickled_list_of_samples_comes_back_equal_also_if_their_columns_differ():
    alike = [Sample.from_tokens([1, 2], [3] * n, advantages=float(n), temperature=n / 2) for n in (1, 3, 2)]
    for samples in (alike, [*alike, Sample.from_tokens([4], [5])], []):
        arrived = pickle.loads(pickle.dumps(SampleList(samples)))
        assert len(arrived) == len(samples)
        for a, b in zip(arrived, samples, strict=True):
            assert torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets)
            assert a.temperature == b.temperature and a.columns.keys() == b.columns.keys()
            assert all(torch.equal(a.columns[name], b.columns[name]) for name in a.columns)


def test_top_k_targets_have_k_numbers_for_each_position_and_come_back_equal_from_a_pickle():
    def sample(n):
        return Sample.from_tokens([1, 2], [3] * n, target_ids=[[4, 5, 6]] * n, target_weights=[[0.5, 0.25, -1.0]] * n)

    assert sample(2).columns["target_ids"].tolist() == [[0, 0, 0], [4, 5, 6], [4, 5, 6]]
    assert sample(2).columns["target_ids"].dtype == torch.int64
    assert sample(2).columns["target_weights"].dtype == torch.float32
    samples = [sample(n) for n in (1, 3, 2)]
    assert_equal(pickle.loads(pickle.dumps(samples[1])), samples[1])
    for arrived, sent in zip(pickle.loads(pickle.dumps(SampleList(samples))), samples, strict=True):
        assert_equal(arrived, sent)


@pytest.mark.parametrize("column", [1.0, [1, 2], [[1, 2]]], ids=["number", "row", "short"])
def test_top_k_targets_of_a_wrong_shape_are_refused(column):
    with pytest.raises(ValueError, match="column 'target_ids' has shape .*, but the completion has 2 tokens"):
        Sample.from_tokens([1], [2, 3], target_ids=column)
