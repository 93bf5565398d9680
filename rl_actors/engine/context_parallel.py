"""Context parallelism: each rank holds some positions of every row. This module shards the rows with torchtitan, and gathers them again.

A row is one sequence of the model's input, and holds one or more samples. This module does not depend on the model. In
shapes, B is the number of rows of a microbatch, L the length of a row, C the number of positions of a row that this
rank holds, and N the number of positions of all samples together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.distributed.context_parallel import cp_shard

from rl_actors.engine.batch import AttentionMasks, PackedBatch, RowPerSample


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRows:
    """Adds the attention masks to a batch. Used without context parallelism, when every rank holds whole rows."""

    masks: Callable[[PackedBatch], AttentionMasks]

    def __call__(self, batch: PackedBatch) -> PackedBatch:
        return replace(batch, attention_masks=self.masks(batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShards:
    """Turns a batch of whole rows into this rank's BatchShard: a part of each row, with the part's attention masks.

    A load balancer makes the work in attention about equal on all ranks. The positions of a part are then not always
    adjacent.
    """

    masks: Callable[[Tensor], BlockMask]  # positions_BL -> flex attention's masks
    # This rank's shard of flex attention's masks -> the argument of the attention layers.
    local_masks: Callable[[BlockMask], AttentionMasks]
    mesh: DeviceMesh
    load_balancer: str | None  # torchtitan's name of the load balancer; None: no load balancer

    def __call__(self, batch: PackedBatch) -> "BatchShard":
        shape = batch.tokens_BL.shape
        index_BL = torch.arange(shape[1], device=batch.tokens_BL.device).expand(shape)
        named = {
            "tokens_BL": batch.tokens_BL,
            "targets_BL": batch.targets_BL,
            "positions_BL": batch.positions_BL,
            "temperatures_BL": batch.temperatures_BL,
            "is_padding_BL": batch.is_padding_BL,
            "index_BC": index_BL,
        }
        shards, masks = cp_shard(
            self.mesh,
            (*named.values(), *batch.columns.values()),
            self.masks(batch.positions_BL),
            self.load_balancer,
        )
        return BatchShard(
            **dict(zip(named, shards[: len(named)], strict=True)),
            columns=dict(zip(batch.columns, shards[len(named) :], strict=True)),
            spans=batch.spans,
            index_N=batch.index_N,
            to_device=batch.to_device,
            attention_masks=self.local_masks(masks),
            mesh=self.mesh,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShard(PackedBatch):
    """A rank's part of a batch. A tensor of shape [B, L] in PackedBatch has the shape [B, C] here.

    `spans` and `index_N` refer to the whole rows.
    """

    index_BC: Tensor  # for each position that this rank holds, its index in the whole row
    mesh: DeviceMesh

    def row_per_sample(self) -> RowPerSample:
        num_rows, num_held = self.tokens_BL.shape
        return RowPerSample(self, torch.Size((num_rows, num_held * self.mesh.size())))

    def gather(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        index_BL = self._gather(self.index_BC)
        whole: dict[str, Tensor] = {}
        for name, value_BC in values.items():
            # In gathered_BL the part of rank 0 comes first, then the part of rank 1, and so on. index_BL has the index
            # of each of these values in the whole row. scatter_ moves each value to its index.
            gathered_BL = self._gather(value_BC)
            whole[name] = torch.empty_like(gathered_BL).scatter_(1, _like(index_BL, gathered_BL), gathered_BL)
        return whole

    def take(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.gather(1, _like(self.index_BC, value)) for name, value in values.items()}

    def reports_whole_rows(self) -> bool:
        return self.mesh.get_local_rank() == 0

    def _gather(self, value_BC: Tensor) -> Tensor:
        gathered = funcol.all_gather_single(value_BC.contiguous(), gather_dim=1, group=self.mesh.get_group())
        return funcol.wait_tensor(gathered)


def _like(index_BX: Tensor, value: Tensor) -> Tensor:
    """Expand an index [B, X] to the shape of a value [B, X, ...], as gather and scatter need it. X is C or L."""
    expanded = index_BX.view(*index_BX.shape, *[1] * (value.ndim - 2))
    return expanded.expand(*index_BX.shape, *value.shape[2:])
