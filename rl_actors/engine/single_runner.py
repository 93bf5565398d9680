"""Runs the microbatches of a call through the whole model, one after another, without a pipeline."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rl_actors.config import TrainerConfig
from rl_actors.engine.batch import MicrobatchOutput, PackedBatch
from rl_actors.engine.build import BuiltModel
from rl_actors.engine.collectives import raise_together
from rl_actors.engine.gradients import local
from rl_actors.engine.logprobs import ChunkedHead, GuardedLoss
from rl_actors.engine.packing import PlanOptions
from rl_actors.losses import Loss


class SingleRunner:
    planned: PlanOptions = {}
    reports_metrics = True

    def __init__(self, built: BuiltModel, head: ChunkedHead, config: TrainerConfig) -> None:
        self.built = built
        self.head = head
        self.reshard_policy = config.parallelism.fsdp_reshard_after_forward
        model = built.model
        # the head (logprobs.py) decides it for the output projection and a tied embedding
        outer = [] if config.ties_head else [model.tok_embeddings]
        self.gathered: list[FSDPModule] = [*outer, *model.layers.values()]

    def forward(
        self, batches: Iterable[PackedBatch], loss: Loss | None, *, with_entropy: bool
    ) -> list[MicrobatchOutput]:
        """The values of each position and, with a loss, its metrics. The caller turns gradients off."""
        steady = None if loss is None else GuardedLoss(loss)
        remaining = iter(batches)
        first_two = list(islice(remaining, 2))
        outputs = []
        keep = {"always": False, "never": True, "default": len(first_two) > 1}[self.reshard_policy]
        with self._gathered(keep=keep):
            for batch in chain(first_two, remaining):
                shard = self.built.shard_rows(batch)
                found = self.head.evaluate(self._hidden(shard), shard, steady, with_entropy=with_entropy)
                outputs.append(MicrobatchOutput(shard, *found, self.built.to_host))
        if steady is not None:
            raise_together(steady.failure)
        return outputs

    def forward_backward(
        self, batches: Iterable[PackedBatch], loss: Loss, *, with_entropy: bool
    ) -> list[MicrobatchOutput]:
        """Add the gradient. If the loss fails on one rank, all ranks raise its error at the end."""
        steady = GuardedLoss(loss)
        outputs = []
        for batch in batches:
            shard = self.built.shard_rows(batch)
            values, metrics, total = self.head.loss(self._hidden(shard), shard, steady, with_entropy=with_entropy)
            outputs.append(MicrobatchOutput(shard, values, metrics, self.built.to_host))
            total.backward()
            self._release_tied_gradient()
        raise_together(steady.failure)
        return outputs

    def _release_tied_gradient(self) -> None:
        """Free the second gradient of a tied embedding (622 MB for Qwen3 0.6B), of which the last
        norm's gradient is a view, because FSDP reduces both as one tensor.
        """
        norm = self.built.model.norm.weight
        if norm.grad is None:
            return
        shard = local(norm.grad)
        if shard.untyped_storage().nbytes() > shard.nbytes:
            norm.grad = norm.grad.clone()

    @contextmanager
    def _gathered(self, *, keep: bool) -> Iterator[None]:
        """If `keep`, gathered parameters stay gathered in the body."""
        for module in self.gathered:
            module.set_reshard_after_forward(not keep)
        try:
            yield
        finally:
            for module in self.gathered:
                module.set_reshard_after_forward(self.reshard_policy != "never")
                module.reshard()  # the optimizer changes only the shards

    def _hidden(self, batch: PackedBatch) -> Tensor:
        self.built.routers.start_microbatch(batch)
        with self.built.forward_context():
            return self.built.model(batch.tokens_BL, **batch.model_inputs())
