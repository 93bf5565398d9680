"""Configs by name; each function makes one, maybe from another config."""

from configs import qwen3
from configs.blank import blank, blank_sft
from configs.qwen3_ppo import qwen3_0_6b_ppo, qwen3_4b_ppo
from configs.small import small
from configs.tiny import tiny, tiny_dpo, tiny_sft
from configs.tiny_chat import tiny_chat
from configs.tiny_game import tiny_game, tiny_tool
from configs.tiny_ppo import tiny_ppo, tiny_ppo_game, tiny_ppo_tool

_QWEN3 = (
    qwen3.qwen3,
    qwen3.qwen3_0_6b,
    qwen3.qwen3_0_6b_one_gpu,
    qwen3.qwen3_1_7b,
    qwen3.qwen3_1_7b_one_gpu,
    qwen3.qwen3_4b,
    qwen3.qwen3_4b_one_gpu,
    qwen3.qwen3_8b,
    qwen3.qwen3_8b_one_gpu,
)
_PPO = (tiny_ppo, tiny_ppo_game, tiny_ppo_tool, qwen3_0_6b_ppo, qwen3_4b_ppo)
CONFIGS = {
    "controllers.grpo": {"tiny": tiny, "tiny_game": tiny_game, "tiny_tool": tiny_tool, "blank": blank, "small": small}
    | {make.__name__: make for make in _QWEN3},
    "controllers.ppo": {make.__name__: make for make in _PPO},
    "controllers.dpo": {"tiny": tiny_dpo},
    "controllers.sft": {"tiny": tiny_sft, "blank": blank_sft, "qwen3": qwen3.qwen3_sft},
}
"""Module of a training loop -> name -> function."""

SERVERS = {"tiny_chat": tiny_chat, "qwen3": qwen3.qwen3_server}
"""Name of a config of controllers.tinker_server -> function."""
