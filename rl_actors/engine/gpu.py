"""Everything a CUDA machine needs, and nothing else; the same names as in cpu.py."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor.experimental._context_parallel._attention as context_parallel
import torchtitan.models.common.attention as attention_module
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torchtitan.models.common.attention import FlexAttention


def device() -> torch.device:
    """This rank's GPU, made current."""
    index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def prepare(world_size: int) -> None:
    """Compile flex attention without autotuning: its minutes at every new shape are worth it for long runs alone.

    A mask's shard is compiled as the mask is: torch's own way compiles every shape anew, and fails at the ninth.
    """
    FlexAttention.inductor_configs["max_autotune"] = False
    FlexAttention.inductor_configs["coordinate_descent_tuning"] = False
    FlexAttention._compiled_flex_attn = torch.compile(flex_attention, options=FlexAttention.inductor_configs)
    context_parallel._compiled_create_block_mask = attention_module._compiled_create_block_mask


def attention() -> FlexAttention.Config:
    return FlexAttention.Config()


def attention_masks(model: nn.Module) -> Callable[[Tensor], Any]:
    return model.get_attention_masks


def local_masks(masks: BlockMask) -> BlockMask:
    """What the attention layers take of a shard of flex attention's masks."""
    return masks


def after_parallelize(model: nn.Module) -> None:
    """NCCL takes every reduction that FSDP picks."""


def has_float8() -> bool:
    """Compute capability 8.9 (Ada, Hopper) or later."""
    return torch.cuda.get_device_capability() >= (8, 9)


def device_name() -> str:
    return torch.cuda.get_device_name()


def memory_bytes() -> int:
    return torch.cuda.memory_allocated()


def peak_memory_bytes() -> int:
    return torch.cuda.max_memory_allocated()
