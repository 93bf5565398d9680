"""The rows into which the engine puts the samples of a call, for each value of `TrainerConfig.packing`."""

from collections import Counter

import pytest
from references import random_samples


@pytest.mark.parametrize(
    ("packing", "samples_per_row"),  # for every microbatch, the number of samples in each of its rows
    [
        ("packed", [[4]]),
        # Each of the four samples gets its own row. The length of a row is a multiple of 64, so these rows have 64 positions. A microbatch may
        # have rows_per_microbatch * tokens_per_row = 2 * 256 positions, so all four rows fit into one microbatch.
        ("token_budget", [[1, 1, 1, 1]]),
        ("fixed", [[1, 1], [1, 1]]),
    ],
)
def test_a_call_is_packed_as_the_config_says(make_engine, packing, samples_per_row):
    engine = make_engine(packing=packing, tokens_per_row=256, rows_per_microbatch=2)
    found = []
    for batch in engine._batches(random_samples([9, 10, 11, 12]), ()):
        rows = Counter(row for _, row, _, _ in batch.spans)
        found.append([rows[row] for row in range(len(batch.tokens_BL))])
    assert found == samples_per_row
