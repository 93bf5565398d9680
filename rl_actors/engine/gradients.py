"""The gradients that a rank holds: their norm over all ranks, their scale, and which of them are not finite. Steps nothing.

They are plain tensors here, a rank's own shards: DTensor's dispatch of the 310 gradients of a Qwen3 0.6B takes longer than the GPU's work.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl_actors.engine.gather import by_rank

MAX_NAMES_REPORTED = 10


class Gradients:
    """Of the parameters that have one."""

    @torch.no_grad()
    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], pipeline: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        """pipeline: the ranks that hold other parameters of the model, where there are any."""
        self.pipeline, self.device = pipeline, device
        self.names: list[str] = []
        self.shards: list[Tensor] = []
        layouts: list[Any] = []
        for name, parameter in named:
            if (gradient := parameter.grad) is not None:
                self.names.append(name)
                self.shards.append(local(gradient))
                layouts.append((gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None)
        self.indices: dict[Any, list[int]] = {}  # of the gradients of each layout
        for index, layout in enumerate(layouts):
            self.indices.setdefault(layout, []).append(index)
        if any(placement.is_partial() for layout in self.indices if layout for placement in layout[1]):
            raise RuntimeError(f"gradients are laid out as {list(self.indices)}; expected whole or sharded")
        self.norms = torch._foreach_norm(self.shards) if self.shards else []

    def norm(self) -> float:
        """The 2-norm of all gradients over all ranks, which nobody has divided yet. Waits for the device."""
        totals = [self._squared(layout, indices) for layout, indices in self.indices.items()]
        total = torch.stack([*totals, torch.zeros((), dtype=torch.float64, device=self.device)]).sum()
        if self.pipeline is not None:
            dist.all_reduce(total, group=self.pipeline)
        return float(total.sqrt())

    def _squared(self, layout: Any, indices: list[int]) -> Tensor:
        # In float64: the squares of norms would leave float32's range, and the order of ranks shows less.
        total = torch.stack([self.norms[index] for index in indices]).double().square().sum()
        if layout is not None:
            mesh, placements = layout
            for dim, placement in enumerate(placements):
                if not placement.is_replicate() and mesh.size(dim) > 1:
                    dist.all_reduce(total, group=mesh.get_group(dim))
        return total

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply all of them, in place."""
        torch._foreach_mul_(self.shards, factor)

    def nonfinite(self) -> tuple[str, ...]:
        """The names of those that are not finite on some rank, at most MAX_NAMES_REPORTED. Collective."""
        # A shard may be finite where its neighbour is not, and a pipeline stage has names of its own: all ranks say, so that they agree.
        finite = torch.isfinite(torch.stack(list(self.norms))).tolist() if self.norms else []
        everywhere = by_rank([name for name, is_finite in zip(self.names, finite, strict=True) if not is_finite])
        return tuple(dict.fromkeys(name for of_rank in everywhere for name in of_rank))[:MAX_NAMES_REPORTED]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it; under no_grad that costs nothing."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
