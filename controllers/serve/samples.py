"""Converts the Datums of a client's request to Samples for a trainer, and the trainer's output to the answer for the client.

A Datum is one training sequence of a request. In a Datum and in a Sample, position i reads token i and predicts target i. So this module
shifts nothing. With the loss cross_entropy a position may have several targets, each with a weight. K is the number of targets of a position.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from controllers.serve.codec import MAX_CELLS, Datum, ForwardBackwardCall, write_forward_backward
from controllers.serve.losses import COLUMN_OF_INPUT, LossKind, kind_of, make_loss
from rl_actors.losses import Loss
from rl_actors.types import ForwardBackwardOutput, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The samples and the loss of a forward or forward_backward request."""

    samples: list[Sample]
    loss: Loss
    # The K of each datum. In `samples` the targets are padded to the largest K. None if target_tokens has only one dimension.
    widths: list[int] | None


def read_batch(call: ForwardBackwardCall, vocab_size: int) -> Batch:
    """The samples and the loss of a request. Raises ValueError if the request is wrong.

    If a datum lacks an input, or has an unknown input or an input of a wrong shape or dtype, the error names the datum and the input.
    """
    kind, loss = kind_of(call.loss_fn), make_loss(call.loss_fn, call.config)
    data = call.data()
    if not data:
        raise ValueError("the request has no datums")
    for index, datum in enumerate(data):
        _require_inputs(f"datum {index}", call.loss_fn, kind, datum)
    ranks = {datum.inputs["target_tokens"].ndim for datum in data}
    if len(ranks) > 1:
        raise ValueError(
            "target_tokens has one dimension in some datums of the request and two in others; the number must be the same in all datums"
        )
    if ranks == {2}:
        if call.loss_fn != "cross_entropy":
            raise ValueError(
                f"target_tokens has two dimensions, which only cross_entropy takes; the loss is {call.loss_fn}"
            )
        widths = [datum.inputs["target_tokens"].shape[1] for datum in data]
        _require_cells(widths, sum(len(datum.tokens) for datum in data), vocab_size)
        return Batch(samples=[_with_many_targets(datum, max(widths)) for datum in data], loss=loss, widths=widths)
    return Batch(samples=[_with_one_target(datum, call.loss_fn) for datum in data], loss=loss, widths=None)


def _require_cells(widths: Sequence[int], num_positions: int, vocab_size: int) -> None:
    widest = max(widths)
    if widest > vocab_size:
        raise ValueError(
            f"datum {widths.index(widest)} has {widest} targets for each position, but the vocabulary has {vocab_size} tokens"
        )
    if num_positions * widest > MAX_CELLS:
        raise ValueError(
            f"datum {widths.index(widest)} has {widest} targets for each position, and all {num_positions} positions of the "
            f"request get room for as many, which is more than {MAX_CELLS} cells; send it in a request of its own"
        )


def _require_inputs(where: str, name: str, kind: LossKind, datum: Datum) -> None:
    missing = kind.required - datum.inputs.keys()
    if missing:
        raise ValueError(f"{where} has no loss_fn_inputs[{min(missing)!r}], which the loss {name} reads")
    unknown = datum.inputs.keys() - kind.required - kind.optional
    if unknown:
        reads = ", ".join(sorted(kind.required | kind.optional))
        raise ValueError(f"{where} has loss_fn_inputs[{min(unknown)!r}], but the loss {name} reads only {reads}")
    targets = datum.inputs["target_tokens"]
    if not np.issubdtype(targets.dtype, np.integer):
        raise ValueError(f"{where}: target_tokens has dtype {targets.dtype}; it must be int64 or int32")
    for key, values in datum.inputs.items():
        is_wide = key in ("target_tokens", "weights") and targets.ndim == 2
        expected = targets.shape if is_wide else (len(datum.tokens),)
        if values.shape != expected or len(values) != len(datum.tokens):
            raise ValueError(
                f"{where}: {key} has shape {list(values.shape)}, but the model input has {len(datum.tokens)} tokens"
                + (f" and target_tokens has shape {list(targets.shape)}" if is_wide and key == "weights" else "")
            )


def _with_one_target(datum: Datum, loss_name: str) -> Sample:
    columns: dict[str, torch.Tensor] = {}
    for name, column in COLUMN_OF_INPUT.items():
        if name in datum.inputs:
            columns[column] = _floats(datum.inputs[name])
    if loss_name == "cross_entropy":
        columns.setdefault("loss_weights", torch.ones(len(datum.tokens)))
    if loss_name == "stable_reinforce":
        if datum.is_sampled is None:
            raise ValueError("stable_reinforce needs loss_fn_input_spans, which say which tokens were sampled")
        columns["is_sampled"] = _floats(datum.is_sampled)
    targets = torch.from_numpy(datum.inputs["target_tokens"].astype(np.int64))
    return Sample(tokens=torch.from_numpy(datum.tokens), targets=targets, columns=columns)


def _with_many_targets(datum: Datum, width: int) -> Sample:
    """A sample with `width` targets for each position: the K targets of the datum, padded with targets of id 0 and weight 0."""
    targets = datum.inputs["target_tokens"].astype(np.int64)
    weights = datum.inputs.get("weights", np.ones(targets.shape, np.float32))
    padding = ((0, 0), (0, width - targets.shape[1]))
    ids = torch.from_numpy(np.pad(targets, padding))
    columns = {
        "loss_weights": torch.ones(len(datum.tokens)),
        "target_ids": ids,
        "target_weights": _floats(np.pad(weights, padding)),
    }
    return Sample(tokens=torch.from_numpy(datum.tokens), targets=ids[:, 0].clone(), columns=columns)


def _floats(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


def write_output(batch: Batch, output: ForwardBackwardOutput) -> bytes:
    """The answer to a request: the logprobs of all datums, and the metrics. A metric that is not finite is left out, except loss:sum."""
    metrics = {name: value for name, value in output.metrics.items() if math.isfinite(value) or name == "loss:sum"}
    return write_forward_backward(_logprobs(batch, output), metrics)


def _logprobs(batch: Batch, output: ForwardBackwardOutput) -> Sequence[np.ndarray]:
    if batch.widths is None:
        return [row.numpy() for row in output.logprobs]
    assert output.target_logprobs is not None
    return [row[:, :width].numpy() for row, width in zip(output.target_logprobs, batch.widths, strict=True)]
