"""Turn one planned microbatch into tensors. No packing decision is made here; context.py knows what a rank holds of the rows.

B rows, L row length; S samples of T positions at most, one a row; K targets of one position.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_actors.engine.packing import Microbatch
from rl_actors.types import IGNORE_TARGET, TOP_K_COLUMNS, Sample, column_dtype

Span = tuple[int, int, int, int]
"""(sample, row, start, end) in whole rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    tokens_BL: Tensor
    targets_BL: Tensor  # IGNORE_TARGET at padding
    positions_BL: Tensor  # 0 where a document starts
    temperatures_BL: Tensor
    columns: dict[str, Tensor]  # each [B, L], TOP_K_COLUMNS [B, L, K]
    is_padding_BL: Tensor  # bool
    spans: list[Span]
    index_N: (
        Tensor  # on the host: where the samples' N positions are in the flattened whole rows, in the order of spans
    )
    to_device: Callable[[Tensor], Tensor]
    attention_masks: Any = None  # what the attention layers take

    def one_a_row(self) -> "RowPerSample":
        """Where each sample's positions are in whole rows, for losses that must see whole samples."""
        return RowPerSample(self, self.tokens_BL.shape)

    # Of rows that a rank holds whole; context.py has those of which it holds a part.

    def gather(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values at the positions that this rank holds -> values of the whole rows."""
        return dict(values)

    def take(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values of the whole rows -> values at the positions that this rank holds."""
        return dict(values)

    def is_counted(self) -> bool:
        """Whether what is computed from whole rows counts as this rank's, so that it counts once."""
        return True


class RowPerSample:
    """Moves [B, L, ...] of packed rows to [S, T, ...] with one sample a row, zeros behind its end, and back.

    Without samples S is 1 and T is L, so that a loss over nothing still has a shape.
    """

    def __init__(self, batch: PackedBatch, shape: torch.Size) -> None:
        """shape: of the whole rows."""
        self.shape = shape
        lengths_S = torch.tensor([end - start for _, _, start, end in batch.spans] or [0])
        longest = int(lengths_S.max()) if batch.spans else shape[1]
        inside_ST = torch.arange(longest) < lengths_S[:, None]
        index_ST = torch.zeros(inside_ST.shape, dtype=torch.int64)
        index_ST[inside_ST] = batch.index_N
        # Indices that the host knows: the device would have to be waited for to count a mask of its own.
        self.index_ST, self.inside_ST = batch.to_device(index_ST), batch.to_device(inside_ST)
        self.index_N, self.filled_N = (batch.to_device(x) for x in (batch.index_N, inside_ST.flatten().nonzero()[:, 0]))

    def unpack(self, values_BL: Tensor) -> Tensor:
        values_ST = values_BL.flatten(0, 1)[self.index_ST]
        inside_ST = self.inside_ST.view(*self.inside_ST.shape, *[1] * (values_ST.ndim - 2))
        return torch.where(inside_ST, values_ST, 0)

    def pack(self, values_ST: Tensor) -> Tensor:
        packed_N = values_ST.new_zeros(self.shape.numel(), *values_ST.shape[2:])
        packed_N[self.index_N] = values_ST.flatten(0, 1)[self.filled_N]
        return packed_N.unflatten(0, self.shape)


def make_batch(
    samples: Sequence[Sample],
    microbatch: Microbatch,
    column_names: Iterable[str],
    to_device: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> PackedBatch:
    """Lay the samples of a microbatch into rows. A document's positions start at 0.

    Every position of padding is a document of its own: as one long document it could pass the end of the rotary embedding.
    """
    shape = (len(microbatch.rows), microbatch.row_length)
    spans: list[Span] = []
    pieces: list[Sample | int] = []  # that the rows are made of, one behind the other: samples, and lengths of padding
    for row, indices in enumerate(microbatch.rows):
        end = 0
        for index in indices:
            start, end = end, end + len(samples[index])
            spans.append((index, row, start, end))
            pieces.append(samples[index])
        pieces.append(shape[1] - end)
    lengths_P = torch.tensor([piece if isinstance(piece, int) else len(piece) for piece in pieces])
    is_padding_P = torch.tensor([isinstance(piece, int) for piece in pieces])
    temperatures_P = torch.tensor([1.0 if isinstance(piece, int) else piece.temperature for piece in pieces])
    starts_P = lengths_P.cumsum(0) - lengths_P

    def spread(values_P: Tensor) -> Tensor:
        return values_P.repeat_interleave(lengths_P).view(shape)

    def lay(of_sample: Callable[[Sample], Tensor | None], fill: Tensor) -> Tensor:
        """fill: what is at a position where there is no sample, or nothing of it."""
        found = [None if isinstance(piece, int) else of_sample(piece) for piece in pieces]
        laid = [fill.expand(n, *fill.shape) if x is None else x for n, x in zip(lengths_P.tolist(), found, strict=True)]
        return torch.cat(laid).unflatten(0, shape)

    def column(name: str) -> Tensor:
        return lay(lambda sample: sample.columns.get(name), _nothing(samples, name))

    is_padding_BL = spread(is_padding_P)
    offsets_BL = torch.arange(is_padding_BL.numel()).view(shape) - spread(starts_P)
    tensors = {
        "tokens_BL": lay(lambda sample: sample.tokens, torch.tensor(0)),
        "targets_BL": lay(lambda sample: sample.targets, torch.tensor(IGNORE_TARGET)),
        "positions_BL": offsets_BL.masked_fill_(is_padding_BL, 0),
        "temperatures_BL": spread(temperatures_P),
        "is_padding_BL": is_padding_BL,
    }
    return PackedBatch(
        **{name: to_device(tensor) for name, tensor in tensors.items()},
        columns={name: to_device(column(name)) for name in column_names},
        spans=spans,
        index_N=(~is_padding_BL).flatten().nonzero()[:, 0],
        to_device=to_device,
    )


def _nothing(samples: Sequence[Sample], name: str) -> Tensor:
    """What a column holds where there is nothing: [], of TOP_K_COLUMNS [K]."""
    shape = (samples[0].columns[name].shape[1],) if name in TOP_K_COLUMNS else ()
    return torch.zeros(shape, dtype=column_dtype(name))


def model_inputs(batch: PackedBatch) -> dict[str, Any]:
    """Keyword arguments of torchtitan's model beside the tokens."""
    return {"positions": batch.positions_BL, "attention_masks": batch.attention_masks}
