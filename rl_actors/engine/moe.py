"""Corrects dtype, gradients and counters of torchtitan's mixture of experts.

B rows, L length of a row, D hidden size, F inner width of an expert, E experts, K experts per
token, R tokens for the experts of this rank (once for each expert).
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.models.common.moe import GroupedExperts, MoE

from rl_actors.engine.batch import PackedBatch


class Experts(GroupedExperts):
    """Experts that compute in the dtype of their input; torchtitan's cast to bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        w1_EFD, w2_EDF, w3_EFD = (_local(w).to(x_RD.dtype) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        ends_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        gate_RF = self._grouped_mm(A=x_RD, B_t=w1_EFD.transpose(-2, -1), offs=ends_E)
        up_RF = self._grouped_mm(A=x_RD, B_t=w3_EFD.transpose(-2, -1), offs=ends_E)
        return self._grouped_mm(A=F.silu(gate_RF) * up_RF, B_t=w2_EDF.transpose(-2, -1), offs=ends_E)


def wait_for_input(model: nn.Module) -> None:
    """With one row under sequence parallelism the experts' input may be a pending
    AsyncCollectiveTensor, which local_map unwraps to a tensor that autograd does not track. clone()
    waits and keeps the graph.
    """
    for block in model.layers.values():
        if block.moe_enabled:
            block.moe.routed_experts.register_forward_pre_hook(_wait_for_all_gather)


def _wait_for_all_gather(module: nn.Module, args: tuple) -> tuple:
    x_BLD, *others = args
    is_gathering = isinstance(x_BLD, DTensor) and isinstance(x_BLD.to_local(), AsyncCollectiveTensor)
    return (x_BLD.clone() if is_gathering else x_BLD, *others)


class RouterCounters:
    """Keeps padding out of torchtitan's counters of tokens per expert, and resets them."""

    def __init__(self, model: nn.Module) -> None:
        self.moes: list[MoE] = [block.moe for block in model.layers.values() if block.moe_enabled]
        self.is_padding_BL: Tensor | None = None
        for moe in self.moes:
            moe.router.register_forward_hook(partial(self._subtract_padding, moe))

    def start_microbatch(self, batch: PackedBatch) -> None:
        """Call this before each forward pass."""
        self.is_padding_BL = batch.is_padding_BL

    def reset(self) -> None:
        """Set all counters to zero, also after a step without an update."""
        for moe in self.moes:
            moe.tokens_per_expert_E.zero_()

    def _subtract_padding(self, moe: MoE, router: nn.Module, args: tuple, output: tuple[Tensor, ...]) -> None:
        """Lower the counter of every expert that padding chose. torchtitan then adds all positions."""
        if not moe.training:
            return
        expert_ids_BLK = output[1]
        is_padding_BL = self.is_padding_BL
        assert is_padding_BL is not None
        if isinstance(expert_ids_BLK, DTensor):
            # with expert and tensor parallelism a rank routes only some positions of a row
            mesh = expert_ids_BLK.device_mesh
            placements = expert_ids_BLK.placements
            is_padding_BL = _local(distribute_tensor(is_padding_BL, mesh, placements, src_data_rank=None))
        counts_E = _local(moe.tokens_per_expert_E)
        ids_BLK = _local(expert_ids_BLK)
        padding_BLK = is_padding_BL[..., None].expand_as(ids_BLK).to(counts_E.dtype)
        # all positions, because the host would wait for the device to select only the padding
        counts_E.scatter_add_(0, ids_BLK.flatten(), -padding_BLK.flatten())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
