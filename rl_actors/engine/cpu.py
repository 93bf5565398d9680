"""`Machine`, what the trainer needs of a machine, here without a GPU; the import sets torchtitan's
device to the CPU. B rows, L positions of a row, N attention heads, H width of a head.
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
from torchtitan.models.common.attention import FlexAttention, VarlenAttention  # noqa: E402

from rl_actors import metrics  # noqa: E402
from rl_actors.engine.batch import AttentionMasks, PackedBatch  # noqa: E402
from rl_actors.processes import threads  # noqa: E402


class DenseAttention(FlexAttention):
    """With a dense mask: on a CPU flex attention has no backward pass, varlen attention no kernel."""

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
    """[B, 1, L, L] bool: query q attends to key k <= q of its document, which starts at position 0."""
    documents_BL = (positions_BL == 0).cumsum(1)
    same_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    return same_BLL.tril()[:, None]


class Machine:
    """A machine without a GPU. gpu.py overrides what a GPU does otherwise."""

    host_copy: type[metrics.HostCopy] = metrics.HostCopy
    stopwatch: type[metrics.Stopwatch] = metrics.Stopwatch

    def device(self) -> torch.device:
        """This rank's device. A GPU becomes torch's current device."""
        return torch.device("cpu")

    def prepare(self, world_size: int) -> None:
        """Configure threads and compilers. Divides this host's cores among all ranks, also those of
        other hosts, unless OMP_NUM_THREADS is set: more threads slow gloo and the kernels.
        """
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        # compiled, the function that makes block masks would compile again for every shape
        attention_module._compiled_create_block_mask = create_block_mask
        context_parallel._compiled_create_block_mask = create_block_mask
        threads.prepare_cpu_process()

    def attention(self, kernel: str) -> FlexAttention.Config | VarlenAttention.Config:
        """torchtitan's config of the attention layers. kernel: TrainerConfig.attention."""
        return DenseAttention.Config()

    def attention_masks(self, model: nn.Module, kernel: str, batch: PackedBatch) -> AttentionMasks:
        """What the attention layers need for a batch of whole rows."""
        return dense_mask(batch.positions_BL)

    def local_masks(self, masks: BlockMask) -> AttentionMasks:
        """The masks of a context-parallel rank, here [B, 1, C, L] bool for C positions of each row."""
        num_rows, _, held, row_length = masks.shape
        return create_mask(masks.mask_mod, num_rows, 1, held, row_length, device="cpu")

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy on the GPU; on a CPU the tensor itself."""
        return tensor

    def require_cpu_offload(self) -> None:
        """Raises ValueError if FSDP cannot keep its shards in pinned host memory."""
        raise ValueError(
            "trainer.fsdp_cpu_offload=True on a machine without a GPU: the weights are in the host's memory already"
        )

    def norms(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The 2-norm of each tensor, [], here in float64: torch adds float32 squares one by one on a
        CPU and loses small ones: of 16 million random values 0.06 %, of 155 million 2 %.
        """
        found = []
        for tensor in tensors:
            blocks = tensor.flatten().split(NORM_BLOCK)
            of_blocks = torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks])
            found.append(torch.linalg.vector_norm(of_blocks))
        return found

    def fuse(self, function: Callable) -> Callable:
        """`function`, on a GPU compiled into few kernels, which on a CPU takes longer than it saves."""
        return function

    def after_parallelize(self, model: nn.Module) -> None:
        """Make FSDP reduce by a plain sum: gloo lacks PREMUL_SUM, the same with torchtitan's factor 1."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    def has_float8(self) -> bool:
        """False: float8 is emulated."""
        return False

    def device_name(self) -> str:
        return "CPU"

    def memory_bytes(self) -> int:
        """On a CPU the resident memory of the process, on a GPU that of the tensors."""
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def peak_memory_bytes(self) -> int:
        return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, self.memory_bytes())

    def host_buffer(self, num_bytes: int) -> Tensor:
        """uint8, for copies from and to the device."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def wait(self) -> None:
        """Wait until the device has done all work, copies included. A CPU has when a call returns."""

    def release_memory(self) -> None:
        """Release unused device memory for other processes. glibc does so (processes/threads.py)."""
