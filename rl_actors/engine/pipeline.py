"""Runs the microbatches of a call through the stages of a pipeline.

B rows of a microbatch, L tokens in a row, D hidden size.
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
from rl_actors.engine.batch import MicrobatchOutput, PackedBatch
from rl_actors.engine.build import BuiltModel
from rl_actors.engine.collectives import raise_together
from rl_actors.engine.logprobs import ChunkedHead, GuardedLoss
from rl_actors.engine.packing import PlanOptions
from rl_actors.engine.pipeline_stages import Stage
from rl_actors.losses import Loss

SCHEDULES_KEPT = 4
"""Each for a number and shape of microbatches, with or without gradients."""


@dataclass(kw_only=True)
class PipelineCall:
    """The running call: its inputs on this rank, and the results of the last stage."""

    batch: Callable[[int], PackedBatch]  # number of a microbatch -> this rank's shard
    loss: GuardedLoss | None
    with_entropy: bool
    training: bool
    outputs: list[MicrobatchOutput] = field(default_factory=list)
    failure: Exception | None = None


def plan_options(schedule_class: type, num_ranks: int) -> PlanOptions:
    """1F1B needs at least as many microbatches as ranks, Interleaved1F1B a multiple of them."""
    multiple = 1 if _is_single(schedule_class) else num_ranks
    return {"uniform": True, "min_microbatches": num_ranks, "microbatch_multiple": multiple}


def _is_single(schedule_class: type) -> bool:
    """One stage per rank."""
    return issubclass(schedule_class, PipelineScheduleSingle)


class PipelineRunner:
    """Sends microbatches through the stages. Only the last stage has metrics and values.

    torch's schedule passes only tensors, so it gets the number of each microbatch, by which stages
    and loss find its inputs in the PipelineCall.
    """

    _call: PipelineCall  # while a call runs

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
        """As SingleRunner.forward. If the loss fails on one rank, all ranks raise at the end."""
        steady = None if loss is None else GuardedLoss(loss)
        return self._run(batches, steady, with_entropy=with_entropy, training=False)

    def forward_backward(
        self, batches: Iterable[PackedBatch], loss: Loss, *, with_entropy: bool
    ) -> list[MicrobatchOutput]:
        """As SingleRunner.forward_backward."""
        return self._run(batches, GuardedLoss(loss), with_entropy=with_entropy, training=True)

    def _run(
        self, batches: Iterable[PackedBatch], loss: GuardedLoss | None, *, with_entropy: bool, training: bool
    ) -> list[MicrobatchOutput]:
        whole = list(batches)

        def shard(number: int) -> PackedBatch:
            return self.built.shard_rows(whole[number])

        # Made at its first use, to hold few masks. A rank's next stage runs the microbatch
        # num_ranks - 1 forward passes later, so num_ranks are in use; one more is kept.
        batch = lru_cache(self.num_ranks + 1)(shard)
        call = self._call = PipelineCall(batch=batch, loss=loss, with_entropy=with_entropy, training=training)
        numbers = [torch.tensor(number) for number in range(len(whole))]
        shape = batch(0).tokens_BL.shape
        no_tokens_BL = torch.zeros((), dtype=torch.int64, device=self.built.device).expand(shape)
        schedule, stages = self._schedule(shape, len(whole), training)
        # `step` would split a tensor, and our microbatches are made; we do the rest of it here
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
            # the schedule still holds losses, so it cannot be used again
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
    ) -> tuple[tuple[Tensor], dict[str, object]]:
        """Hook before each stage's forward: positions, masks and, on the first stage, tokens."""
        batch = self._call.batch(int(kwargs["number"]))
        self.built.routers.start_microbatch(batch)
        (received,) = args
        if not received.is_floating_point():
            return (batch.tokens_BL,), batch.model_inputs()
        if isinstance(received, DTensor) and received.requires_grad:
            # The gradient may be partial sums over the tensor-parallel ranks, which the sending
            # stage would take as whole.
            received.register_hook(lambda grad: grad.redistribute(placements=received.placements))
        return args, batch.model_inputs()

    def _loss(self, hidden_BLD: Tensor, number: Tensor) -> Tensor:
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
            # the other stages wait for gradients, so they get zeros, and all ranks raise at the end
            call.failure = error
            return hidden_BLD.sum() * 0
        call.outputs.append(MicrobatchOutput(batch, values, metrics, self.built.to_host))
        return total

    def _make_schedule(
        self, shape: torch.Size, count: int, training: bool
    ) -> tuple[PipelineScheduleSingle | PipelineScheduleMulti, list[Stage]]:
        """For `count` microbatches of this shape, which torch needs at the start."""
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
        """Shape, dtype and placement of the hidden states between stages."""
        size = (*shape, self.config.model.hidden_size)
        dtype = TORCH_DTYPE_MAP[self.config.compute_dtype]
        mesh = self.built.parallel_dims.get_optional_mesh("tp")
        if mesh is None:
            return torch.empty(size, dtype=dtype, device="meta")
        placement = Shard(1) if self.config.parallelism.enable_sequence_parallel else Replicate()
        return torch.distributed.tensor.empty(size, dtype=dtype, device_mesh=mesh, placements=[placement])
