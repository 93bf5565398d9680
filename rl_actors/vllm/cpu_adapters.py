"""Applies LoRA adapters on a CPU. vLLM's worker imports this module by name.

A row of a batch is one position. vLLM keeps the loaded adapters in numbered places. This module replaces vLLM 0.32's
own code for a CPU, which has two faults. If any row of a batch has an adapter, vLLM's code applies the adapter in the
last place to the rows without an adapter, which should stay unchanged. vLLM's code also copies an adapter once for
every row.

In shapes, T is the number of rows, S the number of places, R the rank, and I and O are the numbers of inputs and
outputs of a layer. The 1 in S1RI and S1OR is a dimension of size 1.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Group = tuple[int, Tensor | slice]
"""(place of an adapter, indices of the rows that use it). The indices are slice(None) if all rows use the adapter."""


class GroupedAdapters(PunicaWrapperCPU):
    """Applies each adapter to the rows that use it."""

    tokens: list[Group] = []  # groups of the rows of the layers' inputs
    samples: list[Group] = []  # groups of the rows of the logits

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
        """Add the adapters' outputs to the outputs of a layer.

        A layer's output can consist of several slices: query, key and value, or gate and up. An adapter has matrices A and B for each slice.
        """
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
        """Add the adapters' outputs to the logits [T, V] of the sampled positions. V is the size of the vocabulary."""
        y_TV = y.view(-1, y.shape[-1])
        x_TI = x.view(-1, x.shape[-1])
        width = lora_b_stacked.shape[2]
        for slot, rows in self.samples:
            y_TV[rows, :width] += scale * product(x_TI[rows], lora_a_stacked[slot, 0], lora_b_stacked[slot, 0])


def product(x_TI: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
    """The product x A^T B^T of shape [T, O]."""
    return (x_TI.to(a_RI.dtype) @ a_RI.T) @ b_OR.T


def groups(places: Tensor) -> list[Group]:
    """For each adapter, its place and the rows that use it.

    `places` has the place of each row's adapter, or -1 for a row without an adapter.

    groups([1, -1, 1]) -> [(1, [0, 2])]
    """
    found = [int(place) for place in places.unique() if place >= 0]
    if len(found) == 1 and bool((places == found[0]).all()):
        return [(found[0], slice(None))]
    return [(place, torch.nonzero(places == place).flatten()) for place in found]
