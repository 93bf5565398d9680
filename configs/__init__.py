"""Configs by name: functions that return one; a variant edits another's result."""

from configs import qwen3
from configs.small import small
from configs.tiny import tiny, tiny_sft

_SHAPES = (
    qwen3.qwen3_0_6b,
    qwen3.qwen3_0_6b_one_gpu,
    qwen3.qwen3_1_7b,
    qwen3.qwen3_1_7b_one_gpu,
    qwen3.qwen3_4b,
    qwen3.qwen3_4b_one_gpu,
    qwen3.qwen3_8b,
)
CONFIGS = {
    "controllers.grpo": {"tiny": tiny, "small": small} | {make.__name__: make for make in _SHAPES},
    "controllers.sft": {"tiny": tiny_sft},
}
