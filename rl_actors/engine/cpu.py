"""The trainer's functions for a machine without a GPU, as machine.py describes them.

Without a GPU the import sets torchtitan's device to the CPU.
B rows, L positions of a row, N attention heads, H width of a head.
"""

import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed.tensor.experimental._context_parallel._attention as context_parallel
import torch.nn.functional as F
import torchtitan.tools.utils
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

NORM_BLOCK = 1 << 15
"""Values copied to float64 at a time: 256 KiB, which fit into a core's cache."""

# torchtitan assumes "cuda", and its modules copy device_type when they are imported below.
if not torch.cuda.is_available():
    torchtitan.tools.utils.device_type = "cpu"
    torchtitan.tools.utils.device_module = torch.cpu

import torchtitan.models.common.attention as attention_module  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

from rl_actors.engine.batch import PackedBatch  # noqa: E402
from rl_actors.metrics import HostCopy as HostCopy  # noqa: E402  (gpu.py defines its own HostCopy)
from rl_actors.metrics import Stopwatch as Stopwatch  # noqa: E402  (gpu.py defines its own Stopwatch)
from rl_actors.processes import threads  # noqa: E402


class DenseAttention(FlexAttention):
    """Attention by scaled_dot_product_attention with a dense mask.

    On a CPU flex attention has no backward pass, and varlen attention no kernel.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
        **unused: object,
    ) -> Tensor:
        q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        out_BNLH = F.scaled_dot_product_attention(
            q_BNLH, k_BNLH, v_BNLH, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa
        )
        return out_BNLH.transpose(1, 2)


def dense_mask(positions_BL: Tensor) -> Tensor:
    """[B, 1, L, L] bool: query q attends to key k <= q of its own document. A document starts at
    position id 0.
    """
    documents_BL = (positions_BL == 0).cumsum(1)
    same_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    return same_BLL.tril()[:, None]


def device() -> torch.device:
    return torch.device("cpu")


def prepare(world_size: int) -> None:
    """Divide this host's cores among the ranks, unless OMP_NUM_THREADS is set: more threads slow
    gloo and the kernels.

    Ranks on other hosts count too, so some cores may then get no thread.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    # compiled, the function that makes block masks would compile again for every shape
    attention_module._compiled_create_block_mask = create_block_mask
    context_parallel._compiled_create_block_mask = create_block_mask
    threads.prepare_cpu_process()


def attention(kernel: str) -> DenseAttention.Config:
    """DenseAttention for every `kernel`."""
    return DenseAttention.Config()


def attention_masks(model: nn.Module, kernel: str, batch: PackedBatch) -> Tensor:
    return dense_mask(batch.positions_BL)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor


def require_cpu_offload() -> None:
    raise ValueError(
        "trainer.fsdp_cpu_offload=True on a machine without a GPU: the weights are in the host's memory already"
    )


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """In float64: torch adds float32 squares one by one on a CPU, and small ones are lost.

    Its norm of 16 million random values is too small by 0.06 %, of 155 million by 2 %.
    """
    found = []
    for tensor in tensors:
        blocks = tensor.flatten().split(NORM_BLOCK)
        of_blocks = torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks])
        found.append(torch.linalg.vector_norm(of_blocks))
    return found


def fuse(function: Callable) -> Callable:
    """The function itself: on a CPU compiling takes longer than it saves."""
    return function


def local_masks(masks: BlockMask) -> Tensor:
    """[B, 1, C, L] bool, for a rank that holds C positions of each row."""
    num_rows, _, held, row_length = masks.shape
    return create_mask(masks.mask_mod, num_rows, 1, held, row_length, device="cpu")


def after_parallelize(model: nn.Module) -> None:
    """Make FSDP reduce by a plain sum.

    For torchtitan's divide factor of 1 FSDP uses PREMUL_SUM, which gloo lacks; the result is the
    same.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def has_float8() -> bool:
    return False


def device_name() -> str:
    return "CPU"


def memory_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def host_buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def wait() -> None:
    """Does nothing: work on a CPU is done when its call returns."""


def release_memory() -> None:
    """Does nothing: glibc returns freed blocks from 32 MiB on at once (processes/threads.py)."""


def peak_memory_bytes() -> int:
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, memory_bytes())
