"""Tests that make_batch puts the tokens, targets and columns of samples at the right positions.

A batch has B rows of L positions.
"""

import pytest
import torch

from rl_actors.engine.batch import make_batch
from rl_actors.engine.cpu import dense_mask
from rl_actors.engine.packing import Microbatch
from rl_actors.types import Sample


@pytest.fixture
def batch():
    """Two rows of 6 positions. The first row has the samples 2 and 0, and the second row has sample 1."""
    samples = [
        Sample.from_tokens([10], [11, 12], advantages=[0.1, 0.2]),
        Sample.from_tokens([20, 21], [22], advantages=0.5, temperature=0.7),
        Sample.from_tokens([30], [31, 32, 33], old_logprobs=[-1.0, -2.0, -3.0]),
    ]
    microbatch = Microbatch(rows=((2, 0), (1,)), row_length=6)
    return make_batch(samples, microbatch, ["loss_weights", "advantages", "old_logprobs"])


def test_each_position_reads_a_token_and_predicts_the_next(batch):
    assert batch.tokens_BL.tolist() == [[30, 31, 32, 10, 11, 0], [20, 21, 0, 0, 0, 0]]
    assert batch.targets_BL.tolist() == [[31, 32, 33, 11, 12, -100], [21, 22, -100, -100, -100, -100]]


def test_columns_land_at_the_positions_of_their_targets(batch):
    expected = {
        "advantages": [[0, 0, 0, 0.1, 0.2, 0], [0, 0.5, 0, 0, 0, 0]],
        "old_logprobs": [[-1, -2, -3, 0, 0, 0], [0] * 6],
        "loss_weights": [[1, 1, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0]],
    }
    assert batch.columns.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(batch.columns[name], torch.tensor(values, dtype=torch.float32)), name


def test_padding_has_ignored_targets_and_zeros_in_every_column(batch):
    padding_BL = batch.targets_BL == -100
    assert padding_BL.sum() == 5
    assert all((column[padding_BL] == 0).all() for column in batch.columns.values())


def test_position_ids_start_at_0_in_every_sample_and_are_0_at_padding(batch):
    assert batch.positions_BL.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0]]


def test_every_position_has_its_samples_temperature_and_padding_has_1(batch):
    assert torch.equal(batch.temperatures_BL, torch.tensor([[1.0] * 6, [0.7, 0.7, 1, 1, 1, 1]]))


def test_a_temperature_may_be_an_int():
    samples = [Sample.from_tokens([10], [11, 12], temperature=2)]
    batch = make_batch(samples, Microbatch(rows=((0,),), row_length=3), [])
    assert torch.equal(batch.temperatures_BL, torch.tensor([[2.0, 2.0, 1.0]]))


def test_spans_say_where_each_sample_is(batch):
    assert batch.spans == [(2, 0, 0, 3), (0, 0, 3, 5), (1, 1, 0, 2)]


def test_a_row_without_samples_is_all_padding():
    sample = Sample.from_tokens([1], [2])
    batch = make_batch([sample], Microbatch(rows=((0,), ()), row_length=3), ["loss_weights"])
    assert batch.targets_BL[1].tolist() == [-100] * 3
    assert batch.columns["loss_weights"][1].tolist() == [0.0] * 3


def test_a_batch_has_only_the_requested_columns():
    sample = Sample.from_tokens([1], [2], advantages=1.0)
    assert make_batch([sample], Microbatch(rows=((0,),), row_length=2), ()).columns == {}


def test_a_position_attends_only_to_itself_and_to_earlier_positions_of_its_sample(batch):
    row = dense_mask(batch.positions_BL)[0, 0].int().tolist()
    assert row == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
