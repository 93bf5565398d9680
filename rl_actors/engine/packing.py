"""Plan one training call: sample lengths -> rows -> microbatches of every rank. Knows nothing of devices or tensors.

R rows, B rows of a microbatch, L row length, M microbatches.
"""

from dataclasses import dataclass

ROW_MULTIPLE = 64
"""Row lengths are multiples of it, or tokens_per_row, so that few shapes occur and the logprob chunks divide them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    rows: tuple[tuple[int, ...], ...]  # B tuples of sample indices; an empty tuple is a row of padding
    row_length: int  # L


def plan(
    lengths: list[int], *, tokens_per_row: int, rows_per_microbatch: int, num_ranks: int
) -> list[list[Microbatch]]:
    """Pack samples first-fit-decreasing and deal the rows out; every rank gets the same number of microbatches and shapes.

    plan([3, 2, 4], tokens_per_row=5, rows_per_microbatch=1, num_ranks=2) -> rank 0 has the row (0, 1), rank 1 the row (2,)

    Raises ValueError when a sample is longer than a row.
    """
    for index, length in enumerate(lengths):
        if length > tokens_per_row:
            raise ValueError(f"sample {index} has {length} positions but tokens_per_row={tokens_per_row}")
    rows = first_fit_decreasing(lengths, tokens_per_row)
    fills = [sum(lengths[index] for index in row) for row in rows]
    rows_per_step = min(rows_per_microbatch, -(-len(rows) // num_ranks)) * num_ranks
    ranks: list[list[Microbatch]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(rows), rows_per_step):
        group = rows[start : start + rows_per_step]
        # tokens_per_row bounds what a row costs, padding included
        row_length = min(_round_up(max(fills[start : start + rows_per_step]), ROW_MULTIPLE), tokens_per_row)
        num_rows = -(-len(group) // num_ranks)
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
