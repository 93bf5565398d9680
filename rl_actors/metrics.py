"""Metrics named `name:reduction` that merge over chunks, microbatches, ranks and calls. No tensors leave here: the result is floats.

A partial is a number for sum, min and max, and a pair (numerator, denominator) for mean.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Partials = dict[str, Any]
REDUCTIONS = ("sum", "mean", "max", "min")


def merge(parts: Iterable[Mapping[str, Any]]) -> Partials:
    """merge([{"a:sum": 1, "b:mean": (2, 4)}, {"a:sum": 2, "b:mean": (1, 1)}]) -> {"a:sum": 3, "b:mean": (3, 5)}"""
    merged: Partials = {}
    for part in parts:
        for name, value in part.items():
            _require_reduction(name)
            merged[name] = _combine(name, merged[name], value) if name in merged else value
    return merged


def numbers_of(
    partials: Mapping[str, Any], to_host: Callable[[Tensor], Callable[[], Tensor]] = lambda tensor: lambda: tensor
) -> Callable[[], Partials]:
    """Begin to bring partials of device scalars to the host, in one transfer; what is returned waits for it and gives numbers.

    to_host: begins to copy a tensor; what it returns waits for the copy.
    """
    pairs = {name: value if isinstance(value, tuple) else (value,) for name, value in partials.items()}
    scalars = [x.detach().double() for pair in pairs.values() for x in pair if isinstance(x, Tensor)]
    arrival = to_host(torch.stack(scalars)) if scalars else None

    def numbers() -> Partials:
        arrived = iter(arrival().tolist() if arrival is not None else [])
        found = {name: [next(arrived) if isinstance(x, Tensor) else x for x in pair] for name, pair in pairs.items()}
        return {name: tuple(found[name]) if isinstance(partials[name], tuple) else found[name][0] for name in partials}

    return numbers


def to_numbers(partials: Mapping[str, Any]) -> Partials:
    """Partials of scalars on the host as numbers."""
    return numbers_of(partials)()


def finish(partials: Mapping[str, Any]) -> dict[str, float]:
    """finish({"a:sum": 3, "b:mean": (3, 5)}) -> {"a:sum": 3.0, "b:mean": 0.6}; a mean or an extreme over nothing is 0."""
    nothing = {"max": -math.inf, "min": math.inf}  # what merges with anything to the other
    return {
        name: float(value[0] / value[1] if value[1] else 0.0)
        if isinstance(value, tuple)
        else float(0.0 if value == nothing.get(name.rpartition(":")[2]) else value)
        for name, value in partials.items()
    }


def _combine(name: str, a: Any, b: Any) -> Any:
    match name.rpartition(":")[2]:
        case "sum":
            return a + b
        case "mean":
            return a[0] + b[0], a[1] + b[1]
        case "max":
            return _larger(a, b)
        case _:
            return -_larger(-a, -b)


def _larger(a: Any, b: Any) -> Any:
    """Keeps a NaN wherever it stands; Python's max(1.0, nan) depends on the order."""
    if isinstance(a, Tensor):
        return torch.maximum(a, b)
    return a if a > b or a != a else b


def _require_reduction(name: str) -> None:
    reduction = name.rpartition(":")[2]
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"metric {name!r} ends in {reduction!r}; a metric is named name:sum, name:mean, name:max or name:min"
        )
