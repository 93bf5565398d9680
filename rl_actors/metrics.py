"""Metrics named `name:reduction` that merge over chunks, microbatches, ranks and calls. No tensors leave here: the result is floats.

A partial is a number for sum, min and max, and a pair (numerator, denominator) for mean.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

Partials = dict[str, Any]


def merge(parts: Iterable[Mapping[str, Any]]) -> Partials:
    """merge([{"a:sum": 1, "b:mean": (2, 4)}, {"a:sum": 2, "b:mean": (1, 1)}]) -> {"a:sum": 3, "b:mean": (3, 5)}"""
    merged: Partials = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = _combine(name, merged[name], value) if name in merged else value
    return merged


def to_numbers(partials: Mapping[str, Any]) -> Partials:
    """Bring partials of device scalars to the host in one transfer."""
    flat = [
        (name, i, x)
        for name, value in partials.items()
        for i, x in enumerate(value if isinstance(value, tuple) else (value,))
    ]
    if not flat:
        return {}
    numbers = torch.stack([torch.as_tensor(x).double() for _, _, x in flat]).tolist()
    result: Partials = {}
    for (name, i, _), number in zip(flat, numbers, strict=True):
        result[name] = (result[name], number) if i else number
    return result


def finish(partials: Mapping[str, Any]) -> dict[str, float]:
    """finish({"a:sum": 3, "b:mean": (3, 5)}) -> {"a:sum": 3.0, "b:mean": 0.6}; a mean over nothing is 0."""
    return {
        name: float(value[0] / value[1] if value[1] else 0.0) if isinstance(value, tuple) else float(value)
        for name, value in partials.items()
    }


def _combine(name: str, a: Any, b: Any) -> Any:
    match name.rpartition(":")[2]:
        case "sum":
            return a + b
        case "mean":
            return a[0] + b[0], a[1] + b[1]
        case "max":
            return torch.maximum(a, b) if isinstance(a, torch.Tensor) else max(a, b)
        case "min":
            return torch.minimum(a, b) if isinstance(a, torch.Tensor) else min(a, b)
        case other:
            raise ValueError(
                f"metric {name!r} ends in {other!r}; a metric is named name:sum, name:mean, name:max or name:min"
            )
