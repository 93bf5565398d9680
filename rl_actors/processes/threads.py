"""Threads of a process that computes with torch; on a CPU also its vector functions and its memory."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

import torch

VECTOR_FUNCTIONS = ("cos", "sin", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "tanh", "erf", "erfinv")
# constants of malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
HOST_THREADS = 4


def prepare_cpu_process() -> None:
    """Call it from the thread that will compute, after torch's number of threads is set."""
    choose_kernels()
    keep_memory()
    keep_one_pool()


def choose_kernels() -> None:
    """Call every vector function once from one thread, so that MKL chooses its accurate kernels:
    with several it may choose one with errors of 1.5e-4 (pytorch/pytorch issue 188792).
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(one)


def keep_memory() -> None:
    """glibc returns freed memory to the system, and page faults then take a fifth of the next step."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)


def keep_one_pool() -> None:
    """Let only this thread compute with worker threads: OpenMP makes a pool for each computing
    thread, and with more workers than cores steps took twice the time.
    """
    # torch's default, set by another thread, holds for the threads without their own number
    torch.set_num_threads(torch.get_num_threads())
    other = threading.Thread(target=torch.set_num_threads, args=(1,))
    other.start()
    other.join()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """For many short copies on a busy machine, where two threads took 6 to 90 times as long as one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gpu_environment() -> dict[str, str]:
    """OMP_NUM_THREADS for a new process, if the machine has a GPU and the user has set none:
    torch's default took 100 times as long as HOST_THREADS in several processes on 64 cores.
    """
    if torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        return {"OMP_NUM_THREADS": str(HOST_THREADS)}
    return {}


def prepare_gpu_process() -> None:
    """Limit the threads of a process without OMP_NUM_THREADS, from the thread that will compute."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(HOST_THREADS, torch.get_num_threads()))
