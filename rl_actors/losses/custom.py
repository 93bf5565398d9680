"""The loss of `forward_backward_custom`, which the calling process computes instead of the trainer.

Its gradient by the logprobs or values travels as a column. T positions of a sample, B rows, L row
length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rl_actors.metrics import Partial, Partials, Scalar, merge
from rl_actors.types import IGNORE_TARGET, Sample

CustomLoss = Callable[[list[Sample], list[Tensor]], tuple[Tensor, Partials]]
"""loss(samples, outputs) -> (scalar, metrics). outputs: logprobs or values of each sample, [T].

metrics: numbers; `x:mean` may also be a pair (numerator, denominator).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGradient:
    """sum_i g_i logprob_i, whose gradient is g, the column logprob_grads."""

    column: ClassVar[str] = "logprob_grads"

    def __call__(self, logprobs_BL: Tensor, *, logprob_grads: Tensor) -> tuple[Tensor, Partials]:
        loss = (logprobs_BL * logprob_grads).sum()
        return loss, {"loss:sum": loss.detach()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueGradient:
    """sum_i g_i V_i, whose gradient is g, the column value_grads."""

    column: ClassVar[str] = "value_grads"
    output: ClassVar[str] = "values"

    def __call__(self, values_BL: Tensor, *, value_grads: Tensor) -> tuple[Tensor, Partials]:
        loss = (values_BL * value_grads).sum()
        return loss, {"loss:sum": loss.detach()}


def output_gradients(
    loss: CustomLoss, samples: Sequence[Sample], outputs: Sequence[Tensor]
) -> tuple[list[Tensor], Partials]:
    """Run the caller's loss: (gradient by the outputs, [T] for each sample; metrics and loss:sum).

    Raises TypeError if the loss does not return (Tensor, dict), ValueError if the tensor is no
    scalar or does not depend on the outputs.
    """
    leaves = [x.detach().clone().requires_grad_() for x in outputs]
    with torch.enable_grad():
        result = loss([_without_padded_columns(sample) for sample in samples], leaves)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
        raise TypeError(f"the loss returned {result!r}; it must return (scalar Tensor, dict of metrics)")
    value, metrics = result
    if not isinstance(metrics, dict):
        raise TypeError(f"the loss returned metrics of type {type(metrics).__name__}; they must be a dict")
    if value.numel() != 1 or not value.requires_grad:
        shape = tuple(value.shape)
        raise ValueError(
            f"the loss has shape {shape}, requires_grad={value.requires_grad}; it must be a scalar that depends on the logprobs or values"
        )
    gradients = torch.autograd.grad(value.reshape(()), leaves, materialize_grads=True)
    partials = {name: _partial(name, x) for name, x in metrics.items()}
    return list(gradients), merge([{**partials, "loss:sum": float(value.detach())}])


def _without_padded_columns(sample: Sample) -> Sample:
    """The sample with columns 0 where the target is IGNORE_TARGET."""
    is_padded_T = torch.as_tensor(sample.targets) == IGNORE_TARGET
    if not is_padded_T.any():
        return sample
    columns = {name: torch.as_tensor(column).clone() for name, column in sample.columns.items()}
    for column in columns.values():
        column[is_padded_T] = 0
    return replace(sample, columns=columns)


def _partial(name: str, value: Partial) -> Partial:
    if isinstance(value, tuple):
        numerator, denominator = value
        return _number(numerator), _number(denominator)
    return (_number(value), 1.0) if name.endswith(":mean") else _number(value)


def _number(value: Scalar) -> float:
    return value.item() if isinstance(value, Tensor) else float(value)
