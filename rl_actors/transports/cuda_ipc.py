"""GPU memory that other processes of the host can open: CUDA IPC with one cudaMalloc per slot.

torch's own sharing of CUDA tensors counts references in files of /dev/shm, which stay when a
process is killed.
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
"""cudaMalloc packs small allocations into one block, and an IPC handle opens the whole block.
Multiples of this many bytes share no block.
"""
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess: for readers on another GPU
READ_ONLY = 8  # cudaHostRegisterReadOnly


class Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


@functools.cache
def cudart() -> ctypes.CDLL:
    assert torch.version.cuda is not None
    library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _check(code: int, call: str) -> None:
    if code:
        cudart().cudaGetLastError()  # otherwise a later call of torch would report it
        raise RuntimeError(f"{call}: {cudart().cudaGetErrorString(code).decode()}")


class Memory:
    """Bytes at an address of a GPU, which torch wraps without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class DeviceMemory:
    """Memory allocated on a GPU, and its handle for other processes. Freed at garbage collection."""

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
    """GPU memory of another process, open until garbage collection."""

    def __init__(self, handle: bytes, num_bytes: int, gpu: str) -> None:
        """gpu: from `gpu_id`. Raises PermissionError if this process cannot open its memory."""
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
    """UUID of a GPU, the same in all processes of the host."""
    return str(torch.cuda.get_device_properties(device).uuid)


def device_of(gpu: str) -> torch.device | None:
    """None if this process does not see the GPU."""
    if not torch.cuda.is_available():
        return None
    for index in range(torch.cuda.device_count()):
        if gpu_id(torch.device("cuda", index)) == gpu:
            return torch.device("cuda", index)
    return None


@contextlib.contextmanager
def copies_end() -> Iterator[None]:
    """At its end, even after an error, wait until the GPU has finished the copies of the body."""
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def pin(data: Tensor, *, read_only: bool) -> bool:
    """Pin host memory; after True the caller must `unpin`. False without a GPU, for empty `data`,
    or if CUDA refuses. read_only: this process maps the memory only for reading.
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
    """Undo `pin`, before the memory is unmapped."""
    cudart().cudaHostUnregister(ctypes.c_void_p(address))
