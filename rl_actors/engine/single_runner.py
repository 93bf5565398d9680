"""Run the microbatches of a call one after another through the whole model, without a pipeline.

packing.py plans the microbatches.

In shapes, B is the number of rows, L the row length, and D the hidden size.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rl_actors.config import TrainerConfig
from rl_actors.engine.batch import PackedBatch, model_inputs
from rl_actors.engine.build import BuiltModel
from rl_actors.engine.collectives import raise_together
from rl_actors.engine.gradients import local
from rl_actors.engine.logprobs import ChunkedHead, GuardedLoss
from rl_actors.engine.microbatch_output import MicrobatchOutput
from rl_actors.engine.packing import PlanOptions
from rl_actors.losses import Loss


class SingleRunner:
    """Runs one microbatch after another through the whole model."""

    planned: PlanOptions = {}  # only a pipeline needs options for the plan
    reports_metrics = True  # in a pipeline only the last stage has metrics

    def __init__(self, built: BuiltModel, head: ChunkedHead, config: TrainerConfig) -> None:
        self.built = built
        self.head = head
        self.reshard_policy = config.parallelism.fsdp_reshard_after_forward
        model = built.model
        # The head (logprobs.py) decides how long the output projection stays gathered. If the embedding is tied, FSDP
        # gathers it together with the output projection. So `gathered` has the embedding only if it is not tied.
        outer = [] if config.ties_head else [model.tok_embeddings]
        self.gathered: list[FSDPModule] = [*outer, *model.layers.values()]

    def forward(
        self, batches: Iterable[PackedBatch], loss: Loss | None, *, with_entropy: bool
    ) -> list[MicrobatchOutput]:
        """The values of each position, such as logprobs, and, if a loss is given, the loss's metrics. The caller must turn gradients off.

        If the loss fails on one rank, all ranks raise its error.
        """
        steady = None if loss is None else GuardedLoss(loss)
        remaining = iter(batches)
        first_two = list(islice(remaining, 2))
        outputs = []
        with self._gathered(keep=self._keeps_gathered(several=len(first_two) > 1)):
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
        """Add the gradient of the loss to the model's gradients. Returns the values of each position, and the loss's metrics.

        If the loss fails on one rank, all ranks raise its error after the last microbatch.
        """
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
        """Free the second gradient of a tied embedding: 622 MB for Qwen3 0.6B.

        The embedding and the last norm are in one group of FSDP, so FSDP reduces their gradients together, as one tensor.
        FSDP reduces the gradient of a tied embedding twice. The first tensor has the gradient of the output projection.
        The second tensor has the gradient of the embedding's lookup and the gradient of the norm. FSDP adds the lookup's
        gradient to the first gradient. The norm's gradient stays a view of the second tensor, and would keep the whole
        tensor in memory. So this method copies the norm's gradient.
        """
        norm = self.built.model.norm.weight
        if norm.grad is None:
            return
        shard = local(norm.grad)
        if shard.untyped_storage().nbytes() > shard.nbytes:
            norm.grad = norm.grad.clone()

    def _keeps_gathered(self, *, several: bool) -> bool:
        """True if `forward` keeps FSDP's gathered weights from one microbatch to the next. several: True for two or more microbatches."""
        return {"always": False, "never": True, "default": several}[self.reshard_policy]

    @contextmanager
    def _gathered(self, *, keep: bool) -> Iterator[None]:
        """Context manager around the microbatches of a call.

        If `keep` is True, the parameters that FSDP gathers for the first microbatch stay gathered until the last
        microbatch is done.

        At the end these parameters are sharded again. The next optimizer step changes only the shards, so parameters
        that stayed gathered would be out of date.
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
