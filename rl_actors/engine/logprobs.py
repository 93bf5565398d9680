"""Hidden states -> logprobs of the targets, and back, in chunks: [tokens, vocabulary] never exists whole.

B rows, L row length, D hidden size, V vocabulary. torchtitan's ChunkedLossWrapper drives the chunks and FSDP's gathers.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.loss import ChunkedLossWrapper

from rl_actors.engine.distribution import Logits, entropy, target_logprobs, top_k_logprobs
from rl_actors.engine.inputs import Batch
from rl_actors.losses import Loss, made_for
from rl_actors.metrics import Partials, merge

Values = dict[str, Tensor]
"""What is computed at every position: "logprobs" [B, L], and "entropy" [B, L], "target_logprobs" [B, L, K] where wanted."""


class ChunkedLogprobs:
    """Takes the output projection off the model and applies it to at most `chunk_tokens` positions at a time.

    Of a pipeline stage without one it can do nothing.
    """

    def __init__(self, model: nn.Module, chunk_tokens: int) -> None:
        model._skip_lm_head = True
        self.chunk_tokens = chunk_tokens
        self.wrapper = ChunkedLossWrapper(ChunkedLossWrapper.Config())
        self.wrapper.set_lm_head(model.lm_head)

    def forward(self, hidden_BLD: Tensor, batch: Batch, *, with_entropy: bool = False) -> Values:
        """The values of whole rows, without gradients."""

        def no_loss(values: Values, _):
            return values["logprobs"].sum(), {}

        return batch.gather(self._run(hidden_BLD, batch, no_loss, {}, with_entropy)[0])

    def evaluate(
        self, hidden_BLD: Tensor, batch: Batch, loss: Loss | None, *, with_entropy: bool = False
    ) -> tuple[Values, Partials]:
        """The values and, of a loss, the metrics; under no_grad."""
        if loss is None:
            return self.forward(hidden_BLD, batch, with_entropy=with_entropy), {}
        return self.loss(hidden_BLD, batch, loss, with_entropy=with_entropy)[:2]

    def loss(
        self, hidden_BLD: Tensor, batch: Batch, loss: Loss, *, with_entropy: bool = False
    ) -> tuple[Values, Partials, Tensor]:
        """The values of whole rows, metrics, and the loss, which was back-propagated through the head; its `backward` goes through the model.

        A loss of single positions gets each chunk as it comes. A `whole_sequence` loss gets the values of whole samples first; its
        gradient with respect to them is then what the chunks back-propagate.
        """
        with_entropy = with_entropy or "entropy" in made_for(loss)
        if getattr(loss, "whole_sequence", False):
            return self._whole_sequence(hidden_BLD, batch, loss, with_entropy)

        def of_columns(values: Values, columns_BL: dict[str, Tensor]):
            return _call(loss, values, columns_BL)

        values, metrics, total = self._run(hidden_BLD, batch, of_columns, batch.columns, with_entropy)
        return batch.gather(values), metrics, total

    def _whole_sequence(self, hidden_BLD: Tensor, batch: Batch, loss: Loss, with_entropy: bool):
        with torch.no_grad():
            values = self.forward(hidden_BLD.detach(), batch, with_entropy=with_entropy)
        rows = batch.one_a_row()
        leaves = {name: rows.unpack(value).requires_grad_() for name, value in values.items()}
        columns = {name: rows.unpack(column) for name, column in batch.gather(batch.columns).items()}
        whole, metrics = _call(loss, leaves, columns)
        metrics = metrics if batch.is_counted() else {}
        if not torch.is_grad_enabled():
            return values, metrics, whole
        whole.backward()
        whole_gradients = {name: rows.pack(leaf.grad) for name, leaf in leaves.items() if leaf.grad is not None}
        gradients = batch.take(whole_gradients)

        def product(values: Values, gradients_BL: dict[str, Tensor]):
            return sum((values[name] * gradient).sum() for name, gradient in gradients_BL.items()), {}

        total = self._run(hidden_BLD, batch, product, gradients, "entropy" in gradients)[2]
        return values, metrics, total

    def _run(self, hidden_BLD: Tensor, batch: Batch, loss, inputs: dict[str, Tensor], with_entropy: bool):
        """-> (values [B, L], metrics, the sum of the loss over the chunks). The loss is called as loss(values, inputs) with a chunk of each."""
        chunks: list[Values] = []
        partials: list[Partials] = []
        failures: list[Exception] = []

        def chunk_loss(logits_BLV: Tensor, targets_BL: Tensor, _, *, temperatures_BL: Tensor, top_k=None, **chunk: Any):
            logits, targets_N = Logits.of(logits_BLV, temperatures_BL), targets_BL.flatten()
            values = {"logprobs": target_logprobs(logits, targets_N)}
            if with_entropy:
                values["entropy"] = entropy(logits, targets_N)
            if top_k is not None:
                values["target_logprobs"] = top_k_logprobs(logits, targets_N, top_k.flatten(0, 1))
            values = {name: value.unflatten(0, targets_BL.shape) for name, value in values.items()}
            chunks.append({name: value.detach() for name, value in values.items()})
            try:
                value, metrics = loss(values, {name.removeprefix("input_"): x for name, x in chunk.items()})
            except Exception as error:
                # The wrapper reduces the head's gradient with the last chunk; left before, it would come with the next call's.
                failures.append(error)
                return values["logprobs"].sum() * 0, {}
            partials.append(metrics)
            return value, {}

        self.wrapper.num_chunks = self._num_chunks(*batch.tokens_BL.shape)
        self.wrapper.loss_fn = chunk_loss
        named = {f"input_{name}": value for name, value in inputs.items()}  # a column may be called as an argument is
        if "target_ids" in batch.columns:
            named["top_k"] = batch.columns["target_ids"]
        total, _ = self.wrapper(hidden_BLD, batch.targets_BL, temperatures_BL=batch.temperatures_BL, **named)
        if failures:
            raise failures[0]
        values = {name: torch.cat([chunk[name] for chunk in chunks], dim=1) for name in chunks[0]}
        return values, merge(partials), total

    def _num_chunks(self, num_rows: int, row_length: int) -> int:
        """The fewest equal chunks of a row with at most chunk_tokens positions in all rows together."""
        at_least = -(-num_rows * row_length // self.chunk_tokens)
        return next(n for n in range(min(at_least, row_length), row_length + 1) if row_length % n == 0)


def _call(loss: Loss, values: Values, columns_BL: dict[str, Tensor]) -> tuple[Tensor, Partials]:
    """Gives the loss its columns and what it reads of the values; `loss:sum` is there whether or not it reports one."""
    made = {name: values[name] for name in made_for(loss) if name in values}
    value, metrics = loss(values["logprobs"], **columns_BL, **made)
    return value, {"loss:sum": value.detach(), **metrics}
