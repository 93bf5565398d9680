"""Turn one planned microbatch into tensors. No packing decision is made here.

B rows, L row length.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_actors.engine.packing import Microbatch
from rl_actors.types import IGNORE_TARGET, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    tokens_BL: Tensor
    targets_BL: Tensor  # IGNORE_TARGET at padding
    positions_BL: Tensor  # 0 where a document starts
    temperatures_BL: Tensor
    columns: dict[str, Tensor]  # each [B, L]
    spans: list[tuple[int, int, int, int]]  # (sample, row, start, end)


def make_batch(
    samples: Sequence[Sample], microbatch: Microbatch, column_names: Iterable[str], device: torch.device
) -> Batch:
    """Lay the samples of a microbatch into rows. A document's positions start at 0.

    Every position of padding is a document of its own: as one long document it could pass the end of the rotary embedding.
    """
    shape = (len(microbatch.rows), microbatch.row_length)
    tokens_BL = torch.zeros(shape, dtype=torch.int64)
    targets_BL = torch.full(shape, IGNORE_TARGET, dtype=torch.int64)
    positions_BL = torch.zeros(shape, dtype=torch.int64)
    temperatures_BL = torch.ones(shape)
    columns = {name: torch.zeros(shape) for name in column_names}
    spans = []
    for row, indices in enumerate(microbatch.rows):
        start = 0
        for index in indices:
            sample = samples[index]
            end = start + len(sample)
            spans.append((index, row, start, end))
            tokens_BL[row, start:end] = sample.tokens
            targets_BL[row, start:end] = sample.targets
            positions_BL[row, start:end] = torch.arange(len(sample))
            temperatures_BL[row, start:end] = sample.temperature
            for name, column_BL in columns.items():
                if name in sample.columns:
                    column_BL[row, start:end] = sample.columns[name]
            start = end
    move = lambda x: x.to(device, non_blocking=True)  # noqa: E731
    return Batch(
        tokens_BL=move(tokens_BL),
        targets_BL=move(targets_BL),
        positions_BL=move(positions_BL),
        temperatures_BL=move(temperatures_BL),
        columns={name: move(column) for name, column in columns.items()},
        spans=spans,
    )
