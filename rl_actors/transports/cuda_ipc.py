"""GPU memory that other processes of the host can open.

A slot is the memory in which a rank keeps its shards of one version of the weights (slots.py). This module allocates
and opens slots on a GPU. It also pins the memory of slots on the host.

torch can share CUDA tensors, too, but it counts references in files of /dev/shm. These files stay when a process is
killed. So this module calls CUDA itself. It calls cudaMalloc once per slot. `SlotAddress.handle` is CUDA's handle of
this memory and has 64 bytes. A reader calls cudaIpcOpenMemHandle once per slot.

docs/weight_sync.md says how long a push and a pull took between two GPUs. tests/gpu/test_weights.py tests this module.
"""

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

HANDLE_BYTES = 64
BLOCK = 2 << 20
"""CUDA puts several small allocations into one block, and the handle of one of them opens all of them. An allocation
shares no block if its size is a multiple of this number of bytes. So each allocation of this module has such a size."""
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess: allows a reader that computes on another GPU
READ_ONLY = 8  # cudaHostRegisterReadOnly


class Handle(ctypes.Structure):
    """CUDA's type cudaIpcMemHandle_t."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


@functools.cache
def cudart() -> ctypes.CDLL:
    """CUDA's runtime, which torch has loaded already."""
    assert torch.version.cuda is not None
    library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _check(code: int, call: str) -> None:
    if code:
        cudart().cudaGetLastError()  # clears the error; otherwise a later call of torch would report it
        raise RuntimeError(f"{call}: {cudart().cudaGetErrorString(code).decode()}")


class Memory:
    """Bytes at an address of a GPU. torch can make a tensor of this object without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class DeviceMemory:
    """Memory that this process allocates on a GPU, and its handle for other processes.

    The garbage collection of this object frees the memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # initializes CUDA
            address = ctypes.c_void_p()
            _check(
                cudart().cudaMalloc(ctypes.byref(address), ctypes.c_size_t(max(1, -(-num_bytes // BLOCK)) * BLOCK)),
                "cudaMalloc",
            )
            weakref.finalize(self, cudart().cudaFree, address)
            handle = Handle()
            _check(cudart().cudaIpcGetMemHandle(ctypes.byref(handle), address), "cudaIpcGetMemHandle")
        self.handle = bytes(handle)
        self.data: Tensor = torch.as_tensor(Memory(address.value or 0, num_bytes), device=device)


class OpenedMemory:
    """GPU memory of another process.

    The constructor opens the memory, and the garbage collection of this object closes it.
    """

    def __init__(self, handle: bytes, num_bytes: int, gpu: str) -> None:
        """gpu: an id from `gpu_id`.

        Raises PermissionError if this process does not see the GPU, or cannot open the memory.
        """
        device = device_of(gpu)
        if device is None:
            raise PermissionError(
                f"this process does not see the GPU {gpu}: CUDA_VISIBLE_DEVICES must name this GPU, too"
            )
        address = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()
            code = cudart().cudaIpcOpenMemHandle(
                ctypes.byref(address), Handle.from_buffer_copy(handle), ctypes.c_uint(LAZY_PEER_ACCESS)
            )
        try:
            _check(code, "cudaIpcOpenMemHandle")
        except RuntimeError as error:
            raise PermissionError(str(error)) from None
        weakref.finalize(self, cudart().cudaIpcCloseMemHandle, address)
        self.data: Tensor = torch.as_tensor(Memory(address.value or 0, num_bytes), device=device)


def gpu_id(device: torch.device) -> str:
    """The id (UUID) of a GPU. It is the same in all processes of the host."""
    return str(torch.cuda.get_device_properties(device).uuid)


def device_of(gpu: str) -> torch.device | None:
    """The GPU with this id. None if this process does not see it."""
    if not torch.cuda.is_available():
        return None
    for index in range(torch.cuda.device_count()):
        if gpu_id(torch.device("cuda", index)) == gpu:
            return torch.device("cuda", index)
    return None


@contextlib.contextmanager
def copies_end() -> Iterator[None]:
    """Context manager. After its body it waits until the GPU has finished all copies of the body.

    It also waits if the body raises an error.
    """
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def pin(data: Tensor, *, read_only: bool) -> bool:
    """Pin memory of the host, so that copies to and from a GPU run at full speed.

    read_only: True if this process may only read the memory.
    Returns True if the memory is pinned. The caller must then call `unpin` later. Returns False if there is no GPU, if
    `data` is empty, or if CUDA refuses. If CUDA refuses, copies take about four times as long.
    """
    if not torch.cuda.is_available() or not data.numel():
        return False
    flags = READ_ONLY if read_only else 0
    code = cudart().cudaHostRegister(
        ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.nbytes), ctypes.c_uint(flags)
    )
    if code:
        cudart().cudaGetLastError()
    return code == 0


def unpin(address: int) -> None:
    """Undo `pin`. Call it before the memory is unmapped."""
    cudart().cudaHostUnregister(ctypes.c_void_p(address))
