"""Policies of activation checkpointing: torchtitan's, and one that keeps all matrix products."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC


class KeepProducts(SelectiveAC):
    """torchtitan's SelectiveAC recomputes every second one, all of the experts', and float8 casts."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        # _grouped_mm, of the experts, is not in get_save_ops
        kept = [*self.get_save_ops(), torch.ops.aten._grouped_mm.default]
        return checkpoint_wrapper(
            module, context_fn=partial(create_selective_checkpoint_contexts, kept), early_stop=False
        )


def policy(name: str) -> ActivationCheckpointing.Config | None:
    return {
        "none": None,
        "products": KeepProducts.Config(),
        "selective": SelectiveAC.Config(),
        "full": FullAC.Config(),
    }[name]
