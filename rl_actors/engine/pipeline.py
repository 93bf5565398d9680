"""Run the microbatches of a call through the stages of a pipeline. Plans no packing, keeps no gradients.

B rows, L row length, D hidden size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed.tensor
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.config import TORCH_DTYPE_MAP

from rl_actors.config import TrainerConfig
from rl_actors.engine.batch import PackedBatch, model_inputs
from rl_actors.engine.build import BuiltModel
from rl_actors.engine.collectives import raise_together
from rl_actors.engine.logprobs import ChunkedLogprobs, SteadyLoss, Values
from rl_actors.engine.microbatch_output import MicrobatchOutput
from rl_actors.engine.pipeline_stages import Stage
from rl_actors.losses import Loss
from rl_actors.metrics import Partials

Compute = Callable[[Tensor, PackedBatch], tuple[Values, Partials, Tensor]]
"""(hidden_BLD, batch) -> (values, metrics, the loss)."""

SCHEDULES_KEPT = 4


class PipelineRunner:
    """All microbatches of a call through the stages, by torch's schedule. Values and metrics are those of the last stage alone.

    A schedule moves tensors, so it is given the number of each microbatch, by which stages and loss find the rest.
    """

    _call: "PipelineCall"  # while one runs

    def __init__(self, built: BuiltModel, logprobs: ChunkedLogprobs, config: TrainerConfig) -> None:
        self.built, self.logprobs, self.config = built, logprobs, config
        self.schedule_class = get_schedule_class(config.parallelism.pipeline_parallel_schedule)
        self.is_first = any(stage.is_first for stage in built.stages)
        self.reports_metrics = any(stage.is_last for stage in built.stages)
        self.num_ranks = num_ranks = built.parallel_dims.get_mesh("pp").size()
        # 1F1B takes one microbatch a rank or more, Interleaved1F1B a multiple of the ranks.
        multiple = 1 if self._is_single() else num_ranks
        self.planned = {"uniform": True, "min_microbatches": num_ranks, "microbatch_multiple": multiple}
        self._schedule = lru_cache(SCHEDULES_KEPT)(self._make_schedule)
        for stage in built.stages:
            stage.submod.register_forward_pre_hook(self._find_inputs, with_kwargs=True, prepend=True)

    def forward(
        self, batches: Iterable[PackedBatch], loss: Loss | None, *, with_entropy: bool
    ) -> list[MicrobatchOutput]:
        """The values and, of a loss, the metrics, without gradients. A loss that fails on one rank raises on all."""
        steady = None if loss is None else SteadyLoss(loss)

        def evaluate(hidden_BLD: Tensor, batch: PackedBatch):
            return *self.logprobs.evaluate(hidden_BLD, batch, steady, with_entropy=with_entropy), torch.zeros(())

        return self._run(batches, evaluate, steady, training=False)

    def forward_backward(
        self, batches: Iterable[PackedBatch], loss: Loss, *, with_entropy: bool
    ) -> list[MicrobatchOutput]:
        """The values and metrics; adds the gradient of the loss. A loss that fails on one rank raises on all, behind the last microbatch."""
        steady = SteadyLoss(loss)

        def with_loss(hidden_BLD: Tensor, batch: PackedBatch):
            return self.logprobs.loss(hidden_BLD, batch, steady, with_entropy=with_entropy)

        return self._run(batches, with_loss, steady, training=True)

    def _run(
        self, batches: Iterable[PackedBatch], compute: Compute, steady: SteadyLoss | None, *, training: bool
    ) -> list[MicrobatchOutput]:
        whole = list(batches)
        # Masks are made when a stage comes to a microbatch, and stay until the next stage of this rank has come to it.
        held = lru_cache(self.num_ranks + 1)(lambda number: self.built.shard_rows(whole[number]))
        call = self._call = PipelineCall(batch=held, compute=compute)
        numbers = [torch.tensor(number) for number in range(len(whole))]
        shape = held(0).tokens_BL.shape
        # `_find_inputs` puts the tokens in its place.
        nothing_BL = torch.zeros((), dtype=torch.int64, device=self.built.device).expand(shape)
        schedule, stages = self._schedule(shape, len(whole), training)
        # `schedule.step` does the same around this, with one tensor for all microbatches.
        for stage in stages:
            stage.has_backward = training
        try:
            with self.built.forward_context():
                schedule._step_microbatches(
                    arg_mbs=[(nothing_BL,)] * len(whole) if self.is_first else None,
                    kwarg_mbs=[{"number": number} for number in numbers],
                    target_mbs=numbers if self.reports_metrics else None,
                    return_outputs=False,
                )
        except BaseException:
            self._schedule.cache_clear()  # it keeps the losses of the microbatches that were through
            raise
        finally:
            del self._call
            for stage in stages:
                stage.clear_runtime_states()
        raise_together(call.failure or (steady.failure if steady is not None else None))
        return call.outputs

    def _find_inputs(self, part: nn.Module, args: tuple, kwargs: dict[str, Tensor]) -> tuple[tuple, dict[str, Any]]:
        batch = self._call.batch(int(kwargs["number"]))
        self.built.routers.start_microbatch(batch)
        (received,) = args
        if not received.is_floating_point():
            return (batch.tokens_BL,), model_inputs(batch)
        if isinstance(received, DTensor) and received.requires_grad:
            # Its gradient may be partial sums, which the stage before would take for whole.
            received.register_hook(lambda grad: grad.redistribute(placements=received.placements))
        return args, model_inputs(batch)

    def _loss(self, hidden_BLD: Tensor, number: Tensor) -> Tensor:
        call = self._call
        batch = call.batch(int(number))
        try:
            values, metrics, total = call.compute(hidden_BLD, batch)
        except Exception as error:
            call.failure = error
            return hidden_BLD.sum() * 0  # the other stages wait for gradients; then all of them raise
        call.outputs.append(MicrobatchOutput(batch, values, metrics, self.built.to_host))
        return total

    def _is_single(self) -> bool:
        return issubclass(self.schedule_class, PipelineScheduleSingle)

    def _make_schedule(self, shape: torch.Size, count: int, training: bool):
        stages = [Stage(stage, shape, self._hidden(shape)) for stage in self.built.stages]
        schedule = self.schedule_class(
            stages[0] if self._is_single() else stages, n_microbatches=count, loss_fn=self._loss, scale_grads=False
        )
        schedule._has_backward = training
        return schedule, stages

    def _hidden(self, shape: torch.Size) -> Tensor:
        """A tensor like those between the stages."""
        size = (*shape, self.config.model.hidden_size)
        dtype = TORCH_DTYPE_MAP[self.config.compute_dtype]
        mesh = self.built.parallel_dims.get_optional_mesh("tp")
        if mesh is None:
            return torch.empty(size, dtype=dtype, device="meta")
        placement = Shard(1) if self.config.parallelism.enable_sequence_parallel else Replicate()
        return torch.distributed.tensor.empty(size, dtype=dtype, device_mesh=mesh, placements=[placement])


@dataclass(kw_only=True)
class PipelineCall:
    batch: Callable[[int], PackedBatch]  # by number: what this rank holds of it
    compute: Compute
    outputs: list[MicrobatchOutput] = field(default_factory=list)
    failure: Exception | None = None
