"""What a TrainerClient does to values on their way: samples become CPU tensors, the ranks' answers one. Sends nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rl_actors import metrics
from rl_actors.types import ForwardBackwardOutput, RankOutput, Sample, column_dtype


def merge_outputs(num_samples: int, outputs: Sequence[RankOutput]) -> ForwardBackwardOutput:
    """Put what the ranks reported back into the order of the samples, and merge their metrics."""
    values: dict[str, list[Tensor]] = {}
    for output in outputs:
        for name, pieces in {"logprobs": output.logprobs, **output.extras}.items():
            in_order = values.setdefault(name, [torch.empty(0)] * num_samples)
            for index, piece in zip(output.indices, pieces.split(output.lengths), strict=True):
                in_order[index] = piece
    # They came as the ranks were done; sums of floats want one order.
    partials = metrics.merge(output.metrics for output in sorted(outputs, key=lambda output: output.rank))
    return ForwardBackwardOutput(
        logprobs=values["logprobs"],
        entropy=values.get("entropy"),
        target_logprobs=values.get("target_logprobs"),
        metrics=metrics.finish(partials),
        policy_version=outputs[0].policy_version,
        partials=partials,
    )


def to_wire(sample: Sample) -> Sample:
    """Lists become tensors here, so that actors see CPU tensors of int64 and float32 alone; what cannot is left to be refused by name."""
    if not isinstance(sample, Sample) or not isinstance(sample.columns, Mapping):
        return sample
    if all(_travels(sample.columns[name], column_dtype(name)) for name in sample.columns) and all(
        _travels(ids, torch.int64) for ids in (sample.tokens, sample.targets)
    ):
        return sample
    ids = {name: _tensor(getattr(sample, name), torch.int64) for name in ("tokens", "targets")}
    columns = {name: _tensor(column, column_dtype(name)) for name, column in sample.columns.items()}
    return replace(sample, **ids, columns=columns)


def _travels(values: Any, dtype: torch.dtype) -> bool:
    return isinstance(values, Tensor) and values.dtype == dtype and values.is_cpu


def _tensor(values: Any, dtype: torch.dtype) -> Any:
    try:
        tensor = torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return values
    # 2.7 is no token: it would become 2.
    loses = tensor.is_floating_point() and not dtype.is_floating_point and tensor.numel() > 0
    return tensor if loses else tensor.to(dtype)
