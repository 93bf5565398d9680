"""Tests of `assemble`, which puts the shards of a published tensor together by their offsets."""

import pytest
import torch

from rl_actors.transports.base import Piece, assemble

WHOLE = torch.arange(30).view(5, 6)


def shards_at(*offsets: tuple[int, int]) -> list[Piece]:
    """The shards of WHOLE that begin at these offsets. Cuts before row 3 and before column 2 divide WHOLE into four shards."""
    rows, columns = {0: 3, 3: 2}, {0: 2, 2: 4}
    return [
        Piece((row, column), WHOLE[row : row + rows[row], column : column + columns[column]]) for row, column in offsets
    ]


def test_shards_of_rows_and_columns_make_the_whole_tensor_in_any_order():
    shards = shards_at((3, 2), (0, 0), (3, 0), (0, 2))
    assert torch.equal(assemble("w", (5, 6), torch.int64, shards), WHOLE)


def test_if_a_shard_is_missing_the_error_names_the_tensor():
    with pytest.raises(RuntimeError, match="w: the shards hold 22 of 30 values"):
        assemble("w", (5, 6), torch.int64, shards_at((0, 0), (3, 0), (0, 2)))
