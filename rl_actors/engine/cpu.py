"""Everything a machine without a GPU needs, and nothing else: torchtitan's device, an attention with a backward, sums over gloo.
gpu.py has the same names.

B rows, L row length, N heads, H head width.
"""

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed.tensor.experimental._context_parallel._attention as context_parallel
import torch.nn.functional as F
import torchtitan.tools.utils
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

# torchtitan assumes "cuda" where it finds no accelerator, and its modules copy the value when they are imported.
if not torch.cuda.is_available():
    torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = "cpu", torch.cpu

import torchtitan.models.common.attention as attention_module  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

from rl_actors.engine.batch import PackedBatch  # noqa: E402
from rl_actors.metrics import HostCopy as HostCopy  # noqa: E402  (gpu.py has its own under this name)
from rl_actors.processes import threads  # noqa: E402


class DenseAttention(FlexAttention):
    """torch's scaled_dot_product_attention under a dense mask: flex attention has no backward on a CPU, varlen no kernel."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks: Tensor, scale=None, enable_gqa=False, **_) -> Tensor:
        q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        out_BNLH = F.scaled_dot_product_attention(
            q_BNLH, k_BNLH, v_BNLH, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa
        )
        return out_BNLH.transpose(1, 2)


def dense_mask(positions_BL: Tensor) -> Tensor:
    """[B, 1, L, L] bool: position q sees k when k is not later and of the same document. A document starts where the position is 0."""
    documents_BL = (positions_BL == 0).cumsum(1)
    same_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    return same_BLL.tril()[:, None]


def device() -> torch.device:
    return torch.device("cpu")


def prepare(world_size: int) -> None:
    """Share the cores among the ranks of this host: more threads than cores make gloo and the kernels fight.

    A user's own OMP_NUM_THREADS stands.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    # Both compile the making of a block mask, at every new shape.
    attention_module._compiled_create_block_mask = create_block_mask
    context_parallel._compiled_create_block_mask = create_block_mask
    threads.prepare_cpu_process()


def attention(kernel: str) -> DenseAttention.Config:
    """A CPU has one kernel."""
    return DenseAttention.Config()


def attention_masks(model: nn.Module, kernel: str) -> Callable[[PackedBatch], Tensor]:
    """What the attention layers take for a batch of whole rows."""
    return lambda batch: dense_mask(batch.positions_BL)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor


def fuse(function: Callable) -> Callable:
    """As it is: what a CPU would save in memory traffic it would spend on compiling."""
    return function


def local_masks(masks: BlockMask) -> Tensor:
    """A shard of flex attention's masks as [B, 1, C, L] bool: the C positions that a rank holds of rows of L."""
    num_rows, _, held, row_length = masks.shape
    return create_mask(masks.mask_mod, num_rows, 1, held, row_length, device="cpu")


def after_parallelize(model: nn.Module) -> None:
    """gloo has no PREMUL_SUM, which FSDP picks for a divide factor; torchtitan's factor is 1, so a plain sum is the same."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def has_float8() -> bool:
    return False


def device_name() -> str:
    return "CPU"


def memory_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_memory_bytes() -> int:
    """The most that it was."""
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, memory_bytes())
