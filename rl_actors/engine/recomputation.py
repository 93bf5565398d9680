"""Activation checkpointing: some activations of a block are not stored, and the backward pass recomputes them.

A policy says which ones. This module adds to torchtitan's policies one that recomputes no matrix product.
"""

from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC


class KeepProducts(SelectiveAC):
    """Stores the result of every matrix product. SelectiveAC recomputes every second one and, in float8, the casts before it."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        kept = list(self.get_save_ops())
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
