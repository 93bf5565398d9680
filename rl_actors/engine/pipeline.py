"""How the microbatches of a call run: one after another, or through the stages of a pipeline. Plans no packing, keeps no gradients.

B rows, L row length, D hidden size.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed.tensor
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.config import TORCH_DTYPE_MAP

from rl_actors.config import TrainerConfig
from rl_actors.engine.build import Parts
from rl_actors.engine.gather import raise_together
from rl_actors.engine.inputs import Batch
from rl_actors.engine.logprobs import ChunkedLogprobs, SteadyLoss, Values
from rl_actors.engine.outcome import Outcome
from rl_actors.losses import Loss
from rl_actors.metrics import Partials

Compute = Callable[[Tensor, Batch], tuple[Values, Partials, Tensor]]
"""(hidden_BLD, batch) -> (values, metrics, the loss)."""

SCHEDULES_KEPT = 4


class SingleRunner:
    """One microbatch after another through the whole model."""

    planned: Mapping[str, Any] = {}  # what it asks of `plan`
    reports = True

    def __init__(self, parts: Parts, logprobs: ChunkedLogprobs, config: TrainerConfig) -> None:
        self.parts, self.logprobs = parts, logprobs
        self.reshard_policy = config.parallelism.fsdp_reshard_after_forward
        model = parts.model
        # A tied embedding goes with the head, which `logprobs` looks after.
        outer = [] if config.model.tie_word_embeddings else [model.tok_embeddings]
        self.gathered: list[Any] = [*outer, *model.layers.values()]

    def forward(self, batches: Iterator[Batch], loss: Loss | None, *, with_entropy: bool) -> list[Outcome]:
        """The values and, of a loss, the metrics, without gradients. A loss that fails on one rank raises on all."""
        steady = None if loss is None else SteadyLoss(loss)
        first = list(islice(batches, 2))
        with self._gathered(keep={"always": False, "never": True, "default": len(first) > 1}[self.reshard_policy]):
            outcomes = []
            for batch in map(self.parts.rows, chain(first, batches)):
                found = self.logprobs.evaluate(self._hidden(batch), batch, steady, with_entropy=with_entropy)
                outcomes.append(Outcome(batch, *found, self.parts.to_host))
        if steady is not None:
            raise_together(steady.failure)
        return outcomes

    def forward_backward(self, batches: Iterable[Batch], loss: Loss, *, with_entropy: bool) -> list[Outcome]:
        """The values and metrics; adds the gradient of the loss. A loss that fails on one rank raises on all, behind the last microbatch."""
        steady, outcomes = SteadyLoss(loss), []
        for batch in map(self.parts.rows, batches):
            values, metrics, total = self.logprobs.loss(self._hidden(batch), batch, steady, with_entropy=with_entropy)
            outcomes.append(Outcome(batch, values, metrics, self.parts.to_host))
            total.backward()
        raise_together(steady.failure)
        return outcomes

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

    def _hidden(self, batch: Batch) -> Tensor:
        self.parts.routers.begin(batch)
        with self.parts.context():
            return self.parts.model(batch.tokens_BL, **_inputs(batch))


class PipelineRunner:
    """All microbatches of a call through the stages, by torch's schedule. Values and metrics are those of the last stage alone.

    A schedule moves tensors, so it is given the number of each microbatch, by which stages and loss find the rest.
    """

    _call: "_Call"  # while one runs

    def __init__(self, parts: Parts, logprobs: ChunkedLogprobs, config: TrainerConfig) -> None:
        self.parts, self.logprobs, self.config = parts, logprobs, config
        self.schedule_class = get_schedule_class(config.parallelism.pipeline_parallel_schedule)
        self.is_first = any(stage.is_first for stage in parts.stages)
        self.reports = any(stage.is_last for stage in parts.stages)
        self.num_ranks = num_ranks = parts.parallel_dims.get_mesh("pp").size()
        # 1F1B takes one microbatch a rank or more, Interleaved1F1B a multiple of the ranks.
        multiple = 1 if self._is_single() else num_ranks
        self.planned = {"uniform": True, "min_microbatches": num_ranks, "microbatch_multiple": multiple}
        self._schedule = lru_cache(SCHEDULES_KEPT)(self._make_schedule)
        for stage in parts.stages:
            stage.submod.register_forward_pre_hook(self._find_inputs, with_kwargs=True, prepend=True)

    def forward(self, batches: Iterable[Batch], loss: Loss | None, *, with_entropy: bool) -> list[Outcome]:
        """The values and, of a loss, the metrics, without gradients. A loss that fails on one rank raises on all."""
        steady = None if loss is None else SteadyLoss(loss)

        def evaluate(hidden_BLD: Tensor, batch: Batch):
            return *self.logprobs.evaluate(hidden_BLD, batch, steady, with_entropy=with_entropy), torch.zeros(())

        return self._run(batches, evaluate, steady, training=False)

    def forward_backward(self, batches: Iterable[Batch], loss: Loss, *, with_entropy: bool) -> list[Outcome]:
        """The values and metrics; adds the gradient of the loss. A loss that fails on one rank raises on all, behind the last microbatch."""
        steady = SteadyLoss(loss)

        def with_loss(hidden_BLD: Tensor, batch: Batch):
            return self.logprobs.loss(hidden_BLD, batch, steady, with_entropy=with_entropy)

        return self._run(batches, with_loss, steady, training=True)

    def _run(
        self, batches: Iterable[Batch], compute: Compute, steady: SteadyLoss | None, *, training: bool
    ) -> list[Outcome]:
        whole = list(batches)
        # Masks are made when a stage comes to a microbatch, and stay until the next stage of this rank has come to it.
        held = lru_cache(self.num_ranks + 1)(lambda number: self.parts.rows(whole[number]))
        call = self._call = _Call(batch=held, compute=compute)
        numbers = [torch.tensor(number) for number in range(len(whole))]
        shape = held(0).tokens_BL.shape
        # `_find_inputs` puts the tokens in its place.
        nothing_BL = torch.zeros((), dtype=torch.int64, device=self.parts.device).expand(shape)
        schedule, stages = self._schedule(shape, len(whole), training)
        # `schedule.step` does the same around this, with one tensor for all microbatches.
        for stage in stages:
            stage.has_backward = training
        try:
            with self.parts.context():
                schedule._step_microbatches(
                    arg_mbs=[(nothing_BL,)] * len(whole) if self.is_first else None,
                    kwarg_mbs=[{"number": number} for number in numbers],
                    target_mbs=numbers if self.reports else None,
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
        return call.outcomes

    def _find_inputs(self, part: nn.Module, args: tuple, kwargs: dict[str, Tensor]) -> tuple[tuple, dict[str, Any]]:
        batch = self._call.batch(int(kwargs["number"]))
        self.parts.routers.begin(batch)
        (received,) = args
        if not received.is_floating_point():
            return (batch.tokens_BL,), _inputs(batch)
        if isinstance(received, DTensor) and received.requires_grad:
            # Its gradient may be partial sums, which the stage before would take for whole.
            received.register_hook(lambda grad: grad.redistribute(placements=received.placements))
        return args, _inputs(batch)

    def _loss(self, hidden_BLD: Tensor, number: Tensor) -> Tensor:
        call = self._call
        batch = call.batch(int(number))
        try:
            values, metrics, total = call.compute(hidden_BLD, batch)
        except Exception as error:
            call.failure = error
            return hidden_BLD.sum() * 0  # the other stages wait for gradients; then all of them raise
        call.outcomes.append(Outcome(batch, values, metrics, self.parts.to_host))
        return total

    def _is_single(self) -> bool:
        return issubclass(self.schedule_class, PipelineScheduleSingle)

    def _make_schedule(self, shape: torch.Size, count: int, training: bool):
        stages = [_Stage(stage, shape, self._hidden(shape)) for stage in self.parts.stages]
        schedule = self.schedule_class(
            stages[0] if self._is_single() else stages, n_microbatches=count, loss_fn=self._loss, scale_grads=False
        )
        schedule._has_backward = training
        return schedule, stages

    def _hidden(self, shape: torch.Size) -> Tensor:
        """A tensor like those between the stages."""
        size = (*shape, self.config.model.hidden_size)
        dtype = TORCH_DTYPE_MAP[self.config.compute_dtype]
        mesh = self.parts.parallel_dims.get_optional_mesh("tp")
        if mesh is None:
            return torch.empty(size, dtype=dtype, device="meta")
        placement = Shard(1) if self.config.parallelism.enable_sequence_parallel else Replicate()
        return torch.distributed.tensor.empty(size, dtype=dtype, device_mesh=mesh, placements=[placement])


@dataclass(kw_only=True)
class _Call:
    batch: Callable[[int], Batch]  # by number: what this rank holds of it
    compute: Compute
    outcomes: list[Outcome] = field(default_factory=list)
    failure: Exception | None = None


class _Stage(PipelineStage):
    """torchtitan's stage for microbatches of one shape.

    Where it is not told the shapes, torch runs a microbatch forward and backward to see them, through the loss, too.
    Of a call torch's holds all that is received, and in a forward all that is sent; here a microbatch goes with its backward.
    """

    def __init__(self, stage: PipelineStage, shape: torch.Size, hidden_BLD: Tensor) -> None:
        tokens_BL = torch.empty(shape, dtype=torch.int64, device="meta")
        between_BLD = hidden_BLD.detach().requires_grad_()
        super().__init__(
            stage.submod,
            stage.stage_index,
            stage.num_stages,
            stage.device,
            input_args=tokens_BL if stage.is_first else between_BLD,
            input_grads=(None,) if stage.is_first else hidden_BLD,
            output_args=hidden_BLD if stage.is_last else between_BLD,
            output_grads=(None,) if stage.is_last else hidden_BLD,
            group=stage.group,
        )

    def _setup_forward_recv_info(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_forward_recv_info(*args, **kwargs)
        for number in self.args_recv_info:
            _release(self.args_recv_info[number])

    def _setup_backward_recv_info(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_backward_recv_info(*args, **kwargs)
        for number in self.grad_recv_info:
            _release(self.grad_recv_info[number])

    def get_fwd_recv_ops(self, fwd_chunk_id: int):
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int):
        if self.has_backward:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.fwd_cache.pop(bwd_chunk_id, None)
        _release(self.args_recv_info[bwd_chunk_id])
        _release(self.grad_recv_info.get(bwd_chunk_id, ()))

    def _allocate(self, received: Sequence[Any]) -> None:
        for info in received:
            if info.buffer is not None:
                info.buffer = torch.empty_like(info.buffer, device=self.device)

    def _post_metadata_inference_cleanup(self) -> None:
        """torch's drops the gradients that earlier calls accumulated; nothing was inferred, so there is nothing to clean up."""


def _release(received: Sequence[Any]) -> None:
    for info in received:
        if info.buffer is not None:
            info.buffer = torch.empty_like(info.buffer, device="meta")


def _inputs(batch: Batch) -> dict[str, Any]:
    return {"positions": batch.positions_BL, "attention_masks": batch.attention_masks}
