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
class Batch:
    tokens_BL: Tensor
    targets_BL: Tensor  # IGNORE_TARGET at padding
    positions_BL: Tensor  # 0 where a document starts
    temperatures_BL: Tensor
    columns: dict[str, Tensor]  # each [B, L], TOP_K_COLUMNS [B, L, K]
    is_padding_BL: Tensor  # bool
    spans: list[Span]
    attention_masks: Any = None  # what the attention layers take

    def one_a_row(self) -> "RowPerSample":
        """Where each sample's positions are in whole rows, for losses that must see whole samples."""
        return RowPerSample(self.spans, self.tokens_BL.shape, self.tokens_BL.device)

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

    def __init__(self, spans: Sequence[Span], shape: torch.Size, device: torch.device) -> None:
        self.shape = shape  # of the whole rows
        length = max((end - start for _, _, start, end in spans), default=self.shape[1])
        index_ST = torch.full((max(1, len(spans)), length), -1, dtype=torch.int64)
        for row_S, (_, row, start, end) in zip(index_ST, spans, strict=False):
            row_S[: end - start] = torch.arange(row * self.shape[1] + start, row * self.shape[1] + end)
        self.index_ST = index_ST.to(device)

    def unpack(self, values_BL: Tensor) -> Tensor:
        values_ST = values_BL.flatten(0, 1)[self.index_ST.clamp(min=0)]
        inside_ST = (self.index_ST >= 0).view(*self.index_ST.shape, *[1] * (values_ST.ndim - 2))
        return torch.where(inside_ST, values_ST, 0)

    def pack(self, values_ST: Tensor) -> Tensor:
        inside_ST = self.index_ST >= 0
        packed_N = values_ST.new_zeros(self.shape.numel(), *values_ST.shape[2:])
        packed_N[self.index_ST[inside_ST]] = values_ST[inside_ST]
        return packed_N.unflatten(0, self.shape)


def make_batch(
    samples: Sequence[Sample],
    microbatch: Microbatch,
    column_names: Iterable[str],
    to_device: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Batch:
    """Lay the samples of a microbatch into rows. A document's positions start at 0.

    Every position of padding is a document of its own: as one long document it could pass the end of the rotary embedding.
    """
    shape = (len(microbatch.rows), microbatch.row_length)
    spans = []
    for row, indices in enumerate(microbatch.rows):
        end = 0
        for index in indices:
            start, end = end, end + len(samples[index])
            spans.append((index, row, start, end))
    laid = [samples[index] for index, *_ in spans]
    lengths_S = torch.tensor([len(sample) for sample in laid], dtype=torch.int64)
    starts_S = torch.tensor([row * shape[1] + start for _, row, start, _ in spans], dtype=torch.int64)
    # N positions that hold samples: where each lies in its document and in the rows.
    documents_N = torch.arange(len(laid)).repeat_interleave(lengths_S)
    positions_N = torch.arange(len(documents_N)) - (lengths_S.cumsum(0) - lengths_S)[documents_N]
    index_N = starts_S[documents_N] + positions_N

    def lay(values: list[Tensor], into: Tensor) -> Tensor:
        if values:
            into.view(-1, *into.shape[2:])[index_N] = torch.cat(values)
        return into

    tokens_BL = lay([sample.tokens for sample in laid], torch.zeros(shape, dtype=torch.int64))
    targets_BL = lay([sample.targets for sample in laid], torch.full(shape, IGNORE_TARGET))
    positions_BL = lay([positions_N], torch.zeros(shape, dtype=torch.int64))
    temperatures_S = torch.tensor([sample.temperature for sample in laid], dtype=torch.float32)
    temperatures_BL = lay([temperatures_S[documents_N]], torch.ones(shape))
    is_padding_BL = lay([torch.zeros(len(documents_N), dtype=torch.bool)], torch.ones(shape, dtype=torch.bool))
    columns = {name: _empty_column(samples, name, shape) for name in column_names}
    for name, column_BL in columns.items():
        if any(name in sample.columns for sample in laid):
            lay([s.columns[name] if name in s.columns else torch.zeros(len(s)) for s in laid], column_BL)
    return Batch(
        tokens_BL=to_device(tokens_BL),
        targets_BL=to_device(targets_BL),
        positions_BL=to_device(positions_BL),
        temperatures_BL=to_device(temperatures_BL),
        columns={name: to_device(column) for name, column in columns.items()},
        is_padding_BL=to_device(is_padding_BL),
        spans=spans,
    )


def _empty_column(samples: Sequence[Sample], name: str, shape: tuple[int, int]) -> Tensor:
    if name not in TOP_K_COLUMNS:
        return torch.zeros(shape)
    return torch.zeros(*shape, samples[0].columns[name].shape[1], dtype=column_dtype(name))
