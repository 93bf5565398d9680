"""A loss that the caller computes: from logprobs to its gradient, by autograd, and the loss that carries the gradient to the trainer.

T positions of one sample; B rows, L row length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_actors.metrics import Partials, merge
from rl_actors.types import Sample

CustomLoss = Callable[[list[Sample], list[Tensor]], tuple[Tensor, dict[str, Any]]]
"""loss(samples, logprobs, each [T]) -> (scalar, metrics). A metric named `x:mean` is a number or a pair (numerator, denominator)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGradient:
    """sum_i g_i logprob_i: its gradient with respect to logprob_i is the column logprob_grads."""

    def __call__(self, logprobs_BL: Tensor, *, logprob_grads: Tensor):
        loss = (logprobs_BL * logprob_grads).sum()
        return loss, {"loss:sum": loss.detach()}


def logprob_gradients(
    loss: CustomLoss, samples: Sequence[Sample], logprobs: Sequence[Tensor]
) -> tuple[list[Tensor], Partials]:
    """Run the caller's loss: (d loss / d logprobs of each sample [T], its metrics with loss:sum).

    Raises TypeError when the loss does not return (scalar, dict), ValueError when it does not depend on the logprobs.
    """
    leaves = [x.detach().clone().requires_grad_() for x in logprobs]
    with torch.enable_grad():
        result = loss(list(samples), leaves)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
        raise TypeError(f"the loss returned {result!r}; it must return (scalar Tensor, dict of metrics)")
    value, metrics = result
    if not isinstance(metrics, dict):
        raise TypeError(f"the loss returned metrics of type {type(metrics).__name__}; they must be a dict")
    if value.numel() != 1 or not value.requires_grad:
        shape = tuple(value.shape)
        raise ValueError(
            f"the loss has shape {shape}, requires_grad={value.requires_grad}; it must be a scalar of logprobs"
        )
    gradients = torch.autograd.grad(value.reshape(()), leaves, allow_unused=True)
    partials = {name: _partial(name, x) for name, x in metrics.items()}
    return (
        [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)],
        merge([{**partials, "loss:sum": float(value.detach())}]),
    )


def _partial(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_number(x) for x in value)
    return (_number(value), 1.0) if name.endswith(":mean") else _number(value)


def _number(value: Any) -> float:
    return value.item() if isinstance(value, Tensor) else float(value)
