"""Everything a CUDA machine needs, and nothing else; the same names as in cpu.py."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor.experimental._context_parallel._attention as context_parallel
import torchtitan.models.common.attention as attention_module
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torchtitan.models.common.attention import FlexAttention, VarlenMetadata

from rl_actors import metrics
from rl_actors.engine import flash4
from rl_actors.engine.batch import PackedBatch
from rl_actors.processes import threads


def device() -> torch.device:
    """This rank's GPU, made current."""
    index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def prepare(world_size: int) -> None:
    """Compile flex attention without autotuning: its minutes at every new shape are worth it for long runs alone.

    A mask's shard is compiled as the mask is: torch's own way compiles every shape anew, and fails at the ninth.
    """
    threads.prepare_gpu_process()
    FlexAttention.inductor_configs["max_autotune"] = False
    FlexAttention.inductor_configs["coordinate_descent_tuning"] = False
    FlexAttention._compiled_flex_attn = torch.compile(flex_attention, options=FlexAttention.inductor_configs)
    context_parallel._compiled_create_block_mask = attention_module._compiled_create_block_mask


def attention(kernel: str) -> Any:
    return flash4.CONFIGS[kernel]()


def attention_masks(model: nn.Module, kernel: str) -> Callable[[PackedBatch], Any]:
    """What the attention layers take for a batch of whole rows."""
    if kernel == "flex":
        return lambda batch: model.get_attention_masks(batch.positions_BL)

    def documents(batch: PackedBatch) -> VarlenMetadata:
        num_rows, row_length = batch.tokens_BL.shape
        made = flash4.documents(num_rows, row_length, batch.spans)
        starts = to_device(made.cu_seq_q, batch.tokens_BL.device)
        return made._replace(cu_seq_q=starts, cu_seq_k=starts)

    return documents


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """From pinned memory: a copy from pageable memory would wait until the kernels before it are through."""
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy(metrics.HostCopy):
    """A copy of a device tensor in pinned memory. `wait` does not wait for kernels that were launched after the copy."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.to("cpu", non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record()

    def wait(self) -> Tensor:
        self.event.synchronize()
        return self.tensor


def fuse(function: Callable) -> Callable:
    """A function of tensors as few kernels. Where float8 has compiled kernels round as eager ones would, these need not."""
    return torch.compile(function, options={"emulate_precision_casts": False})


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
