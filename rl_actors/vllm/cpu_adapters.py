"""Adapters on a CPU: which rows of a batch get which adapter, and the matrix products. vLLM's worker imports this module by name.

If any row of a batch has an adapter, vLLM 0.32's own code for a CPU applies the last adapter to the rows that have none. It also copies an
adapter for every row.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Group = tuple[int, Tensor | slice]
"""(place of an adapter, the rows that use it)."""


class GroupedAdapters(PunicaWrapperCPU):
    """Applies each adapter to the rows that use it. T rows, S places for adapters, R rank, I inputs and O outputs of a layer."""

    tokens: list[Group] = []
    samples: list[Group] = []

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self.tokens, self.samples = groups(self.token_lora_indices), groups(self.sampler_indices)

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """Add the adapters' part to the outputs of a layer. Query, key and value are slices of one output, and so are gate and up."""
        y_TO, x_TI = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for slot, rows in self.tokens:
            start, part_TI = 0, x_TI[rows]
            for a_S1RI, b_S1OR, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                y_TO[rows, start : start + width] += scale * product(part_TI, a_S1RI[slot, 0], b_S1OR[slot, 0])
                start += width

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **_: Any
    ) -> None:
        """Add the adapters' part to the logits of the sampled positions."""
        y_TV, x_TI, width = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), lora_b_stacked.shape[2]
        for slot, rows in self.samples:
            y_TV[rows, :width] += scale * product(x_TI[rows], lora_a_stacked[slot, 0], lora_b_stacked[slot, 0])


def product(x_TI: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
    """x A^T B^T, [T, O]."""
    return (x_TI.to(a_RI.dtype) @ a_RI.T) @ b_OR.T


def groups(places: Tensor) -> list[Group]:
    """(place of an adapter, the rows that use it) for each adapter. places: the place of each row's adapter; -1: the row has no adapter.

    groups([1, -1, 1]) -> [(1, [0, 2])]
    """
    found = [int(place) for place in places.unique() if place >= 0]
    if len(found) == 1 and bool((places == found[0]).all()):
        return [(found[0], slice(None))]
    return [(place, torch.nonzero(places == place).flatten()) for place in found]
