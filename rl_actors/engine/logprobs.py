"""Apply a model's head to hidden states. Compute the gradient of a loss with respect to the hidden states.

heads.py has two heads. One computes the logprobs of the targets, and the other the values of a value model. In the
rest of this file "values" means the numbers that either head computes (the type Values). The logits are computed for
one chunk of positions at a time, so the logits of all positions never exist at once. torchtitan's ChunkedLossWrapper
splits the rows into chunks. For each chunk it applies the output projection, calls a loss with the logits, and runs the
backward pass of the loss down to the hidden states. The projection's weights, which FSDP gathers, stay gathered from
one chunk to the next.

In shapes, B is the number of rows, L the row length, D the hidden size, V the size of the vocabulary, and K the number
of ids that the column target_ids has for one position.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import ChunkedLossWrapper

from rl_actors.engine.batch import PackedBatch
from rl_actors.engine.heads import Head, Values
from rl_actors.losses import Loss, computed_for
from rl_actors.metrics import Partials, merge

ChunkInputs = dict[str, Tensor]
"""Tensors [B, L, ...] that a loss gets. They are split into the same chunks as the logits."""


class GuardedLoss:
    """Wraps a loss and catches its first error. From then on all gradients are zero, and `failure` has the error.

    The loss may have failed only on this rank. This rank must go on, because the other ranks wait for it in their collectives. The runner
    (single_runner.py or pipeline.py) raises `failure` after the last microbatch.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.reads = computed_for(loss)
        self.whole_sequence: bool = getattr(loss, "whole_sequence", False)
        self.failure: Exception | None = None

    def gradients(self, values: Values, columns_BL: ChunkInputs) -> tuple[Values, Partials]:
        """(gradients, metrics). The gradients are with respect to the first entry of `values`, which every loss reads, and to the other entries
        that this loss reads. The metrics include "loss:sum". After an error there are no metrics.
        """
        output, *others = values
        names = [output, *sorted(self.reads & set(others))]
        leaves = [values[name].detach().requires_grad_() for name in names]
        if self.failure is None:
            try:
                with torch.enable_grad():
                    total, metrics = self.loss(leaves[0], **columns_BL, **dict(zip(names[1:], leaves[1:], strict=True)))
                gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
                metrics = merge([{"loss:sum": total.detach(), **metrics}])
                return dict(zip(names, gradients, strict=True)), metrics
            except Exception as error:
                self.failure = error
        return {name: torch.zeros_like(leaf) for name, leaf in zip(names, leaves, strict=True)}, {}

    def of_chunk(self, values: Values, columns_BL: ChunkInputs) -> tuple[Tensor, Partials]:
        """(a scalar, metrics) of one chunk. The scalar has the same gradients as the loss.

        Not for a `whole_sequence` loss, because that loss reads whole samples and cannot be computed in chunks.
        """
        gradients, metrics = self.gradients(values, columns_BL)
        return _scalar_with_gradients(values, gradients), metrics


ChunkLoss = Callable[[Values, ChunkInputs], tuple[Tensor, Partials]]
"""A function of the values and the inputs of a chunk. It returns a scalar to back-propagate, and metrics."""


class ChunkedHead:
    """Applies the output projection of a model to at most `chunk_tokens` positions at a time. The model itself returns hidden states.

    In a pipeline only the last stage can use a ChunkedHead, because only this stage has the output projection.
    """

    def __init__(
        self,
        model: nn.Module,
        chunk_tokens: int,
        head: Head,
        *,
        keep_head: bool = True,
        min_chunks: int = 1,
    ) -> None:
        """head: computes the values of a chunk from the outputs of the projection.

        keep_head: FSDP gathers the weights of the last norm and of the output projection together. True: these weights
        stay gathered between the norm and the projection.
        min_chunks: the smallest number of chunks.
        """
        model._skip_lm_head = True
        self.lm_head = model.lm_head
        self.keep_head = keep_head
        self.chunk_tokens = chunk_tokens
        self.min_chunks = min_chunks
        self.head = head

    def forward(self, hidden_BLD: Tensor, batch: PackedBatch, *, with_entropy: bool = False) -> Values:
        """The values of whole rows. The caller must turn gradients off."""
        values, _, _ = self._run(hidden_BLD, batch, _no_loss, {}, with_entropy)
        return batch.gather(values)

    def evaluate(
        self, hidden_BLD: Tensor, batch: PackedBatch, loss: GuardedLoss | None, *, with_entropy: bool = False
    ) -> tuple[Values, Partials]:
        """The values and, if a loss is given, the loss's metrics. The caller must turn gradients off."""
        if loss is None:
            return self.forward(hidden_BLD, batch, with_entropy=with_entropy), {}
        return self.loss(hidden_BLD, batch, loss, with_entropy=with_entropy)[:2]

    def loss(
        self, hidden_BLD: Tensor, batch: PackedBatch, loss: GuardedLoss, *, with_entropy: bool = False
    ) -> tuple[Values, Partials, Tensor]:
        """(values of whole rows, metrics, a scalar).

        When this method returns, the gradient of the loss has been back-propagated to the hidden states. The scalar's
        `backward` continues from the hidden states through the model. If torch's gradients are turned off, nothing is
        back-propagated.

        If the loss reads single positions, it gets one chunk after another. The gradient of each chunk is
        back-propagated immediately. If the loss is `whole_sequence`, there are two passes. The first pass computes the
        values of whole samples, and the loss computes its gradient with respect to these values. The second pass
        computes the values again, chunk by chunk, and back-propagates this gradient.
        """
        with_entropy = with_entropy or "entropy" in loss.reads
        if loss.whole_sequence:
            return self._whole_sequence(hidden_BLD, batch, loss, with_entropy)
        values, metrics, total = self._run(hidden_BLD, batch, loss.of_chunk, batch.columns, with_entropy)
        return batch.gather(values), metrics, total

    def _whole_sequence(
        self, hidden_BLD: Tensor, batch: PackedBatch, loss: GuardedLoss, with_entropy: bool
    ) -> tuple[Values, Partials, Tensor]:
        with torch.no_grad():
            values = self.forward(hidden_BLD.detach(), batch, with_entropy=with_entropy)
        rows = batch.row_per_sample()
        columns = {name: rows.unpack(column) for name, column in batch.gather(batch.columns).items()}
        whole_gradients, metrics = loss.gradients({name: rows.unpack(x) for name, x in values.items()}, columns)
        if not batch.reports_whole_rows():
            metrics = {}
        if not torch.is_grad_enabled():
            return values, metrics, torch.zeros(())
        gradients = batch.take({name: rows.pack(gradient) for name, gradient in whole_gradients.items()})
        _, _, total = self._run(hidden_BLD, batch, _given_gradients, gradients, "entropy" in gradients)
        return values, metrics, total

    def _run(
        self, hidden_BLD: Tensor, batch: PackedBatch, loss: ChunkLoss, inputs: ChunkInputs, with_entropy: bool
    ) -> tuple[Values, Partials, Tensor]:
        """(values at the positions that this rank holds, metrics, the sum of the loss over the chunks)."""
        chunks = _Chunks(head=self.head, loss=loss, with_entropy=with_entropy)
        num_chunks = self._num_chunks(*batch.tokens_BL.shape)
        wrapper = ChunkedLossWrapper(ChunkedLossWrapper.Config(num_chunks=num_chunks))
        wrapper.loss_fn = chunks
        wrapper.set_lm_head(self.lm_head)
        # A column may have the name of one of the wrapper's own arguments, so the columns get a prefix.
        named = {f"input_{name}": value for name, value in inputs.items()}
        if "target_ids" in batch.columns:
            named["top_k"] = batch.columns["target_ids"]
        total, _ = wrapper(hidden_BLD, batch.targets_BL, temperatures_BL=batch.temperatures_BL, **named)
        if self.keep_head and isinstance(self.lm_head, FSDPModule):
            # Before it returns, the wrapper sets reshard_after_forward to True. In the next microbatch FSDP would then
            # free the weights as soon as the last norm has run, and gather them again for the projection. So this code
            # sets the option back to False.
            self.lm_head.set_reshard_after_forward(False, recurse=False)
        return chunks.joined(), merge(chunks.metrics), total

    def _num_chunks(self, num_rows: int, row_length: int) -> int:
        """The smallest possible number of chunks. It is at least min_chunks, and a chunk has at most chunk_tokens positions.

        Each row is split into as many equal parts as there are chunks, so the number divides row_length. A chunk
        consists of one part of every row. If even row_length chunks are too few, the result is row_length.
        """
        at_least = max(self.min_chunks, -(-num_rows * row_length // self.chunk_tokens))
        return next(n for n in range(min(at_least, row_length), row_length + 1) if row_length % n == 0)


@dataclass(kw_only=True)
class _Chunks:
    """The loss that ChunkedLossWrapper calls with the logits of each chunk. It keeps the values and metrics of all chunks."""

    head: Head
    loss: ChunkLoss
    with_entropy: bool
    values: list[Values] = field(default_factory=list)
    metrics: list[Partials] = field(default_factory=list)

    def __call__(
        self,
        outputs: Tensor,
        targets_BL: Tensor,
        global_valid_tokens: None,
        *,
        temperatures_BL: Tensor,
        top_k: Tensor | None = None,
        **inputs: Tensor,
    ) -> tuple[Tensor, Partials]:
        """(a scalar to back-propagate, {}). The second value is empty, because the wrapper would merge metrics by rules of its own.

        outputs: the outputs of the projection, [B, L, V], or [B, L, 1] in a value model. L is the length of the chunk. top_k: ids [B, L, K].
        inputs: the ChunkInputs, whose names have the prefix `input_`.
        """
        values = self.head(outputs, targets_BL, temperatures_BL, with_entropy=self.with_entropy, top_k=top_k)
        self.values.append({name: value.detach() for name, value in values.items()})
        total, metrics = self.loss(values, {name.removeprefix("input_"): x for name, x in inputs.items()})
        self.metrics.append(metrics)
        return total, {}

    def joined(self) -> Values:
        """The values of all chunks, joined along the positions of a row."""
        joined: Values = {}
        for name in self.values[0]:
            joined[name] = torch.cat([values[name] for values in self.values], dim=1)
        return joined


def _no_loss(values: Values, inputs: ChunkInputs) -> tuple[Tensor, Partials]:
    """A ChunkLoss for calls that need only the values. These calls compute no gradients, so the scalar is not used."""
    return next(iter(values.values())).sum(), {}


def _given_gradients(values: Values, gradients: ChunkInputs) -> tuple[Tensor, Partials]:
    """A ChunkLoss whose gradients are known already. The inputs of the chunk are these gradients."""
    return _scalar_with_gradients(values, gradients), {}


def _scalar_with_gradients(values: Values, gradients: Values) -> Tensor:
    """A scalar whose gradient with respect to values[name] is gradients[name]."""
    return torch.stack([(values[name] * gradient).sum() for name, gradient in gradients.items()]).sum()
