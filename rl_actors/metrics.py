"""Metrics named `name:reduction`, which can be merged over chunks, microbatches, ranks and calls.

A partial can be merged: a scalar, for mean a pair (numerator, denominator), perhaps on a device.
`finish` makes floats of partials.
"""

import math
import time
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

Scalar: TypeAlias = float | Tensor
Partial: TypeAlias = Scalar | tuple[Scalar, Scalar]
Partials: TypeAlias = dict[str, Partial]
REDUCTIONS = ("sum", "mean", "max", "min")
OVER_NOTHING = {"max": -math.inf, "min": math.inf}
"""The partial over no values, neutral in merging; `finish` makes it 0."""


class HostCopy:
    """The copy of a tensor to the host; engine/gpu.py has the copy from a GPU."""

    def __init__(self, tensor: Tensor) -> None:
        """Begin the copy."""
        self.tensor = tensor

    def wait(self) -> Tensor:
        return self.tensor


class Stopwatch:
    """Adds up the seconds between `start` and `stop`; engine/gpu.py has one for work on a GPU."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began = 0.0

    def start(self) -> None:
        """Begin a measurement, dropping one without a `stop`."""
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._seconds += time.perf_counter() - self._began

    def take(self) -> float:
        """The seconds since the last `take`."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds


class PartialsCopy:
    """The copy of partials to the host, in one transfer."""

    def __init__(self, partials: Mapping[str, Partial], to_host: type[HostCopy] = HostCopy) -> None:
        """Begin the copy."""
        self._partials = dict(partials)
        scalars: list[Tensor] = []
        for value in partials.values():
            pair = value if isinstance(value, tuple) else (value,)
            scalars += [x.detach().double() for x in pair if isinstance(x, Tensor)]
        self._copy = to_host(torch.stack(scalars)) if scalars else None

    def wait(self) -> Partials:
        arrived = iter(self._copy.wait().tolist() if self._copy is not None else [])
        numbers: Partials = {}
        for name, value in self._partials.items():
            if isinstance(value, tuple):
                numerator, denominator = (next(arrived) if isinstance(x, Tensor) else x for x in value)
                numbers[name] = (numerator, denominator)
            else:
                numbers[name] = next(arrived) if isinstance(value, Tensor) else value
        return numbers


def merge(parts: Iterable[Mapping[str, Partial]]) -> Partials:
    """Merge the partials of each name. Raises ValueError for a reduction that is not in REDUCTIONS.

    merge([{"a:sum": 1, "b:mean": (2, 4)}, {"a:sum": 2, "b:mean": (1, 1)}]) -> {"a:sum": 3,
    "b:mean": (3, 5)}
    """
    merged: Partials = {}
    for part in parts:
        for name, value in part.items():
            if _reduction(name) not in REDUCTIONS:
                raise ValueError(f"metric {name!r}: the name must end in :sum, :mean, :max or :min")
            merged[name] = _combine(name, merged[name], value) if name in merged else value
    return merged


def finish(partials: Mapping[str, Partial]) -> dict[str, float]:
    """Metrics from partials; over no values they are 0.

    finish({"a:sum": 3, "b:mean": (3, 5)}) -> {"a:sum": 3.0, "b:mean": 0.6}
    """
    finished: dict[str, float] = {}
    for name, value in partials.items():
        if isinstance(value, tuple):
            numerator, denominator = value
            finished[name] = float(numerator / denominator) if denominator else 0.0
        else:
            finished[name] = 0.0 if value == OVER_NOTHING.get(_reduction(name)) else float(value)
    return finished


def _combine(name: str, a: Partial, b: Partial) -> Partial:
    reduction = _reduction(name)
    if reduction == "mean":
        assert isinstance(a, tuple) and isinstance(b, tuple), f"{name} must be a pair (numerator, denominator)"
        return a[0] + b[0], a[1] + b[1]
    assert not isinstance(a, tuple) and not isinstance(b, tuple), f"{name} must be one number, not a pair"
    if reduction == "sum":
        return a + b
    return _larger(a, b) if reduction == "max" else -_larger(-a, -b)


def _larger(a: Scalar, b: Scalar) -> Scalar:
    """The larger, or NaN if one is NaN, which Python's max would lose."""
    if isinstance(a, Tensor):
        return torch.maximum(a, b if isinstance(b, Tensor) else torch.full_like(a, b))
    if isinstance(b, Tensor):
        return torch.maximum(torch.full_like(b, a), b)
    return a if a > b or a != a else b


def _reduction(name: str) -> str:
    return name.rpartition(":")[2]
