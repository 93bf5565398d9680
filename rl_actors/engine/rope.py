"""The rotary embedding of a model. This module reads no weights.

The embedding rotates pairs of a head's dimensions. As in Hugging Face's models, dimension i of the first half and dimension i of the
second half form a pair.

In shapes, P is the number of positions, and W is the width of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.models.common import ComplexRoPE, CosSinRoPE

from rl_actors.model_config import ModelConfig


class Llama3RoPE(CosSinRoPE):
    """CosSinRoPE with the scaled frequencies of Llama 3.

    torchtitan has these frequencies only in ComplexRoPE, where neighbouring dimensions form a pair.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> Tensor:
        """A tensor [P, 2 W]. The row of a position has the cosines of the angles of all W dimensions, and then the sines of these angles.
        The two dimensions of a pair have the same angle.
        """
        # [P, W / 2]. The value of a pair is exp(i angle), where i is the imaginary unit.
        rotations = ComplexRoPE._precompute_cache(self)
        return torch.cat([rotations.real.repeat(1, 2), rotations.imag.repeat(1, 2)], dim=-1)


def rope_config(model: ModelConfig) -> CosSinRoPE.Config:
    """torchtitan's config of the model's rotary embedding."""
    plain = {"dim": model.head_dim, "max_seq_len": model.max_position_embeddings, "theta": model.rope_theta}
    if not model.rope_scaling:
        return CosSinRoPE.Config(**plain)
    scaling = model.rope_scaling
    return Llama3RoPE.Config(
        **plain,
        scaling="llama",
        scaling_factor=scaling["factor"],
        low_freq_factor=scaling["low_freq_factor"],
        high_freq_factor=scaling["high_freq_factor"],
        original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
    )
