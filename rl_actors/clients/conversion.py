"""A caller's lists become CPU tensors, and the outputs of all ranks one output. Sends nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from rl_actors import metrics
from rl_actors.types import ForwardBackwardOutput, RankOutput, Sample, column_dtype, require_convertible

T = TypeVar("T")


def merge_outputs(num_samples: int, outputs: Sequence[RankOutput]) -> ForwardBackwardOutput:
    """One output, in the order of the samples. Raises ValueError for a sample reported twice."""
    reporter: dict[int, int] = {}  # index of a sample -> the rank that reported it
    values: dict[str, list[Tensor]] = {}
    for output in outputs:
        for index in output.indices:
            if index in reporter:
                raise ValueError(
                    f"sample {index} is reported twice: by rank {reporter[index]} and by rank {output.rank}"
                )
            reporter[index] = output.rank
        for name, pieces in output.values.items():
            in_order = values.setdefault(name, [torch.empty(0)] * num_samples)
            for index, piece in zip(output.indices, pieces.split(output.lengths), strict=True):
                in_order[index] = piece
    # in the order of the ranks, because a sum of floats depends on the order
    partials = metrics.merge(output.metrics for output in sorted(outputs, key=lambda output: output.rank))
    return ForwardBackwardOutput(
        logprobs=values.get("logprobs", []),
        values=values.get("values"),
        entropy=values.get("entropy"),
        target_logprobs=values.get("target_logprobs"),
        metrics=metrics.finish(partials),
        policy_version=outputs[0].policy_version,
        partials=partials,
    )


def as_tensors(samples: Sequence[Sample]) -> list[Sample]:
    """A new list, with CPU tensors of int64 or float32, which may share memory. Validation refuses
    what cannot be converted.
    """
    if not isinstance(samples, Sequence):
        return samples  # type: ignore[unreachable]  # validation refuses it
    return [to_tensors(sample) for sample in samples]


def to_tensors(sample: Sample) -> Sample:
    """The sample with CPU tensors; see `as_tensors`. A sample that has them is returned itself."""
    if not isinstance(sample, Sample) or not isinstance(sample.columns, Mapping):
        return sample
    if _holds_tensors(sample):
        return sample
    columns = {name: _tensor(column, column_dtype(name)) for name, column in sample.columns.items()}
    tokens = _tensor(sample.tokens, torch.int64)
    targets = _tensor(sample.targets, torch.int64)
    return replace(sample, tokens=tokens, targets=targets, columns=columns)


def _holds_tensors(sample: Sample) -> bool:
    if not (_is_tensor(sample.tokens, torch.int64) and _is_tensor(sample.targets, torch.int64)):
        return False
    return all(_is_tensor(column, column_dtype(name)) for name, column in sample.columns.items())


def _is_tensor(values: object, dtype: torch.dtype) -> bool:
    return isinstance(values, Tensor) and values.dtype == dtype and values.is_cpu


def _tensor(values: T, dtype: torch.dtype) -> Tensor | T:
    try:
        tensor = torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return values
    try:
        require_convertible("a value", tensor, dtype)
    except ValueError:
        return tensor  # validation refuses it, with its name
    return tensor.to(dtype)
