"""Turns one planned microbatch into tensors of whole rows, and results into values of samples.

Packed tensors have B rows of length L, tensors with one sample in each row S rows of length T.
N positions of all samples, P pieces (a sample, or a row's padding), K ids of a position.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.models.common.attention import VarlenMetadata

from rl_actors.engine.packing import Microbatch
from rl_actors.metrics import HostCopy, Partials, PartialsCopy
from rl_actors.types import IGNORE_TARGET, TOP_K_COLUMNS, Sample, column_dtype

Span = tuple[int, int, int, int]
"""(index of a sample, index of its row, start, end)."""

AttentionMasks: TypeAlias = Tensor | BlockMask | VarlenMetadata
"""Where documents begin: a dense mask on a CPU, flex attention's or FlashAttention's on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """A microbatch of whole rows. BatchShard has a context-parallel rank's part of them."""

    tokens_BL: Tensor
    targets_BL: Tensor  # IGNORE_TARGET at padding
    positions_BL: Tensor  # position ids; 0 where a sample starts, and at padding
    temperatures_BL: Tensor
    columns: dict[str, Tensor]  # [B, L], for TOP_K_COLUMNS [B, L, K]; 0 where the target is IGNORE_TARGET
    is_padding_BL: Tensor  # bool
    spans: list[Span]
    index_N: Tensor  # on the host: of each sample position in the flattened rows, as in `spans`
    to_device: Callable[[Tensor], Tensor]
    attention_masks: AttentionMasks | None = None

    def model_inputs(self) -> dict[str, object]:
        """Keyword arguments of torchtitan's model."""
        return {"positions": self.positions_BL, "attention_masks": self.attention_masks}

    def row_per_sample(self) -> "RowPerSample":
        """For losses that must see whole samples."""
        return RowPerSample(self, self.tokens_BL.shape)

    # BatchShard overrides the next three.

    def gather(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """At the positions of this rank -> of the whole rows."""
        return dict(values)

    def take(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of the whole rows -> at the positions of this rank."""
        return dict(values)

    def reports_whole_rows(self) -> bool:
        """True on the one context-parallel rank that reports metrics of whole rows."""
        return True


class RowPerSample:
    """Packed rows [B, L, ...] <-> rows of one sample [S, T, ...], padded with zeros.

    Without samples S is 1 and T is L, so that a loss still gets rows.
    """

    def __init__(self, batch: PackedBatch, shape: torch.Size) -> None:
        """shape: [B, L] of the whole rows."""
        self.shape = shape
        lengths_S = torch.tensor([end - start for _, _, start, end in batch.spans] or [0])
        longest = int(lengths_S.max()) if batch.spans else shape[1]
        is_inside_ST = torch.arange(longest) < lengths_S[:, None]
        index_ST = torch.zeros(is_inside_ST.shape, dtype=torch.int64)
        index_ST[is_inside_ST] = batch.index_N
        # on the host: indexing by a mask on the device would wait for the count of its True entries
        self.index_ST = batch.to_device(index_ST)
        self.is_inside_ST = batch.to_device(is_inside_ST)
        self.index_N = batch.to_device(batch.index_N)
        self.filled_N = batch.to_device(is_inside_ST.flatten().nonzero()[:, 0])

    def unpack(self, values_BL: Tensor) -> Tensor:
        """[B, L, ...] -> [S, T, ...], with zeros after each sample."""
        values_ST = values_BL.flatten(0, 1)[self.index_ST]
        is_inside_ST = self.is_inside_ST.view(*self.is_inside_ST.shape, *[1] * (values_ST.ndim - 2))
        return torch.where(is_inside_ST, values_ST, 0)

    def pack(self, values_ST: Tensor) -> Tensor:
        """[S, T, ...] -> [B, L, ...], with zeros at padding."""
        packed_N = values_ST.new_zeros(self.shape.numel(), *values_ST.shape[2:])
        packed_N[self.index_N] = values_ST.flatten(0, 1)[self.filled_N]
        return packed_N.unflatten(0, self.shape)


class _Pieces:
    """The rows as one sequence of pieces. A row ends with a piece of padding, maybe of length 0."""

    def __init__(self, samples: Sequence[Sample], microbatch: Microbatch) -> None:
        self.shape = (len(microbatch.rows), microbatch.row_length)
        self.spans: list[Span] = []
        self.samples: list[Sample | None] = []  # None: padding
        self.lengths: list[int] = []
        for row, indices in enumerate(microbatch.rows):
            end = 0
            for index in indices:
                start = end
                end = end + len(samples[index])
                self.spans.append((index, row, start, end))
                self.samples.append(samples[index])
                self.lengths.append(end - start)
            self.samples.append(None)
            self.lengths.append(microbatch.row_length - end)
        self.lengths_P = torch.tensor(self.lengths)

    def spread(self, values_P: Tensor) -> Tensor:
        """[B, L], with each piece's value at all its positions."""
        return values_P.repeat_interleave(self.lengths_P).view(self.shape)

    def lay(self, tensor_of: Callable[[Sample], Tensor | None], fill: Tensor) -> Tensor:
        """The samples' tensors as [B, L, ...], with `fill` at padding and for tensor_of's None."""
        laid: list[Tensor] = []
        for sample, length in zip(self.samples, self.lengths, strict=True):
            tensor = None if sample is None else tensor_of(sample)
            laid.append(fill.expand(length, *fill.shape) if tensor is None else tensor)
        return torch.cat(laid).unflatten(0, self.shape)

    def column(self, name: str, fill: Tensor) -> Tensor:
        return self.lay(lambda sample: sample.columns.get(name), fill)


def make_batch(
    samples: Sequence[Sample],
    microbatch: Microbatch,
    column_names: Iterable[str],
    to_device: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> PackedBatch:
    """Put the samples of a microbatch into rows. Position ids start at 0 in every sample.

    Every padded token has the id 0, because counted ids could exceed the rotary embedding's table.
    """
    pieces = _Pieces(samples, microbatch)
    is_padding_BL = pieces.spread(torch.tensor([sample is None for sample in pieces.samples]))
    temperatures_P = torch.tensor([1.0 if sample is None else sample.temperature for sample in pieces.samples])
    starts_P = pieces.lengths_P.cumsum(0) - pieces.lengths_P
    offsets_BL = torch.arange(is_padding_BL.numel()).view(pieces.shape) - pieces.spread(starts_P)
    targets_BL = to_device(pieces.lay(lambda sample: sample.targets, torch.tensor(IGNORE_TARGET)))
    has_no_target_BL = targets_BL == IGNORE_TARGET
    columns: dict[str, Tensor] = {}
    for name in column_names:
        # where there is no value: a scalar 0, or K zeros for TOP_K_COLUMNS
        shape = samples[0].columns[name].shape[1:] if name in TOP_K_COLUMNS else ()
        column = to_device(pieces.column(name, torch.zeros(shape, dtype=column_dtype(name))))
        # so that these positions add nothing to losses and metrics
        columns[name] = column.masked_fill_(has_no_target_BL.view(*pieces.shape, *[1] * (column.ndim - 2)), 0)
    return PackedBatch(
        tokens_BL=to_device(pieces.lay(lambda sample: sample.tokens, torch.tensor(0))),
        targets_BL=targets_BL,
        positions_BL=to_device(offsets_BL.masked_fill_(is_padding_BL, 0)),
        temperatures_BL=to_device(pieces.spread(temperatures_P)),
        columns=columns,
        is_padding_BL=to_device(is_padding_BL),
        spans=pieces.spans,
        index_N=(~is_padding_BL).flatten().nonzero()[:, 0],
        to_device=to_device,
    )


class MicrobatchOutput:
    """Values and metrics of one microbatch, copied to the host before the backward pass begins."""

    def __init__(
        self, batch: PackedBatch, values: Mapping[str, Tensor], metrics: Partials, to_host: type[HostCopy]
    ) -> None:
        """values: by name, [B, L, ...] over whole rows."""
        self.indices = [index for index, *_ in batch.spans]
        self.lengths = [end - start for _, _, start, end in batch.spans]
        self._index_N = batch.index_N
        self._values = {name: to_host(value.detach().flatten(0, 1).float()) for name, value in values.items()}
        self._metrics = PartialsCopy(metrics, to_host)

    def values(self) -> dict[str, Tensor]:
        """The values at the samples' positions, [N, ...] float32 on the host. Waits for the copy."""
        return {name: copy.wait()[self._index_N] for name, copy in self._values.items()}

    def metrics(self) -> Partials:
        """The metrics as numbers. Waits for the copy."""
        return self._metrics.wait()
