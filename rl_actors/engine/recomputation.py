"""What a block's backward pass recomputes instead of storing: torchtitan's policies, and one that recomputes no matrix product."""

from dataclasses import dataclass

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC


class KeepProducts(SelectiveAC):
    """SelectiveAC recomputes every second matrix product of a block. In float8 it recomputes the casts before it, too."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        kept = list(self.get_save_ops())
        return checkpoint_wrapper(
            module, context_fn=lambda: create_selective_checkpoint_contexts(kept), early_stop=False
        )


def policy(name: str) -> ActivationCheckpointing.Config | None:
    """Of TrainerConfig.activation_checkpointing."""
    return {
        "none": None,
        "products": KeepProducts.Config(),
        "selective": SelectiveAC.Config(),
        "full": FullAC.Config(),
    }[name]
