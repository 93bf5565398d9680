"""Configs by name: functions that return one; a variant edits another's result."""

from configs.tiny import tiny, tiny_sft

CONFIGS = {"controllers.grpo": {"tiny": tiny}, "controllers.sft": {"tiny": tiny_sft}}
