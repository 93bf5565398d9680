"""Plan one training call: sample lengths -> rows -> microbatches of every rank. Knows nothing of devices or tensors.

R rows, B rows of a microbatch, L row length, M microbatches.
"""

from dataclasses import dataclass

ROW_MULTIPLE = 64
"""Row lengths are multiples of it, so that few shapes occur and the logprob chunks divide them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    rows: tuple[tuple[int, ...], ...]  # B tuples of sample indices; an empty tuple is a row of padding
    row_length: int  # L


def plan(
    lengths: list[int],
    *,
    tokens_per_row: int,
    rows_per_microbatch: int,
    num_ranks: int,
    row_multiple: int = ROW_MULTIPLE,
    uniform: bool = False,
) -> list[list[Microbatch]]:
    """Pack samples first-fit-decreasing and deal the rows out; every rank gets the same number of microbatches and shapes.

    Every row length is a multiple of row_multiple; tokens_per_row is rounded down to one. uniform: all microbatches of the call
    have the same number of rows and the same row length, as a pipeline needs.

    plan([3, 2, 4], tokens_per_row=5, row_multiple=1, rows_per_microbatch=1, num_ranks=2) -> rank 0 has the row (0, 1), rank 1 the row (2,)

    Raises ValueError when a sample is longer than a row.
    """
    capacity = tokens_per_row // row_multiple * row_multiple
    for index, length in enumerate(lengths):
        if length > capacity:
            rounded = f", of which {capacity} are a multiple of {row_multiple}" if capacity < tokens_per_row else ""
            raise ValueError(f"sample {index} has {length} positions but tokens_per_row={tokens_per_row}{rounded}")
    rows = first_fit_decreasing(lengths, capacity)
    fills = [sum(lengths[index] for index in row) for row in rows]
    rows_per_step = min(rows_per_microbatch, -(-len(rows) // num_ranks)) * num_ranks
    ranks: list[list[Microbatch]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(rows), rows_per_step):
        group = rows[start : start + rows_per_step]
        # The fullest row comes first.
        row_length = _round_up(fills[0 if uniform else start], row_multiple)
        num_rows = rows_per_step // num_ranks if uniform else -(-len(group) // num_ranks)
        group += [()] * (num_rows * num_ranks - len(group))
        for rank in range(num_ranks):
            ranks[rank].append(Microbatch(rows=tuple(group[rank::num_ranks]), row_length=row_length))
    return ranks


def first_fit_decreasing(lengths: list[int], capacity: int) -> list[tuple[int, ...]]:
    """Sample indices by row; the fullest rows come first. Among equal lengths the earlier sample goes first.

    A segment tree over the rows' free space finds the first fit in O(log R).
    """
    size = 1
    while size < len(lengths):
        size *= 2
    free = [capacity] * (2 * size)  # free[1] is the root: the most free space of any row
    rows: list[list[int]] = [[] for _ in lengths]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        node = 1
        while node < size:
            node = 2 * node if free[2 * node] >= lengths[index] else 2 * node + 1
        rows[node - size].append(index)
        free[node] -= lengths[index]
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    filled = [tuple(row) for row in rows if row]
    return sorted(filled, key=lambda row: -sum(lengths[i] for i in row))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
