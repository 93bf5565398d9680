"""Run the microbatches of a call one after another through the whole model. Plans no packing, keeps no gradients.

B rows, L row length, D hidden size.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from torch import Tensor

from rl_actors.config import TrainerConfig
from rl_actors.engine.batch import PackedBatch, model_inputs
from rl_actors.engine.build import BuiltModel
from rl_actors.engine.collectives import raise_together
from rl_actors.engine.logprobs import ChunkedLogprobs, SteadyLoss
from rl_actors.engine.microbatch_output import MicrobatchOutput
from rl_actors.losses import Loss


class SingleRunner:
    """One microbatch after another through the whole model."""

    planned: Mapping[str, Any] = {}  # what it asks of `plan`
    reports_metrics = True

    def __init__(self, built: BuiltModel, logprobs: ChunkedLogprobs, config: TrainerConfig) -> None:
        self.built, self.logprobs = built, logprobs
        self.reshard_policy = config.parallelism.fsdp_reshard_after_forward
        model = built.model
        # A tied embedding goes with the head, which `logprobs` looks after.
        outer = [] if config.model.tie_word_embeddings else [model.tok_embeddings]
        self.gathered: list[Any] = [*outer, *model.layers.values()]

    def forward(
        self, batches: Iterator[PackedBatch], loss: Loss | None, *, with_entropy: bool
    ) -> list[MicrobatchOutput]:
        """The values and, of a loss, the metrics, without gradients. A loss that fails on one rank raises on all."""
        steady = None if loss is None else SteadyLoss(loss)
        first = list(islice(batches, 2))
        with self._gathered(keep={"always": False, "never": True, "default": len(first) > 1}[self.reshard_policy]):
            outputs = []
            for batch in map(self.built.shard_rows, chain(first, batches)):
                found = self.logprobs.evaluate(self._hidden(batch), batch, steady, with_entropy=with_entropy)
                outputs.append(MicrobatchOutput(batch, *found, self.built.to_host))
        if steady is not None:
            raise_together(steady.failure)
        return outputs

    def forward_backward(
        self, batches: Iterable[PackedBatch], loss: Loss, *, with_entropy: bool
    ) -> list[MicrobatchOutput]:
        """The values and metrics; adds the gradient of the loss. A loss that fails on one rank raises on all, behind the last microbatch."""
        steady, outputs = SteadyLoss(loss), []
        for batch in map(self.built.shard_rows, batches):
            values, metrics, total = self.logprobs.loss(self._hidden(batch), batch, steady, with_entropy=with_entropy)
            outputs.append(MicrobatchOutput(batch, values, metrics, self.built.to_host))
            total.backward()
        raise_together(steady.failure)
        return outputs

    @contextmanager
    def _gathered(self, *, keep: bool) -> Iterator[None]:
        """keep: FSDP gathers the parameters of a block for the first microbatch and gives them up behind the last.

        Whoever comes next finds shards: an optimizer's step would not reach what is still whole.
        """
        for module in self.gathered:
            module.set_reshard_after_forward(not keep)
        try:
            yield
        finally:
            for module in self.gathered:
                module.set_reshard_after_forward(self.reshard_policy != "never")
                module.reshard()

    def _hidden(self, batch: PackedBatch) -> Tensor:
        self.built.routers.start_microbatch(batch)
        with self.built.forward_context():
            return self.built.model(batch.tokens_BL, **model_inputs(batch))
