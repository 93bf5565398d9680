"""Context parallelism: shards rows over ranks with torchtitan, and gathers them again.

B rows, L length of a row, C positions of a row on this rank, N positions of all samples.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.distributed.context_parallel import cp_shard

from rl_actors.engine.batch import AttentionMasks, PackedBatch, RowPerSample


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShards:
    """A batch of whole rows -> this rank's BatchShard, with masks."""

    masks: Callable[[Tensor], BlockMask]  # positions_BL -> flex attention's masks
    local_masks: Callable[[BlockMask], AttentionMasks]  # this rank's of them -> the attention layers'
    mesh: DeviceMesh
    load_balancer: str | None  # torchtitan's name; it may leave positions that are not adjacent

    def __call__(self, batch: PackedBatch) -> "BatchShard":
        shape = batch.tokens_BL.shape
        index_BL = torch.arange(shape[1], device=batch.tokens_BL.device).expand(shape)
        names = ("tokens_BL", "targets_BL", "positions_BL", "temperatures_BL", "is_padding_BL")
        named = {name: getattr(batch, name) for name in names} | {"index_BC": index_BL}
        shards, masks = cp_shard(
            self.mesh, (*named.values(), *batch.columns.values()), self.masks(batch.positions_BL), self.load_balancer
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
    """A rank's part of a batch: [B, C] for [B, L]. `spans` and `index_N` refer to whole rows."""

    index_BC: Tensor  # index in the whole row
    mesh: DeviceMesh

    def row_per_sample(self) -> RowPerSample:
        num_rows, num_held = self.tokens_BL.shape
        return RowPerSample(self, torch.Size((num_rows, num_held * self.mesh.size())))

    def gather(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        index_BL = self._gather(self.index_BC)
        whole: dict[str, Tensor] = {}
        for name, value_BC in values.items():
            # gathered_BL is in the order of the ranks; index_BL has each value's place in its row.
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
    """index [B, X] expanded to a value's shape [B, X, ...], for gather and scatter. X is C or L."""
    expanded = index_BX.view(*index_BX.shape, *[1] * (value.ndim - 2))
    return expanded.expand(*index_BX.shape, *value.shape[2:])
