"""The trainer's functions for a machine without a GPU. gpu.py has functions of the same names for a GPU. The class Machine in machine.py
says what each function does.

If the machine has no GPU, the import of this module sets torchtitan's device to the CPU.

Letters in shapes: B rows, L positions of a row, N attention heads, H width of a head.
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
"""Number of values that are copied to float64 at a time. The copy is 256 KiB, which fits into a core's cache."""

# torchtitan assumes "cuda" if it finds no accelerator. torchtitan's modules copy the value of device_type when they are imported, so the value
# is set before the imports below.
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
    """An attention layer that calls torch's scaled_dot_product_attention with a dense mask.

    It replaces torchtitan's layers, because on a CPU flex attention has no backward pass and varlen attention has no kernel.
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
    """[B, 1, L, L] bool. Entry [b, 0, q, k] says whether position q of row b attends to position k. It is True if k is not later than q and
    both positions are in the same document. positions_BL has the position ids, and a document starts where the id is 0.
    """
    documents_BL = (positions_BL == 0).cumsum(1)
    same_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    return same_BLL.tril()[:, None]


def device() -> torch.device:
    return torch.device("cpu")


def prepare(world_size: int) -> None:
    """Set the number of this rank's threads to the cores of this host divided by the number of ranks. If there are more threads than cores,
    gloo and the kernels slow each other down.

    The number of ranks includes the ranks on other hosts, so with several hosts some cores may get no thread. If the user
    has set OMP_NUM_THREADS, the user's number is kept.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    # Do not compile the function that creates block masks. By default torchtitan's attention and torch's context parallelism would compile the
    # function again for every shape.
    attention_module._compiled_create_block_mask = create_block_mask
    context_parallel._compiled_create_block_mask = create_block_mask
    threads.prepare_cpu_process()


def attention(kernel: str) -> DenseAttention.Config:
    """DenseAttention for every `kernel`, because a CPU has no other kernel with a backward pass."""
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
    """The norm of each tensor, computed in float64.

    On a CPU torch adds float32 squares one after another in float32, and a small square is lost when it is added to a large sum. torch's
    norm of 16 million random values is too small by 0.06 %, and its norm of 155 million values by 2 %.
    """
    found = []
    for tensor in tensors:
        blocks = tensor.flatten().split(NORM_BLOCK)
        of_blocks = torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks])
        found.append(torch.linalg.vector_norm(of_blocks))
    return found


def fuse(function: Callable) -> Callable:
    """The function itself. On a CPU a fused kernel saves less time than it takes to compile."""
    return function


def local_masks(masks: BlockMask) -> Tensor:
    """The masks as [B, 1, C, L] bool, for a rank that holds C positions of each row of length L."""
    num_rows, _, held, row_length = masks.shape
    return create_mask(masks.mask_mod, num_rows, 1, held, row_length, device="cpu")


def after_parallelize(model: nn.Module) -> None:
    """Make FSDP reduce gradients by a plain sum.

    torchtitan sets FSDP's gradient divide factor to 1. With such a factor FSDP reduces by the operation PREMUL_SUM, which gloo does not have.
    Because the factor is 1, a plain sum gives the same result.
    """
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


def host_buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def wait() -> None:
    """Does nothing, because on a CPU the work of a call is done when the call returns."""


def release_memory() -> None:
    """Does nothing. glibc gives freed blocks of 32 MiB and more back to the system at once, and keeps smaller blocks (processes/threads.py)."""


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, memory_bytes())
