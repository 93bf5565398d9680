"""Plans one training call: puts samples into rows, and rows into the microbatches of every rank.

B rows of a microbatch, L length of a row, T positions of a sample. No devices, no tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import TypedDict

from rl_actors.config import PackingPolicy
from rl_actors.layouts import ROW_MULTIPLE, in_multiples

BUCKETS_PER_OCTAVE = 4
"""Most row lengths between two powers of two; few, because every new shape is compiled."""

Row = tuple[int, ...]  # sample indices; an empty row is padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    rows: tuple[Row, ...]  # B
    row_length: int  # L


Plan = list[list[Microbatch]]  # one list for each rank


class PlanOptions(TypedDict, total=False):
    """What a pipeline needs."""

    uniform: bool
    min_microbatches: int
    microbatch_multiple: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans a call's microbatches. policy: a microbatch has at most

    "packed": rows_per_microbatch rows, which samples share;
    "token_budget": tokens_per_row * rows_per_microbatch positions, a sample in each row;
    "fixed": rows_per_microbatch rows, a sample in each row.
    """

    tokens_per_row: int  # at most, rounded down to a multiple of row_multiple
    rows_per_microbatch: int
    num_ranks: int
    row_multiple: int = ROW_MULTIPLE
    policy: PackingPolicy = "packed"
    # As a pipeline needs: all microbatches have one shape. Their number is then a multiple of
    # microbatch_multiple and at least min_microbatches.
    uniform: bool = False
    min_microbatches: int = 1
    microbatch_multiple: int = 1

    @property
    def capacity(self) -> int:
        return in_multiples(self.tokens_per_row, self.row_multiple)

    def plan(self, lengths: Sequence[int]) -> Plan:
        """The microbatches of every rank: equally many, the n-th of the same shape on all ranks.

        lengths: positions of each sample. The n-th microbatches of all ranks get rows of similar
        length and attention_cost, padded to the `bucket` of the longest. Rows of padding are added
        where rows are missing.

        Planner(tokens_per_row=5, row_multiple=1, rows_per_microbatch=1, num_ranks=2).plan([3, 2, 4])
            -> rank 0 has the row (2,), rank 1 the row (0, 1)

        Raises ValueError if a sample is longer than a row.
        """
        for index, length in enumerate(lengths):
            if length > self.capacity:
                limit = f"tokens_per_row={self.tokens_per_row}"
                if self.capacity < self.tokens_per_row:
                    limit += f", rounded down to {self.capacity}, a multiple of {self.row_multiple}"
                raise ValueError(f"sample {index} has {length} positions but {limit}")
        if self.policy == "packed":
            return self._plan_packed(lengths)
        return self._deal(lengths, [(index,) for index in range(len(lengths))])

    def _plan_packed(self, lengths: Sequence[int]) -> Plan:
        """first_fit_decreasing, or samples spread over its rows of padding too, if faster."""
        rows = first_fit_decreasing(lengths, self.capacity)
        packed = self._deal(lengths, rows)
        num_rows = sum(len(batch.rows) for batch in packed[0]) * self.num_ranks
        if num_rows == len(rows):
            return packed
        spread_rows = worst_fit_decreasing(lengths, self.capacity, num_rows)
        if spread_rows is None:
            return packed
        spread = self._deal(lengths, spread_rows)
        return spread if time_of(lengths, spread) < time_of(lengths, packed) else packed

    def _deal(self, lengths: Sequence[int], rows: list[Row]) -> Plan:
        """Put rows into microbatches, so that the n-th take about equally long on all ranks."""
        totals = [sum(lengths[index] for index in row) for row in rows]
        row_lengths = [bucket(total, self.row_multiple, self.capacity) for total in totals]
        costs = [attention_cost(lengths, row) for row in rows]
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
        """(rows, row length) of a rank's microbatches. row_lengths: of all ranks, longest first."""
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
        """_shapes if all are the same: the fewest microbatches, of the fewest rows."""
        longest = row_lengths[0]
        num_of_rank = _divide_up(len(row_lengths), self.num_ranks)
        needed = _divide_up(num_of_rank, self._most_rows(longest))
        count = _round_up(max(needed, min(self.min_microbatches, num_of_rank)), self.microbatch_multiple)
        num_rows = _divide_up(num_of_rank, count)
        with_padding = _round_up(max(count, self.min_microbatches), self.microbatch_multiple)
        return [(num_rows, longest)] * with_padding

    def _most_rows(self, row_length: int) -> int:
        if self.policy == "token_budget":
            return self.capacity * self.rows_per_microbatch // row_length
        return self.rows_per_microbatch


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[Row]:
    """Rows of at most `capacity`, each sample in the first row with room, longest samples first.

    A segment tree over the rows' free space finds it in O(log n).
    """
    size = 1
    while size < len(lengths):
        size *= 2
    # free[size + r] is row r's; free[n] = max(free[2 n], free[2 n + 1]) for n < size
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
    """At most num_rows rows, each sample in the emptiest, longest first. None if one does not fit."""
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
    """The row length for `length` positions: one of a few multiples of `multiple`, up to `capacity`.

    bucket(70, 64, 4096) -> 128, bucket(1100, 64, 4096) -> 1280, bucket(4000, 64, 4096) -> 4096
    """
    units = max(1, _divide_up(length, multiple))
    step = 1
    while units > 2 * BUCKETS_PER_OCTAVE * step:
        step *= 2
    return min(_divide_up(units, step) * step * multiple, capacity)


def attention_cost(lengths: Sequence[int], row: Row) -> int:
    """The sum of T² over the row's samples; all other work is the same at every position."""
    return sum(lengths[index] ** 2 for index in row)


def time_of(lengths: Sequence[int], ranks: Plan) -> tuple[int, int]:
    """(a rank's positions with padding, the slowest ranks' attention cost), less for faster plans."""
    slowest = 0
    for batches in zip(*ranks, strict=True):
        slowest += max(sum(attention_cost(lengths, row) for row in batch.rows) for batch in batches)
    return sum(len(batch.rows) * batch.row_length for batch in ranks[0]), slowest


def _balance(taken: list[int], costs: list[int], num_ranks: int, num_rows: int) -> list[list[int]]:
    """Deal rows, the costliest first, each to the rank of least cost with fewer than num_rows rows."""
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
