"""The rotary embedding, with Hugging Face's pairs: dimension i of each half of a head."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.models.common import ComplexRoPE, CosSinRoPE

from rl_actors.model_config import ModelConfig


class Llama3RoPE(CosSinRoPE):
    """CosSinRoPE with Llama 3's frequencies, which torchtitan has only for pairs of neighbours."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> Tensor:
        """[P, 2 W], P positions and W the head's width: cosines of all dimensions, then sines."""
        # [P, W / 2], exp(i angle) of each pair
        rotations = ComplexRoPE._precompute_cache(self)
        return torch.cat([rotations.real.repeat(1, 2), rotations.imag.repeat(1, 2)], dim=-1)


def rope_config(model: ModelConfig) -> CosSinRoPE.Config:
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
