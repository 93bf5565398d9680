"""The parts of a trainer's memory that `offload` moves to the host, and HostMove, the record of a
move.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

Part = Literal["weights", "gradients", "optimizer"]
"""weights: parameters and buffers. gradients: accumulated, not yet used by an optimizer step.
optimizer: its state.
"""
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMove:
    """Bytes and seconds of a move between device and host, or a sum of moves.

    A client's are of all ranks together; those in TrainerInfo or from TrainEngine are of one rank.
    """

    num_bytes: int = 0  # summed over ranks
    seconds: float = 0.0  # of the slowest rank
    buffer_seconds: float = 0.0  # part of `seconds`, for allocating host memory, which later offloads reuse

    @property
    def gb_per_second(self) -> float:
        """All ranks' bytes over the slowest rank's seconds of copying, in 10^9 bytes a second."""
        copying = self.seconds - self.buffer_seconds
        return self.num_bytes / 1e9 / copying if copying > 0 else 0.0

    def then(self, later: "HostMove") -> "HostMove":
        names = [field.name for field in fields(self)]
        return HostMove(**{name: getattr(self, name) + getattr(later, name) for name in names})

    def since(self, earlier: "HostMove") -> "HostMove":
        """The moves between two moments; both HostMoves are sums since the trainer's start."""
        names = [field.name for field in fields(self)]
        return HostMove(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


def of_all_ranks(moves: Iterable[HostMove]) -> HostMove:
    """One move of each rank, at the same time: the sum of bytes, the slowest rank's seconds."""
    moves = list(moves)
    slowest = max(moves, key=lambda move: move.seconds)
    return replace(slowest, num_bytes=sum(move.num_bytes for move in moves))


def require_parts(call: str, parts: Collection[str]) -> None:
    """Raises TypeError if `parts` is a str or no collection, ValueError for a name that is not in
    PARTS.

    call: begins the error text.
    """
    if isinstance(parts, str) or not isinstance(parts, Collection):
        raise TypeError(f"{call}: parts is {parts!r}; it must be a list of names, such as ['optimizer']")
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"{call}: {part!r} is not a part; the parts are {', '.join(PARTS)}")
