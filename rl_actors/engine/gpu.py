"""The trainer's functions for a machine with a GPU, as machine.py describes them."""

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed.tensor.experimental._context_parallel._attention as context_parallel
import torchtitan.models.common.attention as attention_module
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata

from rl_actors import metrics
from rl_actors.engine import cpu, flash4
from rl_actors.engine.batch import PackedBatch
from rl_actors.processes import threads


def device() -> torch.device:
    index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def prepare(world_size: int) -> None:
    """Limit the host threads, and turn off flex attention's autotuning, which takes minutes at
    every new shape.

    Under context parallelism torch's own mask function is compiled for at most eight shapes
    (`recompile_limit`) and then raises; torchtitan's serves many shapes.
    """
    threads.prepare_gpu_process()
    FlexAttention.inductor_configs["max_autotune"] = False
    FlexAttention.inductor_configs["coordinate_descent_tuning"] = False
    FlexAttention._compiled_flex_attn = torch.compile(flex_attention, options=FlexAttention.inductor_configs)
    context_parallel._compiled_create_block_mask = attention_module._compiled_create_block_mask


def attention(kernel: str) -> FlexAttention.Config | VarlenAttention.Config:
    return flash4.CONFIGS[kernel]()


def attention_masks(model: nn.Module, kernel: str, batch: PackedBatch) -> BlockMask | VarlenMetadata:
    if kernel == "flex":
        return model.get_attention_masks(batch.positions_BL)
    num_rows, row_length = batch.tokens_BL.shape
    made = flash4.documents(num_rows, row_length, batch.spans)
    starts = to_device(made.cu_seq_q, batch.tokens_BL.device)
    return made._replace(cu_seq_q=starts, cu_seq_k=starts)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Through pinned memory: a copy from pageable memory would wait for all kernels before it."""
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy(metrics.HostCopy):
    """A copy in pinned memory. `wait` does not wait for later kernels."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.to("cpu", non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record()

    def wait(self) -> Tensor:
        self.event.synchronize()
        return self.tensor


class Stopwatch(metrics.Stopwatch):
    """The GPU's time for the kernels launched between `start` and `stop` on the current stream."""

    def __init__(self) -> None:
        super().__init__()
        self._start: torch.cuda.Event | None = None
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        self._start = _event_now()

    def stop(self) -> None:
        if self._start is not None:
            self._spans.append((self._start, _event_now()))

    def take(self) -> float:
        """Seconds since the last `take`. Waits for the measured work."""
        spans = self._spans
        self._spans = []
        milliseconds = 0.0
        for start, end in spans:
            end.synchronize()
            milliseconds += start.elapsed_time(end)
        return milliseconds / 1e3


def _event_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def require_cpu_offload() -> None:
    """Does nothing: memory can be pinned."""


def norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if tensors[0].device.type == "cpu":  # fsdp_cpu_offload is set
        return cpu.norms(tensors)
    return torch._foreach_norm(tensors)


def fuse(function: Callable) -> Callable:
    """Compile, without emulate_precision_casts, which torchtitan's rowwise float8 recipe sets for
    the whole process.
    """
    return torch.compile(function, options={"emulate_precision_casts": False})


def local_masks(masks: BlockMask) -> BlockMask:
    """Unchanged: flex attention takes them."""
    return masks


def after_parallelize(model: nn.Module) -> None:
    """Does nothing: NCCL has every reduction of FSDP."""


def has_float8() -> bool:
    """From compute capability 8.9 on (Ada, Hopper)."""
    return torch.cuda.get_device_capability() >= (8, 9)


def device_name() -> str:
    return torch.cuda.get_device_name()


def memory_bytes() -> int:
    return torch.cuda.memory_allocated()


def host_buffer(num_bytes: int) -> Tensor:
    """Pinned. torch's own function would round the size up to a power of two."""
    memory = mmap.mmap(-1, num_bytes)
    with contextlib.suppress(OSError):  # no huge pages in this system
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    buffer.zero_()  # allocates the pages with several threads; pinning would do it one by one
    error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0)
    if int(error):
        raise RuntimeError(f"{num_bytes:,} bytes of host memory could not be pinned: {error}")
    unpinning = weakref.finalize(buffer.untyped_storage(), torch.cuda.cudart().cudaHostUnregister, buffer.data_ptr())
    unpinning.atexit = False
    return buffer


def wait() -> None:
    torch.cuda.synchronize()


def release_memory() -> None:
    torch.cuda.empty_cache()


def peak_memory_bytes() -> int:
    return torch.cuda.max_memory_allocated()
