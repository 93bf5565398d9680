"""`GPUMachine`, what the trainer needs of a machine with a GPU, and `this_machine`."""

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
from rl_actors.engine import flash4
from rl_actors.engine.batch import PackedBatch
from rl_actors.engine.cpu import Machine
from rl_actors.processes import threads


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


class GPUMachine(Machine):
    host_copy = HostCopy
    stopwatch = Stopwatch

    def device(self) -> torch.device:
        index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def prepare(self, world_size: int) -> None:
        """Also turns off flex attention's autotuning, which takes minutes at every new shape."""
        threads.prepare_gpu_process()
        FlexAttention.inductor_configs["max_autotune"] = False
        FlexAttention.inductor_configs["coordinate_descent_tuning"] = False
        FlexAttention._compiled_flex_attn = torch.compile(flex_attention, options=FlexAttention.inductor_configs)
        # torch's own is compiled for at most eight shapes (`recompile_limit`) and then raises
        context_parallel._compiled_create_block_mask = attention_module._compiled_create_block_mask

    def attention(self, kernel: str) -> FlexAttention.Config | VarlenAttention.Config:
        return flash4.CONFIGS[kernel]()

    def attention_masks(self, model: nn.Module, kernel: str, batch: PackedBatch) -> BlockMask | VarlenMetadata:
        if kernel == "flex":
            return model.get_attention_masks(batch.positions_BL)
        num_rows, row_length = batch.tokens_BL.shape
        made = flash4.documents(num_rows, row_length, batch.spans)
        starts = self.to_device(made.cu_seq_q, batch.tokens_BL.device)
        return made._replace(cu_seq_q=starts, cu_seq_k=starts)

    def local_masks(self, masks: BlockMask) -> BlockMask:
        return masks

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Through pinned memory: a copy from pageable memory would wait for all kernels before it."""
        return tensor.pin_memory().to(device, non_blocking=True)

    def require_cpu_offload(self) -> None:
        """Does nothing: memory can be pinned."""

    def norms(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        on_host = tensors[0].device.type == "cpu"  # fsdp_cpu_offload is set
        return super().norms(tensors) if on_host else torch._foreach_norm(tensors)

    def fuse(self, function: Callable) -> Callable:
        # torchtitan's rowwise float8 sets emulate_precision_casts for the whole process
        return torch.compile(function, options={"emulate_precision_casts": False})

    def after_parallelize(self, model: nn.Module) -> None:
        """Does nothing: NCCL has every reduction of FSDP."""

    def has_float8(self) -> bool:
        """From compute capability 8.9 on (Ada, Hopper)."""
        return torch.cuda.get_device_capability() >= (8, 9)

    def device_name(self) -> str:
        return torch.cuda.get_device_name()

    def memory_bytes(self) -> int:
        return torch.cuda.memory_allocated()

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Pinned. torch's own function would round the size up to a power of two."""
        memory = mmap.mmap(-1, num_bytes)
        with contextlib.suppress(OSError):  # no huge pages in this system
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        buffer.zero_()  # allocates the pages with several threads; pinning would do it one by one
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(buffer.data_ptr(), num_bytes, 0)
        if int(error):
            raise RuntimeError(f"{num_bytes:,} bytes of host memory could not be pinned: {error}")
        unpinning = weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, buffer.data_ptr())
        unpinning.atexit = False
        return buffer

    def wait(self) -> None:
        torch.cuda.synchronize()

    def release_memory(self) -> None:
        torch.cuda.empty_cache()


def this_machine() -> Machine:
    return GPUMachine() if torch.cuda.is_available() else Machine()
