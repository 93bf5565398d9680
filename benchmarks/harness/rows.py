"""Shapes that the benchmark `trainer_speed` measures, and configs that the benchmark `runs` measures. This module does not import torch."""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table in docs/speed.md: a model, the batch of a step, and settings.

    trainer_speed measures two trainers with this model and batch: ours, and one made of torchtitan's pieces. The field `microbatches` is the
    number of microbatches of a step on each GPU. A microbatch is a tensor, and the field `rows` is the number of its rows. Documents of one
    length fill each row, so no position is padding.
    """

    model: str  # a key of configs.qwen3.MODELS, or "tiny"
    row_length: int  # positions of a row
    document: int  # positions of a document; divides row_length
    rows: int = 1  # rows of a microbatch
    microbatches: int = 1  # microbatches of a step on each GPU
    checkpointing: Literal["none", "products", "selective", "full"] = "selective"
    attention: Literal["flex", "flash4"] = "flash4"  # the kernel of both trainers; a CPU has only one kernel
    float8: bool = False
    float8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    num_gpus: int = 1  # FSDP shards the model over all of them; 0 stands for a CPU
    chunks: int = 8  # number of chunks in which the logits of a microbatch are computed; 8 is torchtitan's default

    @property
    def positions(self) -> int:
        """Positions of a step on one GPU."""
        return self.rows * self.row_length * self.microbatches


TRACED_STEPS = 2
"""Steps in a trace. There are two, so that the trace also shows the time between steps."""

PACKED = {"row_length": 32_768, "document": 2048}
ROW_0_6B_16K = Row(model="0_6b", row_length=16_384, document=16_384, microbatches=4)
ROW_0_6B_PACKED = Row(model="0_6b", rows=2, **PACKED)
ROW_4B_PACKED = Row(model="4b", **PACKED)

ROWS = {
    "0_6b-16k": ROW_0_6B_16K,
    "0_6b-16k-flex": replace(ROW_0_6B_16K, attention="flex"),
    "0_6b-16k-kept": replace(ROW_0_6B_16K, checkpointing="none"),
    "0_6b-64k": Row(model="0_6b", row_length=65_536, document=65_536),
    "0_6b-packed": ROW_0_6B_PACKED,
    "0_6b-packed-flex": replace(ROW_0_6B_PACKED, attention="flex"),
    "0_6b-packed-kept": replace(ROW_0_6B_PACKED, checkpointing="none"),
    "1_7b-4k": Row(model="1_7b", row_length=4096, document=4096, rows=4, microbatches=4),
    "4b-16k": Row(model="4b", row_length=16_384, document=16_384, microbatches=2),
    "4b-packed": ROW_4B_PACKED,
    "4b-packed-flex": replace(ROW_4B_PACKED, attention="flex"),
    "4b-packed-float8": replace(ROW_4B_PACKED, float8=True),
    "4b-packed-float8-rowwise": replace(ROW_4B_PACKED, float8=True, float8_recipe="rowwise"),
    "4b-packed-float8-rowwise-gw-hp": replace(ROW_4B_PACKED, float8=True, float8_recipe="rowwise_with_gw_hp"),
    "4b-packed-2gpu": replace(ROW_4B_PACKED, num_gpus=2),
    "8b-packed-2gpu": Row(model="8b", num_gpus=2, **PACKED),
    "8b-packed-4gpu": Row(model="8b", num_gpus=4, **PACKED),
    "tiny-cpu": Row(
        model="tiny", row_length=512, document=128, num_gpus=0, microbatches=2, checkpointing="none", attention="flex"
    ),
}
"""Rows by their names. In a row whose name ends in "-kept", all activations are kept, so nothing is recomputed."""

RUNS = {
    "qwen3_0_6b": 2,
    "qwen3_0_6b_one_gpu": 1,
    "qwen3_1_7b": 2,
    "qwen3_1_7b_one_gpu": 1,
    "qwen3_4b": 2,
    "qwen3_4b_one_gpu": 1,
    "qwen3_8b": 2,
    "qwen3_8b_one_gpu": 1,
    "tiny": 0,
}
"""Name of a config -> number of GPUs that runs.py uses for a short run of the config. 0: the run is on a CPU."""
