"""The heads of a language model (logprobs) and of a value model (a value for each position).

B rows, L positions of a chunk, N = B * L, V vocabulary, K target ids of a position.
"""

from collections.abc import Callable
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from rl_actors.engine.vocab_parallel import Logits, TargetLogprobs, entropy, top_k_logprobs
from rl_actors.types import IGNORE_TARGET

Values = dict[str, Tensor]
"""float32, 0 where the target is IGNORE_TARGET. First the head's `output` [B, L], which every loss
gets first; if asked for "entropy" [B, L] and "target_logprobs" [B, L, K].
"""


class LogprobHead:
    """log p(target) at the temperature of the sample."""

    output: ClassVar[str] = "logprobs"

    def __init__(self, fuse: Callable[[Callable], Callable]) -> None:
        """fuse: Machine.fuse."""
        self.target_logprobs = TargetLogprobs(fuse)

    def __call__(
        self, outputs: Tensor, targets_BL: Tensor, temperatures_BL: Tensor, *, with_entropy: bool, top_k: Tensor | None
    ) -> Values:
        """outputs: [B, L, V]. top_k: ids [B, L, K] whose logprobs are wanted."""
        logits = Logits.of(outputs, temperatures_BL)
        targets_N = targets_BL.flatten()
        flat = {"logprobs": self.target_logprobs(logits, targets_N)}
        if with_entropy:
            flat["entropy"] = entropy(logits, targets_N)
        if top_k is not None:
            flat["target_logprobs"] = top_k_logprobs(logits, targets_N, top_k.flatten(0, 1))
        return {name: value.unflatten(0, targets_BL.shape) for name, value in flat.items()}


class ValueHead:
    """V(tokens[:i + 1]), the value of the state before targets[i], at every position i."""

    output: ClassVar[str] = "values"

    def __call__(
        self, outputs: Tensor, targets_BL: Tensor, temperatures_BL: Tensor, *, with_entropy: bool, top_k: Tensor | None
    ) -> Values:
        """outputs: [B, L, 1]. Raises ValueError for with_entropy and top_k."""
        if with_entropy or top_k is not None:
            raise ValueError(
                "a value model has no distribution over tokens: it computes neither entropy nor logprobs of ids"
            )
        if isinstance(outputs, DTensor):
            if outputs.placements != (Replicate(),):
                raise ValueError(f"values are laid out as {outputs.placements}; expected all values on every rank")
            outputs = outputs.to_local()
        values_BL = outputs.squeeze(-1).float()
        return {"values": torch.where(targets_BL != IGNORE_TARGET, values_BL, 0.0)}


Head: TypeAlias = LogprobHead | ValueHead
