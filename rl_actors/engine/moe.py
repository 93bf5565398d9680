"""Three corrections to torchtitan's mixture of experts.

The class `Experts` computes in the dtype of its input. `wait_for_input` makes sure that gradients flow through the
input of the experts. `RouterCounters` keeps padding out of the counters of tokens per expert.

In shapes, B is the number of rows, L the length of a row, D the hidden size, F the inner width of an expert, E the
number of experts and K the number of experts per token. R is the number of tokens that the experts of this rank get. A
token counts once for each expert that gets it.
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
    """Experts that compute in the dtype of their input.

    torchtitan's experts always cast to bfloat16. Because of the rounding, two float32 runs that should give equal
    results would differ by about 1e-2.
    """

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
    """Add hooks that make the experts wait until the all-gather of their input is done.

    In a sequence-parallel model the ranks all-gather the positions of each row before the experts. With several rows
    torch has to rearrange the gathered data, so torch waits for the all-gather. With one row torch need not rearrange
    the data. The experts then get an AsyncCollectiveTensor, whose all-gather may still run. The experts run inside
    torch's local_map, which unwraps an AsyncCollectiveTensor to a plain tensor. Autograd does not track this tensor. So
    without the hooks no gradient would reach the layers before the experts.
    """
    for block in model.layers.values():
        if block.moe_enabled:
            block.moe.routed_experts.register_forward_pre_hook(_wait_for_all_gather)


def _wait_for_all_gather(module: nn.Module, args: tuple) -> tuple:
    x_BLD, *others = args
    is_gathering = isinstance(x_BLD, DTensor) and isinstance(x_BLD.to_local(), AsyncCollectiveTensor)
    # Any operation on the tensor waits for the all-gather.
    return (x_BLD.clone() if is_gathering else x_BLD, *others)


class RouterCounters:
    """Keeps padding out of torchtitan's counters of tokens per expert, and resets the counters at the end of a step.

    torchtitan computes the load-balancing bias from the counts. torchtitan also counts padding, and the amount of
    padding depends on the packing. This class subtracts the padding, so that the bias does not depend on how the
    samples are packed. torchtitan counts only in training mode. A call without a backward pass runs in eval mode, so
    such a call does not change the counters. A dense model has no counters.
    """

    def __init__(self, model: nn.Module) -> None:
        self.moes: list[MoE] = [block.moe for block in model.layers.values() if block.moe_enabled]
        self.is_padding_BL: Tensor | None = None
        for moe in self.moes:
            moe.router.register_forward_hook(partial(self._subtract_padding, moe))

    def start_microbatch(self, batch: PackedBatch) -> None:
        """Remember which positions of the batch are padding. Call this before each forward pass."""
        self.is_padding_BL = batch.is_padding_BL

    def reset(self) -> None:
        """Set all counters to zero. Call this at the end of a step, whether the weights were updated or not."""
        for moe in self.moes:
            moe.tokens_per_expert_E.zero_()

    def _subtract_padding(self, moe: MoE, router: nn.Module, args: tuple, output: tuple[Tensor, ...]) -> None:
        """Forward hook of a router: lowers the counter of every expert that a padding position chose.

        After this hook has run, torchtitan's MoE block adds all positions, including padding, to the counters. So the
        padding cancels out.
        """
        if not moe.training:
            return
        expert_ids_BLK = output[1]
        is_padding_BL = self.is_padding_BL
        assert is_padding_BL is not None
        if isinstance(expert_ids_BLK, DTensor):
            # If expert and tensor parallelism are used together, each rank routes and counts only some positions of
            # each row. So each rank takes only its shard of the mask.
            mesh = expert_ids_BLK.device_mesh
            placements = expert_ids_BLK.placements
            is_padding_BL = _local(distribute_tensor(is_padding_BL, mesh, placements, src_data_rank=None))
        counts_E = _local(moe.tokens_per_expert_E)
        ids_BLK = _local(expert_ids_BLK)
        padding_BLK = is_padding_BL[..., None].expand_as(ids_BLK).to(counts_E.dtype)
        # scatter_add_ gets all positions, and positions that are not padding add 0. To select only the padding, the
        # host would have to wait for the device, because the host would need the number of padding positions.
        counts_E.scatter_add_(0, ids_BLK.flatten(), -padding_BLK.flatten())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
