"""Converts the Datums of a request to Samples for a trainer, and the trainer's output to the answer.

Both have target i at position i, so nothing is shifted. K targets of a position (cross_entropy).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from controllers.tinker_server import codec
from controllers.tinker_server.codec import Datum
from controllers.tinker_server.counts import require_few_fields
from controllers.tinker_server.losses import KINDS, OUR_NAMES, Clipped, StableReinforce, make_loss
from rl_actors import metrics
from rl_actors.clients.limits import TrainerLimits
from rl_actors.losses import CrossEntropy, Loss
from rl_actors.types import ForwardBackwardOutput, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples and loss of a forward or forward_backward request.

    A group is a call of the trainer, which pads to one K, so it has only datums of at least K / 2.
    """

    groups: list[list[Sample]]
    order: list[list[int]]  # index in the request of each datum of each group
    loss: Loss
    widths: list[int] | None  # K of each datum; None if target_tokens is one-dimensional

    @property
    def num_positions(self) -> int:
        return sum(len(sample) for group in self.groups for sample in group)

    @property
    def num_datums(self) -> int:
        return sum(map(len, self.groups))

    @property
    def num_bytes(self) -> int:
        total = 0
        for sample in itertools.chain(*self.groups):
            total += sum(tensor.nbytes for tensor in (sample.tokens, sample.targets, *sample.columns.values()))
        return total

    def merged(self, outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
        """One output in the order of the request. Means are weighted by the groups' positions."""
        if len(outputs) == 1:
            return outputs[0]
        logprobs = [row for output in outputs for row in output.logprobs]
        target_logprobs = [row for output in outputs for row in output.target_logprobs or ()]
        partials = []
        for output, group in zip(outputs, self.groups, strict=True):
            weight = sum(map(len, group))
            means = {name: (value * weight, weight) for name, value in output.metrics.items() if name.endswith(":mean")}
            partials.append({**output.metrics, **means})
        places = np.argsort(np.concatenate(self.order))
        return replace(
            outputs[0],
            logprobs=[logprobs[place] for place in places],
            target_logprobs=[target_logprobs[place] for place in places],
            metrics=metrics.finish(metrics.merge(partials)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCall:
    """A forward or forward_backward request. Wrong data is an error of its answer."""

    model_id: str
    seq_id: int  # 0 if the client sent none
    forward_only: bool
    batch: Batch | Exception

    @property
    def num_bytes(self) -> int:
        return 0 if isinstance(self.batch, Exception) else self.batch.num_bytes


def read_call(body: bytes, limits: TrainerLimits) -> TrainingCall:
    """Raises ValueError if the body is not a ForwardBackwardRequest."""
    require_few_fields(body)
    message = codec.parse_forward_backward(body)
    batch: Batch | Exception
    try:
        batch = read_batch(message, limits)
    except Exception as error:
        batch = error.with_traceback(None)
    return TrainingCall(
        model_id=message.model_id, seq_id=message.seq_id, forward_only=message.forward_only, batch=batch
    )


def read_batch(message: Any, limits: TrainerLimits) -> Batch:
    """Of a ForwardBackwardRequest. Raises ValueError naming the datum and the input."""
    loss = make_loss(message.loss_fn, codec.read_loss_config(message))
    data = codec.read_data(message)
    if not data:
        raise ValueError("the request has no datums")
    for index, datum in enumerate(data):
        _require_inputs(f"datum {index}", message.loss_fn, datum)
    dimensions = {datum.inputs["target_tokens"].ndim for datum in data}
    if len(dimensions) > 1:
        raise ValueError(
            "target_tokens has one dimension in some datums of the request and two in others; the number must be the same in all datums"
        )
    if dimensions == {1}:
        samples = [_with_one_target(datum, loss) for datum in data]
        return Batch(groups=[samples], order=[list(range(len(data)))], loss=loss, widths=None)
    if message.loss_fn != "cross_entropy":
        raise ValueError(
            f"target_tokens has two dimensions, which only cross_entropy takes; the loss is {message.loss_fn}"
        )
    return _with_groups(data, loss, limits)


def _with_groups(data: list[Datum], loss: Loss, limits: TrainerLimits) -> Batch:
    widths = [datum.inputs["target_tokens"].shape[1] for datum in data]
    if max(widths) > limits.vocab_size:
        raise ValueError(
            f"datum {widths.index(max(widths))} has {max(widths)} targets for each position, but the vocabulary has "
            f"{limits.vocab_size} tokens"
        )
    order: dict[int, list[int]] = {}
    for index, width in enumerate(widths):
        order.setdefault(max(width - 1, 0).bit_length(), []).append(index)
    groups = []
    for indices in order.values():
        width = max(1, *(widths[index] for index in indices))
        groups.append([_with_many_targets(data[index], width) for index in indices])
    batch = Batch(groups=groups, order=list(order.values()), loss=loss, widths=widths)
    if len(groups) > 1:
        # the trainer checks a group only in its turn, and a refused request must add no gradient
        _check_groups(batch, limits)
    return batch


def _check_groups(batch: Batch, limits: TrainerLimits) -> None:
    for group, indices in zip(batch.groups, batch.order, strict=True):
        for sample, index in zip(group, indices, strict=True):
            try:
                limits.check_samples([sample], batch.loss)
            except (ValueError, TypeError) as error:
                raise type(error)(f"datum {index}: {error}") from None
        limits.check_samples(group, batch.loss)


def _require_inputs(where: str, name: str, datum: Datum) -> None:
    kind = KINDS[name]
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


def _with_one_target(datum: Datum, loss: Loss) -> Sample:
    inputs = dict(datum.inputs)
    targets = torch.tensor(inputs.pop("target_tokens"), dtype=torch.int64)
    columns = {OUR_NAMES.get(name, name): torch.tensor(values).float() for name, values in inputs.items()}
    num_positions = len(datum.tokens)
    if isinstance(loss, CrossEntropy):
        columns.setdefault("loss_weights", torch.ones(num_positions))
    if isinstance(loss, Clipped):
        columns.setdefault("clip_low", torch.full((num_positions,), loss.clip_low))
        columns.setdefault("clip_high", torch.full((num_positions,), loss.clip_high))
    if isinstance(loss, StableReinforce):
        if datum.is_sampled is None:
            raise ValueError("stable_reinforce needs loss_fn_input_spans, which say which tokens were sampled")
        columns["is_sampled"] = torch.tensor(datum.is_sampled).float()
    return Sample(tokens=torch.from_numpy(datum.tokens), targets=targets, columns=columns)


def _with_many_targets(datum: Datum, width: int) -> Sample:
    """A sample with the datum's K targets per position, padded to `width` with id 0 and weight 0."""
    targets = datum.inputs["target_tokens"]
    weights = datum.inputs.get("weights", np.ones(targets.shape, np.float32))
    padding = ((0, 0), (0, width - targets.shape[1]))
    ids = torch.tensor(np.pad(targets, padding), dtype=torch.int64)
    columns = {
        "loss_weights": torch.ones(len(datum.tokens)),
        "target_ids": ids,
        "target_weights": torch.tensor(np.pad(weights, padding)).float(),
    }
    return Sample(tokens=torch.from_numpy(datum.tokens), targets=ids[:, 0].clone(), columns=columns)


def write_output(batch: Batch, output: ForwardBackwardOutput) -> bytes:
    """All logprobs, and the metrics that are finite, or loss:sum."""
    finite = {name: value for name, value in output.metrics.items() if math.isfinite(value) or name == "loss:sum"}
    if batch.widths is None:
        return codec.write_forward_backward([row.numpy() for row in output.logprobs], finite)
    assert output.target_logprobs is not None
    rows = zip(output.target_logprobs, batch.widths, strict=True)
    return codec.write_forward_backward([row[:, :width].numpy() for row, width in rows], finite)
