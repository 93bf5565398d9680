"""Tests of merge_outputs, which merges the outputs of all ranks into one output.

In the merged output the samples have the order in which the caller passed them.
"""

import pytest
import torch

from rl_actors.clients.conversion import merge_outputs
from rl_actors.types import RankOutput


def output_of(rank: int, indices: list[int], logprobs: list[float]) -> RankOutput:
    """The output of a rank that reports samples of one position each."""
    return RankOutput(
        rank=rank,
        indices=indices,
        lengths=[1] * len(indices),
        values={"logprobs": torch.tensor(logprobs)},
        metrics={"loss:sum": 1.0},
        policy_version=0,
    )


def test_merged_samples_have_the_order_of_the_call():
    merged = merge_outputs(3, [output_of(1, [2], [-3.0]), output_of(0, [1, 0], [-2.0, -1.0])])
    assert [logprobs.tolist() for logprobs in merged.logprobs] == [[-1.0], [-2.0], [-3.0]]


def test_a_sample_that_two_ranks_report_is_an_error_that_names_sample_and_ranks():
    outputs = [output_of(0, [0, 1], [-1.0, -2.0]), output_of(1, [1, 2], [-2.5, -3.0])]
    with pytest.raises(ValueError, match="sample 1 is reported twice: by rank 0 and by rank 1"):
        merge_outputs(3, outputs)


def test_a_sample_that_one_rank_reports_twice_is_an_error_that_names_sample_and_rank():
    with pytest.raises(ValueError, match="sample 0 is reported twice: by rank 2 and by rank 2"):
        merge_outputs(1, [output_of(2, [0, 0], [-1.0, -2.0])])
