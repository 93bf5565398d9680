"""The two kinds of heads. A language model's head computes logprobs. A value model's head computes one value for each position.

A head gets the outputs of the model's last projection, one chunk of positions at a time.

In shapes, B is the number of rows of the batch, L the length of the chunk, V the size of the vocabulary and K the
number of target ids at one position. N is B * L.
"""

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from rl_actors.engine.vocab_parallel import Logits, TargetLogprobs, entropy, top_k_logprobs
from rl_actors.types import IGNORE_TARGET

Values = dict[str, Tensor]
"""Numbers computed at every position. The first entry has the name `Head.output` ("logprobs" or "values") and the shape
[B, L]. If the call asks for them, the entries "entropy" [B, L] and "target_logprobs" [B, L, K] follow."""


class Head(Protocol):
    output: ClassVar[str]
    """Name of the numbers that the head computes. Every loss of this head gets them as its first argument."""

    def __call__(
        self,
        outputs: Tensor,
        targets_BL: Tensor,
        temperatures_BL: Tensor,
        *,
        with_entropy: bool,
        top_k: Tensor | None,
    ) -> Values:
        """The numbers of a chunk in float32. They are 0 where the target is IGNORE_TARGET.

        outputs: [B, L, V] in a language model, [B, L, 1] in a value model. with_entropy: whether to compute the
        entropy, too. top_k: ids [B, L, K] of tokens whose logprobs the head computes, too; None: no such tokens.
        """


class LogprobHead:
    """Computes log p(target) at every position, at the temperature of the position's sample."""

    output: ClassVar[str] = "logprobs"

    def __init__(self, fuse: Callable[[Callable], Callable]) -> None:
        """fuse: the function Machine.fuse. It compiles a function of tensors into few kernels on a GPU, and returns the
        function unchanged on a CPU.
        """
        self.target_logprobs = TargetLogprobs(fuse)

    def __call__(
        self,
        outputs: Tensor,
        targets_BL: Tensor,
        temperatures_BL: Tensor,
        *,
        with_entropy: bool,
        top_k: Tensor | None,
    ) -> Values:
        logits = Logits.of(outputs, temperatures_BL)
        targets_N = targets_BL.flatten()
        flat = {"logprobs": self.target_logprobs(logits, targets_N)}
        if with_entropy:
            flat["entropy"] = entropy(logits, targets_N)
        if top_k is not None:
            flat["target_logprobs"] = top_k_logprobs(logits, targets_N, top_k.flatten(0, 1))
        return {name: value.unflatten(0, targets_BL.shape) for name, value in flat.items()}


class ValueHead:
    """Computes V(tokens[:i + 1]), the value of the state before targets[i], at every position i."""

    output: ClassVar[str] = "values"

    def __call__(
        self,
        outputs: Tensor,
        targets_BL: Tensor,
        temperatures_BL: Tensor,
        *,
        with_entropy: bool,
        top_k: Tensor | None,
    ) -> Values:
        """The values. Temperatures have no effect.

        Raises ValueError if the caller asks for the entropy or for logprobs of ids (top_k).
        """
        if with_entropy or top_k is not None:
            raise ValueError(
                "a value model has no distribution over tokens: it computes neither entropy nor logprobs of ids"
            )
        if isinstance(outputs, DTensor):
            # Every tensor-parallel rank has the whole head and computes all values.
            if outputs.placements != (Replicate(),):
                raise ValueError(f"values are laid out as {outputs.placements}; expected all values on every rank")
            outputs = outputs.to_local()
        values_BL = outputs.squeeze(-1).float()
        return {"values": torch.where(targets_BL != IGNORE_TARGET, values_BL, 0.0)}
