"""The plan of a call has a number of microbatches that torch's pipeline schedule accepts, for any number of samples."""

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from rl_actors.engine.packing import Planner
from rl_actors.engine.pipeline import plan_options


def num_microbatches(schedule: str, num_ranks: int, num_samples: int) -> int:
    """The number of microbatches of a call in which each sample fills one microbatch."""
    options = plan_options(get_schedule_class(schedule), num_ranks)
    limits = {"tokens_per_row": 64, "rows_per_microbatch": 1, "row_multiple": 64, "num_ranks": 1}
    [microbatches] = Planner(**limits, **options).plan([64] * num_samples)
    return len(microbatches)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_for_interleaved_stages_the_plan_pads_up_to_a_multiple_of_the_number_of_ranks(num_ranks):
    for num_samples in range(1, 3 * num_ranks + 1):
        rounds = -(-num_samples // num_ranks)
        assert num_microbatches("Interleaved1F1B", num_ranks, num_samples) == rounds * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_with_one_stage_per_rank_the_plan_pads_only_up_to_one_microbatch_per_rank(num_ranks):
    for num_samples in range(1, 3 * num_ranks + 1):
        assert num_microbatches("1F1B", num_ranks, num_samples) == max(num_ranks, num_samples)
