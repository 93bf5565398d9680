"""Applies a model's head to hidden states chunk by chunk, and back-propagates a loss to them.

The logits of all positions never exist at once. "Values" are what the head computes (heads.py).
B rows, L row length, D hidden size, V vocabulary, K ids of a position in target_ids.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import ChunkedLossWrapper

from rl_actors.engine.batch import PackedBatch
from rl_actors.engine.heads import Head, Values
from rl_actors.losses import Loss, computed_for
from rl_actors.metrics import Partials, merge

ChunkInputs = dict[str, Tensor]
"""Tensors [B, L, ...] that a loss gets, split like the logits."""


class GuardedLoss:
    """Catches a loss's first error in `failure`. From then on the gradients are zero.

    This rank must go on, because the others wait for it in collectives; the runner raises `failure`
    at the end.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.reads = computed_for(loss)
        self.whole_sequence: bool = getattr(loss, "whole_sequence", False)
        self.failure: Exception | None = None

    def gradients(self, values: Values, columns_BL: ChunkInputs) -> tuple[Values, Partials]:
        """(gradients by the first entry and the others that the loss reads, metrics)."""
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
        """(a scalar with the gradients of the loss, metrics). Not for `whole_sequence`."""
        gradients, metrics = self.gradients(values, columns_BL)
        return _scalar_with_gradients(values, gradients), metrics


ChunkLoss = Callable[[Values, ChunkInputs], tuple[Tensor, Partials]]
"""(values, inputs) of a chunk -> (a scalar to back-propagate, metrics)."""


class ChunkedHead:
    """Applies the output projection, which the model skips, to `chunk_tokens` positions at a time."""

    def __init__(
        self, model: nn.Module, chunk_tokens: int, head: Head, *, keep_head: bool = True, min_chunks: int = 1
    ) -> None:
        """keep_head: FSDP gathers last norm and output projection once for both."""
        model._skip_lm_head = True
        self.lm_head = model.lm_head
        self.keep_head = keep_head
        self.chunk_tokens = chunk_tokens
        self.min_chunks = min_chunks
        self.head = head

    def forward(self, hidden_BLD: Tensor, batch: PackedBatch, *, with_entropy: bool = False) -> Values:
        """The values of whole rows. The caller turns gradients off."""
        values, _, _ = self._run(hidden_BLD, batch, _no_loss, {}, with_entropy)
        return batch.gather(values)

    def evaluate(
        self, hidden_BLD: Tensor, batch: PackedBatch, loss: GuardedLoss | None, *, with_entropy: bool = False
    ) -> tuple[Values, Partials]:
        """The values and, with a loss, its metrics. The caller turns gradients off."""
        if loss is None:
            return self.forward(hidden_BLD, batch, with_entropy=with_entropy), {}
        return self.loss(hidden_BLD, batch, loss, with_entropy=with_entropy)[:2]

    def loss(
        self, hidden_BLD: Tensor, batch: PackedBatch, loss: GuardedLoss, *, with_entropy: bool = False
    ) -> tuple[Values, Partials, Tensor]:
        """(values of whole rows, metrics, a scalar whose `backward` goes on from the hidden states).

        A `whole_sequence` loss needs two passes: values of whole samples for its gradient by them,
        then chunk by chunk again to back-propagate it.
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
        """(values at this rank's positions, metrics, the sum of the loss over the chunks)."""
        values_of_chunks: list[Values] = []
        metrics_of_chunks: list[Partials] = []

        def of_chunk(
            outputs: Tensor,
            targets_BL: Tensor,
            global_valid_tokens: None,
            *,
            temperatures_BL: Tensor,
            top_k: Tensor | None = None,
            **columns: Tensor,
        ) -> tuple[Tensor, Partials]:
            values = self.head(outputs, targets_BL, temperatures_BL, with_entropy=with_entropy, top_k=top_k)
            values_of_chunks.append({name: value.detach() for name, value in values.items()})
            total, metrics = loss(values, {name.removeprefix("input_"): x for name, x in columns.items()})
            metrics_of_chunks.append(metrics)
            return total, {}  # the wrapper would merge metrics by its own rules

        num_chunks = self._num_chunks(*batch.tokens_BL.shape)
        wrapper = ChunkedLossWrapper(ChunkedLossWrapper.Config(num_chunks=num_chunks))
        wrapper.loss_fn = of_chunk
        wrapper.set_lm_head(self.lm_head)
        # a column may be named like one of the wrapper's arguments
        named = {f"input_{name}": value for name, value in inputs.items()}
        if "target_ids" in batch.columns:
            named["top_k"] = batch.columns["target_ids"]
        total, _ = wrapper(hidden_BLD, batch.targets_BL, temperatures_BL=batch.temperatures_BL, **named)
        if self.keep_head and isinstance(self.lm_head, FSDPModule):
            # the wrapper has set it to True; FSDP would gather again between norm and projection
            self.lm_head.set_reshard_after_forward(False, recurse=False)
        joined = {name: torch.cat([chunk[name] for chunk in values_of_chunks], dim=1) for name in values_of_chunks[0]}
        return joined, merge(metrics_of_chunks), total

    def _num_chunks(self, num_rows: int, row_length: int) -> int:
        """The smallest divisor of row_length that is at least min_chunks and keeps chunks at
        chunk_tokens, or row_length.
        """
        at_least = max(self.min_chunks, -(-num_rows * row_length // self.chunk_tokens))
        return next(n for n in range(min(at_least, row_length), row_length + 1) if row_length % n == 0)


def _no_loss(values: Values, inputs: ChunkInputs) -> tuple[Tensor, Partials]:
    """A ChunkLoss for calls without gradients."""
    return next(iter(values.values())).sum(), {}


def _given_gradients(values: Values, gradients: ChunkInputs) -> tuple[Tensor, Partials]:
    """A ChunkLoss whose inputs are the gradients."""
    return _scalar_with_gradients(values, gradients), {}


def _scalar_with_gradients(values: Values, gradients: Values) -> Tensor:
    """A scalar whose gradient with respect to values[name] is gradients[name]."""
    return torch.stack([(values[name] * gradient).sum() for name, gradient in gradients.items()]).sum()
