"""Hidden states -> logprobs of the targets, and back, in chunks: [tokens, vocabulary] never exists whole.

B rows, L row length, D hidden size, V vocabulary. torchtitan's ChunkedLossWrapper drives the chunks and FSDP's gathers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import ChunkedLossWrapper

from rl_actors.engine.batch import PackedBatch
from rl_actors.engine.vocab_parallel import Logits, TargetLogprobs, entropy, top_k_logprobs
from rl_actors.losses import Loss, made_for
from rl_actors.metrics import Partials, merge

Values = dict[str, Tensor]
"""What is computed at every position: "logprobs" [B, L], and "entropy" [B, L], "target_logprobs" [B, L, K] where wanted."""


class SteadyLoss:
    """A loss that goes on after it has failed, as zero: other ranks may not have failed, and wait for this one in their collectives.

    Who runs it raises `failure` once all microbatches are through.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.reads = made_for(loss)
        self.whole_sequence: bool = getattr(loss, "whole_sequence", False)
        self.failure: Exception | None = None

    def gradients(self, values: Values, columns_BL: dict[str, Tensor]) -> tuple[Values, Partials]:
        """(its gradient with respect to the logprobs and what else it reads of the values, metrics with loss:sum)."""
        names = ["logprobs", *sorted(self.reads & set(values))]
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


class ChunkedLogprobs:
    """Takes the output projection off the model and applies it to at most `chunk_tokens` positions at a time.

    Of a pipeline stage without one it can do nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        chunk_tokens: int,
        *,
        fuse: Callable[[Callable], Callable],
        keep_head: bool = True,
        min_chunks: int = 1,
    ) -> None:
        """fuse: a function of tensors -> the same as one kernel, where the machine can make one.

        keep_head: FSDP keeps what it gathered for the last norm until the head has had all its chunks.
        """
        model._skip_lm_head = True
        self.keep_head = keep_head
        self.chunk_tokens = chunk_tokens
        self.min_chunks = min_chunks
        self.target_logprobs = TargetLogprobs(fuse)
        self.wrapper = ChunkedLossWrapper(ChunkedLossWrapper.Config())
        self.wrapper.set_lm_head(model.lm_head)

    def forward(self, hidden_BLD: Tensor, batch: PackedBatch, *, with_entropy: bool = False) -> Values:
        """The values of whole rows, without gradients."""

        def no_loss(values: Values, _):
            return values["logprobs"].sum(), {}

        return batch.gather(self._run(hidden_BLD, batch, no_loss, {}, with_entropy)[0])

    def evaluate(
        self, hidden_BLD: Tensor, batch: PackedBatch, loss: SteadyLoss | None, *, with_entropy: bool = False
    ) -> tuple[Values, Partials]:
        """The values and, of a loss, the metrics; under no_grad."""
        if loss is None:
            return self.forward(hidden_BLD, batch, with_entropy=with_entropy), {}
        return self.loss(hidden_BLD, batch, loss, with_entropy=with_entropy)[:2]

    def loss(
        self, hidden_BLD: Tensor, batch: PackedBatch, loss: SteadyLoss, *, with_entropy: bool = False
    ) -> tuple[Values, Partials, Tensor]:
        """The values of whole rows, metrics, and what was back-propagated through the head; its `backward` goes through the model.

        A loss of single positions gets each chunk as it comes. A `whole_sequence` loss gets the values of whole samples first; its
        gradient with respect to them is then what the chunks back-propagate.
        """
        with_entropy = with_entropy or "entropy" in loss.reads
        if loss.whole_sequence:
            return self._whole_sequence(hidden_BLD, batch, loss, with_entropy)

        def of_columns(values: Values, columns_BL: dict[str, Tensor]):
            gradients, metrics = loss.gradients(values, columns_BL)
            return _product(values, gradients), metrics

        values, metrics, total = self._run(hidden_BLD, batch, of_columns, batch.columns, with_entropy)
        return batch.gather(values), metrics, total

    def _whole_sequence(self, hidden_BLD: Tensor, batch: PackedBatch, loss: SteadyLoss, with_entropy: bool):
        with torch.no_grad():
            values = self.forward(hidden_BLD.detach(), batch, with_entropy=with_entropy)
        rows = batch.one_a_row()
        columns = {name: rows.unpack(column) for name, column in batch.gather(batch.columns).items()}
        whole_gradients, metrics = loss.gradients({name: rows.unpack(x) for name, x in values.items()}, columns)
        metrics = metrics if batch.is_counted() else {}
        if not torch.is_grad_enabled():
            return values, metrics, torch.zeros(())
        gradients = batch.take({name: rows.pack(gradient) for name, gradient in whole_gradients.items()})

        def product(values: Values, gradients_BL: dict[str, Tensor]):
            return _product(values, gradients_BL), {}

        total = self._run(hidden_BLD, batch, product, gradients, "entropy" in gradients)[2]
        return values, metrics, total

    def _run(self, hidden_BLD: Tensor, batch: PackedBatch, loss, inputs: dict[str, Tensor], with_entropy: bool):
        """-> (values [B, L], metrics, the sum of the loss over the chunks). The loss is called as loss(values, inputs) with a chunk of each."""
        chunks: list[Values] = []
        partials: list[Partials] = []

        def chunk_loss(logits_BLV: Tensor, targets_BL: Tensor, _, *, temperatures_BL: Tensor, top_k=None, **chunk: Any):
            logits, targets_N = Logits.of(logits_BLV, temperatures_BL), targets_BL.flatten()
            values = {"logprobs": self.target_logprobs(logits, targets_N)}
            if with_entropy:
                values["entropy"] = entropy(logits, targets_N)
            if top_k is not None:
                values["target_logprobs"] = top_k_logprobs(logits, targets_N, top_k.flatten(0, 1))
            values = {name: value.unflatten(0, targets_BL.shape) for name, value in values.items()}
            chunks.append({name: value.detach() for name, value in values.items()})
            total, metrics = loss(values, {name.removeprefix("input_"): x for name, x in chunk.items()})
            partials.append(metrics)
            return total, {}

        self.wrapper.num_chunks = self._num_chunks(*batch.tokens_BL.shape)
        self.wrapper.loss_fn = chunk_loss
        named = {f"input_{name}": value for name, value in inputs.items()}  # a column may be called as an argument is
        if "target_ids" in batch.columns:
            named["top_k"] = batch.columns["target_ids"]
        total, _ = self.wrapper(hidden_BLD, batch.targets_BL, temperatures_BL=batch.temperatures_BL, **named)
        if self.keep_head and isinstance(self.wrapper.lm_head, FSDPModule):  # the wrapper leaves True
            self.wrapper.lm_head.set_reshard_after_forward(False, recurse=False)
        values = {name: torch.cat([chunk[name] for chunk in chunks], dim=1) for name in chunks[0]}
        return values, merge(partials), total

    def _num_chunks(self, num_rows: int, row_length: int) -> int:
        """The fewest equal chunks of a row with at most chunk_tokens positions in all rows together, and at least min_chunks."""
        at_least = max(self.min_chunks, -(-num_rows * row_length // self.chunk_tokens))
        return next(n for n in range(min(at_least, row_length), row_length + 1) if row_length % n == 0)


def _product(values: Values, gradients: Values) -> Tensor:
    """What has these gradients with respect to the values."""
    return torch.stack([(values[name] * gradient).sum() for name, gradient in gradients.items()]).sum()
