"""The protocol `Machine` lists the functions that both cpu.py and gpu.py have. `this_machine` chooses one of the two modules."""

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
    """The type of the modules cpu.py and gpu.py."""

    @property
    def HostCopy(self) -> type[metrics.HostCopy]:
        """The class that copies device tensors to the host."""

    @property
    def Stopwatch(self) -> type[metrics.Stopwatch]:
        """The class of stopwatches that measure the work of the device."""

    def device(self) -> torch.device:
        """This rank's device. If the device is a GPU, the call makes it torch's current device."""

    def prepare(self, world_size: int) -> None:
        """Configure the threads and the compilers of this process, which is one of world_size ranks."""

    def attention(self, kernel: str) -> FlexAttention.Config | VarlenAttention.Config:
        """torchtitan's config of the attention layers. kernel: TrainerConfig.attention."""

    def attention_masks(self, model: nn.Module, kernel: str, batch: PackedBatch) -> AttentionMasks:
        """The masks to pass to the attention layers for a batch of whole rows."""

    def local_masks(self, masks: BlockMask) -> AttentionMasks:
        """Turn flex attention's masks into the form that this machine's attention layers take.

        masks: masks for the part of each row that a context-parallel rank holds.
        """

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy of a host tensor on the GPU. On a CPU, the tensor itself."""

    def require_cpu_offload(self) -> None:
        """Raises ValueError if FSDP cannot keep its shards in pinned host memory."""

    def norms(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The 2-norm of each tensor, as a scalar tensor (shape [])."""

    def fuse(self, function: Callable) -> Callable:
        """The given function of tensors. On a GPU it is compiled into few kernels. On a CPU it is not compiled, because
        compiling would take more time than it saves.
        """

    def after_parallelize(self, model: nn.Module) -> None:
        """Make FSDP use only reductions that the machine's collective library (gloo or NCCL) has."""

    def has_float8(self) -> bool:
        """True if the machine computes in float8. Otherwise float8 is emulated."""

    def device_name(self) -> str: ...

    def memory_bytes(self) -> int:
        """Bytes of memory in use: on a CPU the resident memory of the process, on a GPU the memory of the tensors."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        """A uint8 tensor in host memory, for copies from and to the device. gpu.py pins this memory."""

    def wait(self) -> None:
        """Wait until the device has done all work, copies included."""

    def release_memory(self) -> None:
        """Release the device memory that tensors no longer use, so that other processes can use it."""

    def peak_memory_bytes(self) -> int:
        """The largest value of memory_bytes so far."""


def this_machine() -> Machine:
    """gpu.py if torch sees a GPU, otherwise cpu.py."""
    if torch.cuda.is_available():
        return gpu
    return cpu
