"""The machine as the rest of the engine sees it: the functions that cpu.py and gpu.py share, and which of the two modules to use."""

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
    """A module, cpu.py or gpu.py."""

    @property
    def HostCopy(self) -> type[metrics.HostCopy]:
        """A copy of a device tensor to the host."""

    def device(self) -> torch.device:
        """This rank's device, made current."""

    def prepare(self, world_size: int) -> None:
        """Set up this process for computing, as one of world_size ranks."""

    def attention(self, kernel: str) -> FlexAttention.Config | VarlenAttention.Config:
        """torchtitan's config of the attention layers. kernel: TrainerConfig.attention."""

    def attention_masks(self, model: nn.Module, kernel: str, batch: PackedBatch) -> AttentionMasks:
        """The attention layers' argument for a batch of whole rows."""

    def local_masks(self, masks: BlockMask) -> AttentionMasks:
        """The attention layers' argument for a context-parallel rank's shard of flex attention's masks."""

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy of a host tensor on the device."""

    def norms(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The 2-norm of each tensor, [] each."""

    def fuse(self, function: Callable) -> Callable:
        """A function of tensors -> the same function as few kernels."""

    def after_parallelize(self, model: nn.Module) -> None:
        """Adapt a parallelized model to the reductions that the machine has."""

    def has_float8(self) -> bool:
        """True if the machine computes in float8; else float8 is emulated."""

    def device_name(self) -> str: ...

    def memory_bytes(self) -> int:
        """Memory in use: of the process on a CPU, of the device's tensors on a GPU."""

    def peak_memory_bytes(self) -> int:
        """The most memory that was in use so far."""


def this_machine() -> Machine:
    """gpu.py where torch sees a GPU, else cpu.py."""
    if torch.cuda.is_available():
        return gpu
    return cpu
