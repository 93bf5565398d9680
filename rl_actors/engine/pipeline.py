"""Runs the microbatches of a call through the stages of a pipeline. Other modules pack the samples into microbatches.

Letters of shapes: B rows of a microbatch, L tokens in a row, D hidden size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.distributed.tensor
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.config import TORCH_DTYPE_MAP

from rl_actors.config import TrainerConfig
from rl_actors.engine.batch import ModelInputs, PackedBatch, model_inputs
from rl_actors.engine.build import BuiltModel
from rl_actors.engine.collectives import raise_together
from rl_actors.engine.logprobs import ChunkedHead, GuardedLoss
from rl_actors.engine.microbatch_output import MicrobatchOutput
from rl_actors.engine.packing import PlanOptions
from rl_actors.engine.pipeline_stages import Stage
from rl_actors.losses import Loss

SCHEDULES_KEPT = 4
"""Largest number of schedules in the cache. A schedule is made for one number of microbatches and one shape, and either
for calls with gradients or for calls without gradients."""


@dataclass(kw_only=True)
class PipelineCall:
    """The call that runs now: the inputs of its microbatches on this rank, and the results of the last stage."""

    batch: Callable[[int], PackedBatch]  # takes the number of a microbatch, returns this rank's shard of the microbatch
    loss: GuardedLoss | None
    with_entropy: bool
    training: bool
    outputs: list[MicrobatchOutput] = field(default_factory=list)
    failure: Exception | None = None


def plan_options(schedule_class: type, num_ranks: int) -> PlanOptions:
    """The arguments of packing.plan that a pipeline of `num_ranks` ranks needs. schedule_class: torch's class of the schedule.

    1F1B needs at least as many microbatches as ranks. For Interleaved1F1B the number of microbatches must be a multiple
    of the number of ranks.
    """
    multiple = 1 if _is_single(schedule_class) else num_ranks
    return {"uniform": True, "min_microbatches": num_ranks, "microbatch_multiple": multiple}


def _is_single(schedule_class: type) -> bool:
    """True for schedules with one stage per rank."""
    return issubclass(schedule_class, PipelineScheduleSingle)


class PipelineRunner:
    """Sends all microbatches of a call through the stages in the order of torch's schedule. Only the last stage has metrics
    and values, such as logprobs.

    A schedule of torch passes only tensors to the stages and to the loss. So the runner gives the schedule the number
    of each microbatch as a tensor. By this number, the stages and the loss look up the inputs of the microbatch in the
    PipelineCall.
    """

    _call: PipelineCall  # exists while a call runs

    def __init__(self, built: BuiltModel, head: ChunkedHead, config: TrainerConfig) -> None:
        self.built = built
        self.head = head
        self.config = config
        self.schedule_class = get_schedule_class(config.parallelism.pipeline_parallel_schedule)
        self.is_first = any(stage.is_first for stage in built.stages)
        self.reports_metrics = any(stage.is_last for stage in built.stages)
        self.num_ranks = built.parallel_dims.get_mesh("pp").size()
        self.planned = plan_options(self.schedule_class, self.num_ranks)
        self._schedule = lru_cache(SCHEDULES_KEPT)(self._make_schedule)
        for stage in built.stages:
            stage.submod.register_forward_pre_hook(self._find_inputs, with_kwargs=True, prepend=True)

    def forward(
        self, batches: Iterable[PackedBatch], loss: Loss | None, *, with_entropy: bool
    ) -> list[MicrobatchOutput]:
        """The values and, if a loss is given, the metrics of the loss. Computes no gradients. If the loss fails on one rank, all ranks raise the
        error after the last microbatch.
        """
        steady = None if loss is None else GuardedLoss(loss)
        return self._run(batches, steady, with_entropy=with_entropy, training=False)

    def forward_backward(
        self, batches: Iterable[PackedBatch], loss: Loss, *, with_entropy: bool
    ) -> list[MicrobatchOutput]:
        """Add the gradient of the loss, and return values and metrics. If the loss fails on one rank, all ranks raise the error after the
        last microbatch.
        """
        return self._run(batches, GuardedLoss(loss), with_entropy=with_entropy, training=True)

    def _run(
        self, batches: Iterable[PackedBatch], loss: GuardedLoss | None, *, with_entropy: bool, training: bool
    ) -> list[MicrobatchOutput]:
        whole = list(batches)

        def shard(number: int) -> PackedBatch:
            return self.built.shard_rows(whole[number])

        # A shard has attention masks, and a call should not hold the masks of all its microbatches at once. So a shard is made when the
        # first stage of this rank runs the microbatch. If this rank has a second stage, that stage runs the same microbatch later: this
        # rank's next num_ranks - 1 forward passes come in between. So num_ranks shards are in use at once. The cache keeps one more.
        batch = lru_cache(self.num_ranks + 1)(shard)
        call = self._call = PipelineCall(batch=batch, loss=loss, with_entropy=with_entropy, training=training)
        numbers = [torch.tensor(number) for number in range(len(whole))]
        shape = batch(0).tokens_BL.shape
        # `_find_inputs` replaces this placeholder by the tokens.
        no_tokens_BL = torch.zeros((), dtype=torch.int64, device=self.built.device).expand(shape)
        schedule, stages = self._schedule(shape, len(whole), training)
        # The public schedule.step splits one tensor into microbatches. Our microbatches are made already, so we call _step_microbatches. The
        # code around this call does what `step` would do before and after it.
        for stage in stages:
            stage.has_backward = training
        try:
            with self.built.forward_context():
                schedule._step_microbatches(
                    arg_mbs=[(no_tokens_BL,)] * len(whole) if self.is_first else None,
                    kwarg_mbs=[{"number": number} for number in numbers],
                    target_mbs=numbers if self.reports_metrics else None,
                    return_outputs=False,
                )
        except BaseException:
            # The schedule still holds the losses of the microbatches that were done before the error, so this schedule cannot be used again.
            self._schedule.cache_clear()
            raise
        finally:
            del self._call
            for stage in stages:
                stage.clear_runtime_states()
        raise_together(call.failure or (loss.failure if loss is not None else None))
        return call.outputs

    def _find_inputs(
        self, part: nn.Module, args: tuple[Tensor], kwargs: dict[str, Tensor]
    ) -> tuple[tuple[Tensor], ModelInputs]:
        """A hook that runs before each stage's forward. It replaces the number of the microbatch by the microbatch's
        positions and masks. On the first stage it also replaces the placeholder by the tokens.
        """
        batch = self._call.batch(int(kwargs["number"]))
        self.built.routers.start_microbatch(batch)
        (received,) = args
        if not received.is_floating_point():
            return (batch.tokens_BL,), model_inputs(batch)
        if isinstance(received, DTensor) and received.requires_grad:
            # The gradient of a received tensor may consist of partial sums on the tensor-parallel ranks. The stage that
            # sent the tensor would use a partial sum as if it were the gradient. So this hook adds up the partial sums.
            received.register_hook(lambda grad: grad.redistribute(placements=received.placements))
        return args, model_inputs(batch)

    def _loss(self, hidden_BLD: Tensor, number: Tensor) -> Tensor:
        """The loss function, which the schedule calls for each microbatch on the last stage."""
        call = self._call
        batch = call.batch(int(number))
        try:
            if call.training:
                assert call.loss is not None
                values, metrics, total = self.head.loss(hidden_BLD, batch, call.loss, with_entropy=call.with_entropy)
            else:
                values, metrics = self.head.evaluate(hidden_BLD, batch, call.loss, with_entropy=call.with_entropy)
                total = torch.zeros(())
        except Exception as error:
            # The other stages wait for gradients. So this stage goes on and sends them zeros, and all ranks raise the error after the last
            # microbatch.
            call.failure = error
            return hidden_BLD.sum() * 0
        call.outputs.append(MicrobatchOutput(batch, values, metrics, self.built.to_host))
        return total

    def _make_schedule(
        self, shape: torch.Size, count: int, training: bool
    ) -> tuple[PipelineScheduleSingle | PipelineScheduleMulti, list[Stage]]:
        """A schedule for `count` microbatches of this shape. torch needs count and shape when it makes a schedule."""
        stages = [Stage(stage, shape, self._hidden(shape)) for stage in self.built.stages]
        schedule = self.schedule_class(
            stages[0] if _is_single(self.schedule_class) else stages,
            n_microbatches=count,
            loss_fn=self._loss,
            scale_grads=False,
        )
        schedule._has_backward = training
        return schedule, stages

    def _hidden(self, shape: torch.Size) -> Tensor:
        """A tensor with the shape, dtype and placement of the hidden states that the stages send to each other."""
        size = (*shape, self.config.model.hidden_size)
        dtype = TORCH_DTYPE_MAP[self.config.compute_dtype]
        mesh = self.built.parallel_dims.get_optional_mesh("tp")
        if mesh is None:
            return torch.empty(size, dtype=dtype, device="meta")
        placement = Shard(1) if self.config.parallelism.enable_sequence_parallel else Replicate()
        return torch.distributed.tensor.empty(size, dtype=dtype, device_mesh=mesh, placements=[placement])
