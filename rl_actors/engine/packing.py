"""Plan one training call: sample lengths -> rows -> microbatches of every rank. Knows nothing of devices or tensors.

R rows, B rows of a microbatch, L row length, M microbatches, T positions of one sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush, heapreplace

from rl_actors.layouts import ROW_MULTIPLE, Policy, in_multiples

BUCKETS_PER_OCTAVE = 4
"""Row lengths between one power of two and the next, so that a call brings few new shapes to compile."""

Row = tuple[int, ...]  # sample indices; an empty one is padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    rows: tuple[Row, ...]  # B
    row_length: int  # L


Plan = list[list[Microbatch]]  # of every rank


def plan(
    lengths: Sequence[int],
    *,
    tokens_per_row: int,
    rows_per_microbatch: int,
    num_ranks: int,
    row_multiple: int = ROW_MULTIPLE,
    uniform: bool = False,
    min_microbatches: int = 1,
    microbatch_multiple: int = 1,
    policy: Policy = "packed",
) -> Plan:
    """Rows and microbatches of every rank; each rank gets as many, of the same shapes.

    packed: samples share rows; a microbatch has at most rows_per_microbatch of them.
    token_budget: one sample a row; a microbatch has at most tokens_per_row * rows_per_microbatch positions.
    fixed: one sample a row; a microbatch has at most rows_per_microbatch of them.

    Rows of a microbatch are alike in length and attention cost, and as long as the longest, rounded up to a `bucket`;
    tokens_per_row is rounded down to a multiple of row_multiple. uniform: all microbatches of the call have the same number
    of rows and the same row length, as a pipeline needs; their number is a multiple of microbatch_multiple and at least
    min_microbatches, with rows of padding where samples are too few.

    plan([3, 2, 4], tokens_per_row=5, row_multiple=1, rows_per_microbatch=1, num_ranks=2) -> rank 0 has the row (2,), rank 1 the row (0, 1)

    Raises ValueError when a sample is longer than a row.
    """
    capacity = in_multiples(tokens_per_row, row_multiple)
    for index, length in enumerate(lengths):
        if length > capacity:
            rounded = f", of which {capacity} are a multiple of {row_multiple}" if capacity < tokens_per_row else ""
            raise ValueError(f"sample {index} has {length} positions but tokens_per_row={tokens_per_row}{rounded}")

    def most_rows(row_length: int) -> int:
        return capacity * rows_per_microbatch // row_length if policy == "token_budget" else rows_per_microbatch

    to_bucket = partial(bucket, multiple=row_multiple, capacity=capacity)
    cut = partial(_deal_uniform, at_least=min_microbatches, multiple=microbatch_multiple) if uniform else _deal
    deal = partial(cut, lengths, to_bucket=to_bucket, most_rows=most_rows, num_ranks=num_ranks)
    if policy != "packed":
        return deal([(index,) for index in range(len(lengths))])
    rows = first_fit_decreasing(lengths, capacity)
    packed = deal(rows)
    num_rows = sum(len(batch.rows) for rank in packed for batch in rank)
    # Rows of padding may as well share the samples, where that makes the call shorter.
    spread = worst_fit_decreasing(lengths, capacity, num_rows) if num_rows > len(rows) else None
    return packed if spread is None else min(packed, deal(spread), key=partial(time_of, lengths))


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[Row]:
    """As few rows of at most `capacity` positions as first fit finds. Among equal lengths the earlier sample goes first.

    A segment tree over the rows' free space finds the first fit in O(log R).
    """
    size = 1
    while size < len(lengths):
        size *= 2
    free = [capacity] * (2 * size)  # free[1] is the root: the most free space of any row
    rows: list[list[int]] = [[] for _ in lengths]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length, node = lengths[index], 1
        while node < size:
            node *= 2
            node += free[node] < length
        rows[node - size].append(index)
        free[node] -= length
        while node > 1:
            node //= 2
            left, right = free[2 * node], free[2 * node + 1]
            most = left if left > right else right
            if free[node] == most:
                break
            free[node] = most
    return [tuple(row) for row in rows if row]


def worst_fit_decreasing(lengths: Sequence[int], capacity: int, num_rows: int) -> list[Row] | None:
    """num_rows rows, or fewer where samples are fewer, of similar fill; None when they do not hold the samples."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    fills = [(0, row) for row in range(num_rows)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fill, row = fills[0]
        if fill + lengths[index] > capacity:
            return None
        rows[row].append(index)
        heapreplace(fills, (fill + lengths[index], row))
    return [tuple(row) for row in rows if row]


def bucket(length: int, multiple: int, capacity: int) -> int:
    """The row length for so many positions: a multiple of `multiple`, less than a quarter longer than needed, one of few.

    bucket(70, 64, 4096) -> 128, bucket(1100, 64, 4096) -> 1280, bucket(4000, 64, 4096) -> 4096
    """
    units = max(1, _divide_up(length, multiple))
    step = 1
    while units > 2 * BUCKETS_PER_OCTAVE * step:
        step *= 2
    return min(_divide_up(units, step) * step * multiple, capacity)


def attention_cost(lengths: Sequence[int], row: Row) -> int:
    """What tells rows of one length apart: the sum of T². All else costs the same at every position, padding or not."""
    return sum(lengths[index] ** 2 for index in row)


def time_of(lengths: Sequence[int], ranks: Plan) -> tuple[int, int]:
    """(positions of one rank, attention cost of the slowest rank of every microbatch, summed)."""
    slowest = 0
    for batches in zip(*ranks, strict=True):
        slowest += max(sum(attention_cost(lengths, row) for row in batch.rows) for batch in batches)
    return sum(len(batch.rows) * batch.row_length for batch in ranks[0]), slowest


def _deal(
    lengths: Sequence[int],
    rows: list[Row],
    *,
    to_bucket: Callable[[int], int],
    most_rows: Callable[[int], int],
    num_ranks: int,
) -> Plan:
    """Microbatches of neighbours in (row length, attention cost), so that all ranks are busy for as long in each."""
    row_lengths, costs, order = _in_order(lengths, rows, to_bucket)
    ranks: Plan = [[] for _ in range(num_ranks)]
    start = 0
    while start < len(order):
        row_length = row_lengths[order[start]]
        num_rows = min(most_rows(row_length), _divide_up(len(order) - start, num_ranks))
        taken = order[start : start + num_rows * num_ranks]
        _add_microbatch(ranks, rows, _balance(taken, costs, num_ranks, num_rows), num_rows, row_length)
        start += len(taken)
    return ranks


def _deal_uniform(
    lengths: Sequence[int],
    rows: list[Row],
    *,
    to_bucket: Callable[[int], int],
    most_rows: Callable[[int], int],
    num_ranks: int,
    at_least: int,
    multiple: int,
) -> Plan:
    """The same with microbatches of one shape: as few as can be, and then as few rows in each."""
    row_lengths, costs, order = _in_order(lengths, rows, to_bucket)
    row_length, of_rank = row_lengths[order[0]], _divide_up(len(order), num_ranks)
    count = _round_up(max(_divide_up(of_rank, most_rows(row_length)), min(at_least, of_rank)), multiple)
    num_rows = _divide_up(of_rank, count)
    ranks: Plan = [[] for _ in range(num_ranks)]
    # Behind the last row: microbatches of padding.
    for start in range(0, num_ranks * num_rows * _round_up(max(count, at_least), multiple), num_ranks * num_rows):
        taken = order[start : start + num_ranks * num_rows]
        _add_microbatch(ranks, rows, _balance(taken, costs, num_ranks, num_rows), num_rows, row_length)
    return ranks


def _in_order(
    lengths: Sequence[int], rows: list[Row], to_bucket: Callable[[int], int]
) -> tuple[list[int], list[int], list[int]]:
    """(length and attention cost of every row, the rows from the longest and costliest on)."""
    row_lengths = [to_bucket(sum(lengths[index] for index in row)) for row in rows]
    costs = [attention_cost(lengths, row) for row in rows]
    return row_lengths, costs, sorted(range(len(rows)), key=lambda r: (-row_lengths[r], -costs[r]))


def _add_microbatch(ranks: Plan, rows: list[Row], members: list[list[int]], num_rows: int, row_length: int) -> None:
    for batches, of_rank in zip(ranks, members, strict=True):
        padding = [()] * (num_rows - len(of_rank))
        batches.append(Microbatch(rows=(*(rows[r] for r in of_rank), *padding), row_length=row_length))


def _balance(taken: list[int], costs: list[int], num_ranks: int, num_rows: int) -> list[list[int]]:
    """The costliest first, each to the rank with the least so far that has fewer than num_rows."""
    members: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for row in sorted(taken, key=lambda r: -costs[r]):
        load, rank = heappop(loads)
        members[rank].append(row)
        if len(members[rank]) < num_rows:
            heappush(loads, (load + costs[row], rank))
    return members


def _divide_up(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _round_up(value: int, multiple: int) -> int:
    return _divide_up(value, multiple) * multiple
