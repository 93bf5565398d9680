"""The parts of a trainer's memory that `offload` moves to the host, and HostMove, the record of a move. engine/offload.py moves the parts."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Part = Literal["weights", "gradients", "optimizer"]
"""weights: parameters and buffers. gradients: the gradients that no optimizer step has used yet. optimizer: the optimizer's state."""
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMove:
    """Bytes and seconds of a move from the device to the host or back, or the sum of several moves.

    A client returns one HostMove for all ranks together. But a HostMove in TrainerInfo, or from TrainEngine, describes only one rank.
    """

    num_bytes: int = 0  # the sum over the ranks
    seconds: float = 0.0  # of the slowest rank
    buffer_seconds: float = 0.0  # part of `seconds`, for allocating host memory; later offloads reuse this memory

    @property
    def gb_per_second(self) -> float:
        """Bytes of all ranks divided by the seconds of the slowest rank's copies, in 10^9 bytes a second."""
        copying = self.seconds - self.buffer_seconds
        return self.num_bytes / 1e9 / copying if copying > 0 else 0.0

    def then(self, later: "HostMove") -> "HostMove":
        """The sum of this move and a later move."""
        return HostMove(
            num_bytes=self.num_bytes + later.num_bytes,
            seconds=self.seconds + later.seconds,
            buffer_seconds=self.buffer_seconds + later.buffer_seconds,
        )

    def since(self, earlier: "HostMove") -> "HostMove":
        """The sum of the moves between two moments. This HostMove is the sum of all moves from the start of the trainer to the
        later moment, and `earlier` is the sum up to the earlier one.
        """
        return HostMove(
            num_bytes=self.num_bytes - earlier.num_bytes,
            seconds=self.seconds - earlier.seconds,
            buffer_seconds=self.buffer_seconds - earlier.buffer_seconds,
        )


def of_all_ranks(moves: Iterable[HostMove]) -> HostMove:
    """Combine moves that ran at the same time, one for each rank.

    The result has the sum of the bytes, and the seconds of the slowest rank.
    """
    moves = list(moves)
    slowest = max(moves, key=lambda move: move.seconds)
    return HostMove(
        num_bytes=sum(move.num_bytes for move in moves),
        seconds=slowest.seconds,
        buffer_seconds=slowest.buffer_seconds,
    )


def require_parts(call: str, parts: Collection[str]) -> None:
    """Raises TypeError if `parts` is a str or no collection, and ValueError if it has a name that is not in PARTS.

    call: the name with which the error text begins, such as "offload".
    """
    if isinstance(parts, str) or not isinstance(parts, Collection):
        raise TypeError(f"{call}: parts is {parts!r}; it must be a list of names, such as ['optimizer']")
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"{call}: {part!r} is not a part; the parts are {', '.join(PARTS)}")
