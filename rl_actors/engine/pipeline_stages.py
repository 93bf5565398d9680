"""The stages of a pipeline: torchtitan's, but they free a microbatch's tensors early.

B rows of a microbatch, L tokens of a row, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.qwen3 import parallelize_qwen3

META = torch.device("meta")


def split_into_stages(
    model: nn.Module,
    *,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    device: torch.device,
    **options: object,
) -> list[PipelineStage]:
    """This rank's parallelized stages, in order. options: other arguments of pipeline_llm."""
    # Only the stages of its schedule are used. Every schedule of layouts.py accepts twice the
    # pipeline degree of microbatches, here local_batch_size.
    training = replace(training, local_batch_size=2 * parallelism.pipeline_parallel_degree)
    schedule, *_ = pipeline_llm(
        model,
        parallelism=parallelism,
        training=training,
        device=device,
        parallelize_fn=parallelize_qwen3,
        loss_fn=lambda *_: None,
        **options,
    )
    return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages


class LocalModel(nn.Module):
    """The modules of this rank's stages under the whole model's names, without a forward."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        for name in ("tok_embeddings", "norm", "lm_head"):
            self.add_module(name, None)
            for part in parts:
                if getattr(part, name) is not None:
                    self.add_module(name, getattr(part, name))
        self.layers = nn.ModuleDict()
        for part in parts:
            self.layers.update(part.layers)


class Stage(PipelineStage):
    """A stage for microbatches of one shape, which frees received and sent tensors after their use.

    Schedules call backward_one_chunk also without gradients, so it frees them.
    The shapes are given, because torch would run an extra microbatch, loss included, to infer them.
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

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        for number in self.args_recv_info:
            _allocate(self.args_recv_info[number], META)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        for number in self.grad_recv_info:
            _allocate(self.grad_recv_info[number], META)

    def get_fwd_recv_ops(self, fwd_chunk_id: int):
        _allocate(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int):
        if self.has_backward:
            _allocate(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, *args: object, **kwargs: object
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        if loss is not None:
            # The schedule keeps the losses until the call ends; a loss's graph holds the gradient
            # of the hidden states.
            loss.detach_()
        self.fwd_cache.pop(bwd_chunk_id, None)
        _allocate(self.args_recv_info[bwd_chunk_id], META)
        _allocate(self.grad_recv_info.get(bwd_chunk_id, ()), META)

    def _post_metadata_inference_cleanup(self) -> None:
        """Does nothing: no shapes are inferred, and torch's would drop accumulated gradients."""


def _allocate(received: Sequence[Any], device: torch.device) -> None:
    """New receive buffers; META frees them, but keeps their shapes and dtypes.

    received: torch's records of the tensors that a stage receives.
    """
    for info in received:
        if info.buffer is not None:
            info.buffer = torch.empty_like(info.buffer, device=device)
