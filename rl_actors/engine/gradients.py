"""`Gradients`, a rank's shards of all gradients. It computes the norm of the gradients over all ranks, scales the
gradients, and finds those that are not finite. It does not step the optimizer.

This module works on a rank's own shards as plain tensors. With DTensors, the host spent 17 ms on an optim_step of a
model with 28 transformer blocks, and DTensor's dispatch took 11 of these 17 ms.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from rl_actors.engine.collectives import by_rank
from rl_actors.types import MAX_NAMES_REPORTED

Layout = tuple[DeviceMesh, tuple[Placement, ...]] | None
"""Mesh and placements of a parameter and of its gradient. None: the parameter is whole on every rank."""

ParametersByLayout = Mapping[Layout, Sequence[tuple[str, nn.Parameter]]]


def by_layout(named: Iterable[tuple[str, nn.Parameter]]) -> ParametersByLayout:
    """Trained parameters grouped by layout.

    Call this once and keep the result: it is slow to look up the layouts of hundreds of DTensors.
    """
    groups: dict[Layout, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
            groups.setdefault(layout, []).append((name, parameter))
    return groups


class Gradients:
    """This rank's shards of the gradients of one step. Parameters without a gradient are left out."""

    @torch.no_grad()
    def __init__(
        self,
        parameters: ParametersByLayout,
        pipeline_group: dist.ProcessGroup | None,
        device: torch.device,
        norms: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    ) -> None:
        """pipeline_group: this rank's pipeline group, which has one rank for each stage. None if the model is not
        pipelined.

        norms: a function that returns the 2-norm of each tensor as a scalar tensor: `norms` of a Machine (machine.py).
        """
        self.pipeline_group = pipeline_group
        self.device = device
        self.names: list[str] = []
        self.shards: list[Tensor] = []
        self.norms: dict[Layout, Sequence[Tensor]] = {}
        for layout, named in parameters.items():
            with_gradient = [(name, parameter.grad) for name, parameter in named if parameter.grad is not None]
            if with_gradient:
                shards = [local(gradient) for _, gradient in with_gradient]
                self.names += [name for name, _ in with_gradient]
                self.shards += shards
                self.norms[layout] = norms(shards)

    def norm(self) -> Tensor:
        """The 2-norm of all gradients over all ranks, a float64 scalar on the device.

        The host does not wait until the device has computed the norm.
        """
        totals = [_squared(layout, norms) for layout, norms in self.norms.items()]
        total = torch.stack([*totals, torch.zeros((), dtype=torch.float64, device=self.device)]).sum()
        if self.pipeline_group is not None:
            dist.all_reduce(total, group=self.pipeline_group)
        return total.sqrt()

    @torch.no_grad()
    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients in place by a factor, which is a scalar tensor."""
        if self.shards:
            torch._foreach_mul_(self.shards, factor.to(self.shards[0].dtype))

    def nonfinite(self) -> tuple[str, ...]:
        """The names of the gradients that are not finite on some rank, at most MAX_NAMES_REPORTED.

        All ranks must call this method together.
        """
        norms = list(chain.from_iterable(self.norms.values()))
        are_finite = torch.isfinite(torch.stack(norms)).tolist() if norms else []
        broken = [name for name, is_finite in zip(self.names, are_finite, strict=True) if not is_finite]
        # The ranks may find different names, for two reasons. One shard of a gradient may be finite and another shard
        # not, and each pipeline stage has its own parameters. So every rank returns the names that any rank has found.
        everywhere = dict.fromkeys(chain.from_iterable(by_rank(broken)))
        return tuple(everywhere)[:MAX_NAMES_REPORTED]


def _squared(layout: Layout, norms: Sequence[Tensor]) -> Tensor:
    """The squared norm of the gradients of one layout, over all ranks of the layout's mesh. A float64 scalar.

    norms: the norms of this rank's shards. A rank steps its optimizer only if the total is finite, and all ranks must
    decide alike. One replica of a gradient may be finite and another replica not. So this function averages the values
    of the replicas, and all ranks get the same value.
    """
    # The float32 norms are squared in float64. In float32 a square could overflow, and rounding would make the sum
    # depend more on the order in which the squares of the ranks are added.
    total = torch.stack(list(norms)).double().square().sum()
    if layout is not None:
        mesh, placements = layout
        for dim, placement in enumerate(placements):
            if mesh.size(dim) > 1:
                if placement.is_replicate():
                    total = total / mesh.size(dim)
                dist.all_reduce(total, group=mesh.get_group(dim))
    return total


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, without autograd.

    A plain tensor is returned as it is. `to_local` is not used, because it makes a new tensor at every call.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
