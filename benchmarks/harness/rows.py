"""The shapes of the rows of trainer speed, each one pair in one run, and the configs of the short runs. Imports no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One shape, the same on both sides. A step is `microbatches` of `rows` rows on every GPU, each full of documents of one length."""

    model: str  # of configs.qwen3.MODELS, or "tiny"
    row_length: int  # positions
    document: int  # positions of one document; divides row_length
    rows: int = 1  # of a microbatch
    microbatches: int = 1  # of a step
    checkpointing: Literal["none", "products", "selective", "full"] = "selective"
    attention: Literal["flex", "flash4"] = "flash4"  # ours; torchtitan's pieces have flex attention
    float8: bool = False
    float8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    num_gpus: int = 1  # FSDP over them; 0: a CPU row
    chunks: int = 8  # of a microbatch's logits: torchtitan's default

    @property
    def positions(self) -> int:
        """Of a step on one GPU; all are useful."""
        return self.rows * self.row_length * self.microbatches


TRACED_STEPS = 2
"""So that a trace has what lies between two."""

PACKED = {"row_length": 32_768, "document": 2048}

ROWS = {
    "0_6b-16k": Row(model="0_6b", row_length=16_384, document=16_384, microbatches=4),
    "0_6b-16k-kept": Row(model="0_6b", row_length=16_384, document=16_384, microbatches=4, checkpointing="none"),
    "0_6b-64k": Row(model="0_6b", row_length=65_536, document=65_536),
    "0_6b-packed": Row(model="0_6b", rows=2, **PACKED),
    "0_6b-packed-kept": Row(model="0_6b", rows=2, checkpointing="none", **PACKED),
    "1_7b-4k": Row(model="1_7b", row_length=4096, document=4096, rows=4, microbatches=4),
    "4b-16k": Row(model="4b", row_length=16_384, document=16_384, microbatches=2),
    "4b-packed": Row(model="4b", **PACKED),
    "4b-packed-float8": Row(model="4b", float8=True, **PACKED),
    "4b-packed-float8-rowwise": Row(model="4b", float8=True, float8_recipe="rowwise", **PACKED),
    "4b-packed-float8-rowwise-gw-hp": Row(model="4b", float8=True, float8_recipe="rowwise_with_gw_hp", **PACKED),
    "4b-packed-2gpu": Row(model="4b", num_gpus=2, **PACKED),
    "8b-packed-4gpu": Row(model="8b", num_gpus=4, **PACKED),
    "tiny-cpu": Row(
        model="tiny", row_length=512, document=128, num_gpus=0, microbatches=2, checkpointing="none", attention="flex"
    ),
}

RUNS = {
    "qwen3_0_6b": 2,
    "qwen3_0_6b_one_gpu": 1,
    "qwen3_1_7b": 2,
    "qwen3_1_7b_one_gpu": 1,
    "qwen3_4b": 2,
    "qwen3_4b_one_gpu": 1,
    "qwen3_8b": 2,
    "tiny": 0,
}
"""Configs of a short run -> GPUs."""
