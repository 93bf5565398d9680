"""Activation checkpointing: some activations of a transformer block are not stored, and the backward pass recomputes them.

A policy says which activations are stored. torchtitan has several policies. This module adds `KeepProducts`, which recomputes no matrix
product.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC


class KeepProducts(SelectiveAC):
    """Stores the result of every matrix product, so that the backward pass recomputes no matrix product.

    torchtitan's SelectiveAC recomputes every second matrix product, and all matrix products of experts. In float8 it must also cast the inputs
    of these products again.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        # _grouped_mm, the matrix product of experts, is not among the operators of get_save_ops.
        kept = [*self.get_save_ops(), torch.ops.aten._grouped_mm.default]
        return checkpoint_wrapper(
            module, context_fn=partial(create_selective_checkpoint_contexts, kept), early_stop=False
        )


def policy(name: str) -> ActivationCheckpointing.Config | None:
    """torchtitan's config for a value of TrainerConfig.activation_checkpointing."""
    return {
        "none": None,
        "products": KeepProducts.Config(),
        "selective": SelectiveAC.Config(),
        "full": FullAC.Config(),
    }[name]
