"""Cut a model into the stages of a pipeline, by torchtitan, and name what this rank holds of it. Runs nothing."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.qwen3 import parallelize_qwen3


def cut(
    model: nn.Module, *, parallelism: ParallelismConfig, training: TrainingConfig, device: torch.device, **options: Any
) -> list[PipelineStage]:
    """This rank's stages, first to last, their modules parallelized. options: what else torchtitan's pipelining_fn takes."""
    # It makes a schedule, too, which pipeline.py replaces: a number of microbatches that every schedule takes.
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
    return getattr(schedule, "_stages", None) or [schedule._stage]


class LocalModel(nn.Module):
    """The modules of this rank's stages under the names that they have in the whole model. It cannot run."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        for name in ("tok_embeddings", "norm", "lm_head"):
            held = [module for part in parts if (module := getattr(part, name)) is not None]
            self.add_module(name, held[0] if held else None)
        self.layers = nn.ModuleDict({name: layer for part in parts for name, layer in part.layers.items()})
