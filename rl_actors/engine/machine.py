"""`Machine`, the protocol of the modules cpu.py and gpu.py, and `this_machine`, which chooses one."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.models.common.attention import FlexAttention, VarlenAttention

import rl_actors.engine.cpu as cpu
import rl_actors.engine.gpu as gpu
from rl_actors import metrics
from rl_actors.engine.batch import AttentionMasks, PackedBatch


class Machine(Protocol):
    @property
    def HostCopy(self) -> type[metrics.HostCopy]:
        """Copies device tensors to the host."""

    @property
    def Stopwatch(self) -> type[metrics.Stopwatch]:
        """Measures the work of the device."""

    def device(self) -> torch.device:
        """This rank's device. A GPU becomes torch's current device."""

    def prepare(self, world_size: int) -> None:
        """Configure threads and compilers of this process."""

    def attention(self, kernel: str) -> FlexAttention.Config | VarlenAttention.Config:
        """torchtitan's config of the attention layers. kernel: TrainerConfig.attention."""

    def attention_masks(self, model: nn.Module, kernel: str, batch: PackedBatch) -> AttentionMasks:
        """What the attention layers need for a batch of whole rows."""

    def local_masks(self, masks: BlockMask) -> AttentionMasks:
        """Flex attention's masks of a context-parallel rank, as this machine's attention takes
        them.
        """

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy on the GPU; on a CPU the tensor itself."""

    def require_cpu_offload(self) -> None:
        """Raises ValueError if FSDP cannot keep its shards in pinned host memory."""

    def norms(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The 2-norm of each tensor, of shape []."""

    def fuse(self, function: Callable) -> Callable:
        """`function`, on a GPU compiled into few kernels."""

    def after_parallelize(self, model: nn.Module) -> None:
        """Make FSDP use only reductions that gloo or NCCL has."""

    def has_float8(self) -> bool:
        """False: float8 is emulated."""

    def device_name(self) -> str: ...

    def memory_bytes(self) -> int:
        """On a CPU the resident memory of the process, on a GPU that of the tensors."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        """uint8, for copies from and to the device."""

    def wait(self) -> None:
        """Wait until the device has done all work, copies included."""

    def release_memory(self) -> None:
        """Release unused device memory for other processes."""

    def peak_memory_bytes(self) -> int:
        """The largest memory_bytes so far."""


def this_machine() -> Machine:
    if torch.cuda.is_available():
        return gpu
    return cpu
