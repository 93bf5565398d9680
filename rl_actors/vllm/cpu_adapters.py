"""Applies LoRA adapters on a CPU, where vLLM 0.32 applies the last one also to rows without one.

T rows (positions), S slots of adapters, R rank, I and O inputs and outputs of a layer.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Group = tuple[int, Tensor | slice]
"""(slot of an adapter, its rows); slice(None): all rows."""


class GroupedAdapters(PunicaWrapperCPU):
    tokens: list[Group] = []  # of the layers' inputs
    samples: list[Group] = []  # of the logits

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self.tokens = groups(self.token_lora_indices)
        self.samples = groups(self.sampler_indices)

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
        """Add to a layer's output. Each slice (query, key, value; gate, up) has an A and a B."""
        y_TO = y.view(-1, y.shape[-1])
        x_TI = x.view(-1, x.shape[-1])
        for slot, rows in self.tokens:
            start = 0
            part_TI = x_TI[rows]
            for a_S1RI, b_S1OR, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                y_TO[rows, start : start + width] += scale * product(part_TI, a_S1RI[slot, 0], b_S1OR[slot, 0])
                start += width

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **_: Any
    ) -> None:
        """Add to the logits [T, V] of the sampled positions."""
        y_TV = y.view(-1, y.shape[-1])
        x_TI = x.view(-1, x.shape[-1])
        width = lora_b_stacked.shape[2]
        for slot, rows in self.samples:
            y_TV[rows, :width] += scale * product(x_TI[rows], lora_a_stacked[slot, 0], lora_b_stacked[slot, 0])


def product(x_TI: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
    """x A^T B^T, [T, O]."""
    return (x_TI.to(a_RI.dtype) @ a_RI.T) @ b_OR.T


def groups(slots: Tensor) -> list[Group]:
    """Each adapter's slot and rows. slots: of each row, -1 without an adapter.

    groups([1, -1, 1]) -> [(1, [0, 2])]
    """
    used = [int(slot) for slot in slots.unique() if slot >= 0]
    if len(used) == 1 and bool((slots == used[0]).all()):
        return [(used[0], slice(None))]
    return [(slot, torch.nonzero(slots == slot).flatten()) for slot in used]
