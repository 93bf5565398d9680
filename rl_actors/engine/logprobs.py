"""Hidden states -> logprobs of the targets, and back, in chunks: [tokens, vocabulary] never exists whole.

B rows, L row length, D hidden size, V vocabulary. torchtitan's ChunkedLossWrapper drives the chunks and FSDP's gathers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torchtitan.components.loss import ChunkedLossWrapper, _LossParallelCrossEntropy

from rl_actors.engine.inputs import Batch
from rl_actors.losses import Loss
from rl_actors.metrics import Partials, merge
from rl_actors.types import IGNORE_TARGET


def target_logprobs(logits_BLV: Tensor, targets_BL: Tensor, temperatures_BL: Tensor) -> Tensor:
    """log_softmax(logits / temperature) at the targets, float32 [B, L]; 0 where the target is IGNORE_TARGET.

    Vocabulary shards of tensor parallelism stay where they are: torchtitan's loss-parallel cross entropy reduces over them.
    """
    if isinstance(logits_BLV, DTensor) and logits_BLV.placements == (Shard(2),):
        scaled_NV = (logits_BLV.to_local().float() / temperatures_BL[..., None]).flatten(0, 1)
        group = logits_BLV.device_mesh.get_group("tp")
        args = (scaled_NV, targets_BL.flatten(), group, logits_BLV.shape[-1], "none")
        return -_LossParallelCrossEntropy.apply(*args).view_as(targets_BL)
    if isinstance(logits_BLV, DTensor):
        raise ValueError(
            f"logits are laid out as {logits_BLV.placements}; expected whole or sharded over the vocabulary"
        )
    scaled_NV = (logits_BLV.float() / temperatures_BL[..., None]).flatten(0, 1)
    nll_N = F.cross_entropy(scaled_NV, targets_BL.flatten(), reduction="none", ignore_index=IGNORE_TARGET)
    return -nll_N.view_as(targets_BL)


class ChunkedLogprobs:
    """Takes the output projection off the model and applies it to at most `chunk_tokens` positions at a time."""

    def __init__(self, model: nn.Module, chunk_tokens: int) -> None:
        model._skip_lm_head = True
        self.chunk_tokens = chunk_tokens
        self.wrapper = ChunkedLossWrapper(ChunkedLossWrapper.Config())
        self.wrapper.set_lm_head(model.lm_head)

    def forward(self, hidden_BLD: Tensor, batch: Batch) -> Tensor:
        """Logprobs [B, L] without gradients."""

        def no_loss(logprobs_BL: Tensor):
            return logprobs_BL.sum(), {}

        return self._run(hidden_BLD, batch, no_loss, {})[0]

    def forward_backward(self, hidden_BLD: Tensor, batch: Batch, loss: Loss) -> tuple[Tensor, Partials]:
        """Logprobs [B, L] and metrics; back-propagates the loss through head and model."""
        logprobs_BL, metrics, total = self._run(hidden_BLD, batch, loss, batch.columns)
        total.backward()
        return logprobs_BL, metrics

    def _run(self, hidden_BLD: Tensor, batch: Batch, loss: Loss, columns: dict[str, Tensor]):
        chunks: list[Tensor] = []
        partials: list[Partials] = []

        def chunk_loss(logits_BLV: Tensor, targets_BL: Tensor, _, *, temperatures_BL: Tensor, **columns_BL: Any):
            logprobs_BL = target_logprobs(logits_BLV, targets_BL, temperatures_BL)
            chunks.append(logprobs_BL.detach())
            value, metrics = loss(logprobs_BL, **columns_BL)
            partials.append(metrics)
            return value, {}

        self.wrapper.num_chunks = self._num_chunks(*batch.tokens_BL.shape)
        self.wrapper.loss_fn = chunk_loss
        total, _ = self.wrapper(hidden_BLD, batch.targets_BL, temperatures_BL=batch.temperatures_BL, **columns)
        return torch.cat(chunks, dim=1), merge(partials), total

    def _num_chunks(self, num_rows: int, row_length: int) -> int:
        """The fewest equal chunks of a row with at most chunk_tokens positions in all rows together."""
        at_least = -(-num_rows * row_length // self.chunk_tokens)
        return next(n for n in range(min(at_least, row_length), row_length + 1) if row_length % n == 0)
