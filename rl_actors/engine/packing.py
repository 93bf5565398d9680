"""Plan one training call: put samples into rows by their lengths, and put rows into the microbatches of every rank.

A row of a microbatch holds one sample, or several samples one after another. This module uses neither devices nor tensors.
B is the number of rows of a microbatch, L the length of a row, and T the number of positions of a sample.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import TypedDict

from rl_actors.config import PackingPolicy
from rl_actors.layouts import ROW_MULTIPLE, in_multiples

BUCKETS_PER_OCTAVE = 4
"""Largest number of row lengths between one power of two and the next. It is small, because every new shape must be compiled."""

Row = tuple[int, ...]  # sample indices; an empty row is padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    rows: tuple[Row, ...]  # B
    row_length: int  # L


Plan = list[list[Microbatch]]  # one list for each rank


class PlanOptions(TypedDict, total=False):
    """The arguments of `plan` that a pipeline needs."""

    uniform: bool
    min_microbatches: int
    microbatch_multiple: int


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
    policy: PackingPolicy = "packed",
) -> Plan:
    """The microbatches of every rank. All ranks get the same number of microbatches, and the n-th microbatch has the same shape on all ranks.

    lengths: number of positions of each sample. tokens_per_row: largest number of positions of a row, rounded down to a multiple of
    row_multiple.

    policy: one of these three.
    "packed": samples share rows, and a microbatch has at most rows_per_microbatch rows.
    "token_budget": a row has one sample, and a microbatch has at most tokens_per_row * rows_per_microbatch positions.
    "fixed": a row has one sample, and a microbatch has at most rows_per_microbatch rows.

    The n-th microbatches of all ranks get rows that are similar in length and in attention_cost. All these rows are padded to one length: the
    length of the longest of them, which `bucket` rounds up. Rows without a sample, which are only padding, are added where rows are missing.

    uniform: True gives all microbatches of the call the same number of rows and the same row length, as a pipeline needs. The number of
    microbatches of a rank is then a multiple of microbatch_multiple and at least min_microbatches.

    plan([3, 2, 4], tokens_per_row=5, row_multiple=1, rows_per_microbatch=1, num_ranks=2)
        -> rank 0 has the row (2,), rank 1 the row (0, 1)

    Raises ValueError if a sample is longer than a row.
    """
    capacity = in_multiples(tokens_per_row, row_multiple)
    _require_room(lengths, capacity, tokens_per_row, row_multiple)
    dealer = _Dealer(
        lengths=lengths,
        capacity=capacity,
        row_multiple=row_multiple,
        rows_per_microbatch=rows_per_microbatch,
        num_ranks=num_ranks,
        policy=policy,
        uniform=uniform,
        min_microbatches=min_microbatches,
        microbatch_multiple=microbatch_multiple,
    )
    if policy == "packed":
        return dealer.deal_packed()
    return dealer.deal([(index,) for index in range(len(lengths))])


def _require_room(lengths: Sequence[int], capacity: int, tokens_per_row: int, row_multiple: int) -> None:
    """Raises ValueError naming the first sample that is longer than a row."""
    for index, length in enumerate(lengths):
        if length > capacity:
            limit = f"tokens_per_row={tokens_per_row}"
            if capacity < tokens_per_row:
                limit += f", rounded down to {capacity}, a multiple of {row_multiple}"
            raise ValueError(f"sample {index} has {length} positions but {limit}")


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[Row]:
    """Rows of at most `capacity` positions.

    Samples are placed from the longest to the shortest, each into the first row with enough free space. Among samples of equal length the
    earlier one is placed first. A segment tree over the rows' free space finds the row in O(log n) steps for n samples.
    """
    size = 1
    while size < len(lengths):
        size *= 2
    # free[size + r] is the free space of row r. For n < size, free[n] is the larger of free[2 * n] and free[2 * n + 1]. So free[1] is the
    # largest free space of all rows.
    free = [capacity] * (2 * size)
    rows: list[list[int]] = [[] for _ in lengths]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        node = 1
        while node < size:
            node *= 2
            node += free[node] < length
        rows[node - size].append(index)
        free[node] -= length
        while node > 1:
            node //= 2
            left = free[2 * node]
            right = free[2 * node + 1]
            most = left if left > right else right
            if free[node] == most:
                break
            free[node] = most
    return [tuple(row) for row in rows if row]


def worst_fit_decreasing(lengths: Sequence[int], capacity: int, num_rows: int) -> list[Row] | None:
    """At most num_rows rows that are filled about equally.

    Samples are placed from the longest to the shortest, each into the row with the fewest positions so far. Returns None if a sample does
    not fit into that row.
    """
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
    """The row length for `length` positions: one of a few multiples of `multiple`, so that few shapes are compiled.

    A row length above `capacity` is replaced by `capacity`.

    bucket(70, 64, 4096) -> 128, bucket(1100, 64, 4096) -> 1280, bucket(4000, 64, 4096) -> 4096
    """
    units = max(1, _divide_up(length, multiple))
    step = 1
    while units > 2 * BUCKETS_PER_OCTAVE * step:
        step *= 2
    return min(_divide_up(units, step) * step * multiple, capacity)


def attention_cost(lengths: Sequence[int], row: Row) -> int:
    """A measure of the work of attention in a row: the sum of T² over the row's samples.

    Rows of the same length differ only in this work. All other work is the same at every position, also at padding.
    """
    return sum(lengths[index] ** 2 for index in row)


def time_of(lengths: Sequence[int], ranks: Plan) -> tuple[int, int]:
    """A key by which plans are compared: (positions of one rank, attention cost). A faster plan has a smaller key.

    Positions of padding count. The attention cost is a sum over the microbatches. For each microbatch the cost of the slowest rank is added,
    because the other ranks wait for this rank.
    """
    slowest = 0
    for batches in zip(*ranks, strict=True):
        slowest += max(_cost_of(lengths, batch) for batch in batches)
    return sum(len(batch.rows) * batch.row_length for batch in ranks[0]), slowest


def _cost_of(lengths: Sequence[int], batch: Microbatch) -> int:
    return sum(attention_cost(lengths, row) for row in batch.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dealer:
    """Deals rows into the microbatches of all ranks. The fields are the arguments of one call of `plan`.

    capacity: tokens_per_row, rounded down to a multiple of row_multiple.
    """

    lengths: Sequence[int]
    capacity: int
    row_multiple: int
    rows_per_microbatch: int
    num_ranks: int
    policy: PackingPolicy
    uniform: bool
    min_microbatches: int
    microbatch_multiple: int

    def deal_packed(self) -> Plan:
        """Plan the rows of first_fit_decreasing. If the plan has rows that are only padding, plan again with the samples spread over these rows,
        too, and return the faster plan.
        """
        rows = first_fit_decreasing(self.lengths, self.capacity)
        packed = self.deal(rows)
        num_rows = sum(len(batch.rows) for batch in packed[0]) * self.num_ranks
        if num_rows == len(rows):
            return packed
        # Some rows are only padding. If the samples are spread over these rows, too, the rows may be shorter or cost less attention.
        spread_rows = worst_fit_decreasing(self.lengths, self.capacity, num_rows)
        if spread_rows is None:
            return packed
        spread = self.deal(spread_rows)
        return spread if time_of(self.lengths, spread) < time_of(self.lengths, packed) else packed

    def deal(self, rows: list[Row]) -> Plan:
        """Put the rows into microbatches.

        The n-th microbatches of all ranks get rows of similar length and attention cost, so that all ranks take about the same time for them.
        """
        row_lengths = [self._row_length(row) for row in rows]
        costs = [attention_cost(self.lengths, row) for row in rows]
        order = sorted(range(len(rows)), key=lambda r: (-row_lengths[r], -costs[r]))
        ranks: Plan = [[] for _ in range(self.num_ranks)]
        start = 0
        for num_rows, row_length in self._shapes([row_lengths[r] for r in order]):
            taken = order[start : start + num_rows * self.num_ranks]
            start += len(taken)
            for batches, members in zip(ranks, _balance(taken, costs, self.num_ranks, num_rows), strict=True):
                padding = [()] * (num_rows - len(members))
                batches.append(Microbatch(rows=(*(rows[r] for r in members), *padding), row_length=row_length))
        return ranks

    def _shapes(self, row_lengths: list[int]) -> Iterator[tuple[int, int]]:
        """(number of rows, row length) of each microbatch of one rank. row_lengths: the lengths of the rows of all ranks, longest first."""
        if self.uniform:
            yield from self._equal_shapes(row_lengths)
            return
        start = 0
        while start < len(row_lengths):
            left_of_rank = _divide_up(len(row_lengths) - start, self.num_ranks)
            num_rows = min(self._most_rows(row_lengths[start]), left_of_rank)
            yield num_rows, row_lengths[start]
            start += num_rows * self.num_ranks

    def _equal_shapes(self, row_lengths: list[int]) -> list[tuple[int, int]]:
        """(number of rows, row length) of each microbatch of one rank, if all must have the same shape.

        The number of microbatches is the smallest that is allowed. Each microbatch has as few rows as this number permits. The last
        microbatches may be only padding.
        """
        longest = row_lengths[0]
        num_of_rank = _divide_up(len(row_lengths), self.num_ranks)
        needed = _divide_up(num_of_rank, self._most_rows(longest))
        count = _round_up(max(needed, min(self.min_microbatches, num_of_rank)), self.microbatch_multiple)
        num_rows = _divide_up(num_of_rank, count)
        with_padding = _round_up(max(count, self.min_microbatches), self.microbatch_multiple)
        return [(num_rows, longest)] * with_padding

    def _most_rows(self, row_length: int) -> int:
        """The most rows of this length that a microbatch may have."""
        if self.policy == "token_budget":
            return self.capacity * self.rows_per_microbatch // row_length
        return self.rows_per_microbatch

    def _row_length(self, row: Row) -> int:
        return bucket(sum(self.lengths[index] for index in row), self.row_multiple, self.capacity)


def _balance(taken: list[int], costs: list[int], num_ranks: int, num_rows: int) -> list[list[int]]:
    """Deal rows to the ranks, the costliest row first. Returns the rows of every rank.

    Each row goes to the rank with the least cost so far, among the ranks that have fewer than num_rows rows.
    """
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
