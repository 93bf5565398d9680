"""Sets up the threads of a process that computes with torch, and on a CPU also its vector functions and its memory.

A process on a CPU gets accurate vector functions, keeps freed memory, and has one pool of worker threads. The
docstrings of `choose_kernels`, `keep_memory` and `keep_one_pool` give the reasons.

A process that uses a GPU gets few host threads. By default every process of torch splits each host operation on tens
of thousands of numbers among as many threads as the machine has cores. When several such processes shared 64 cores, one
operation on the ids of 65,536 positions took 170 to 200 ms. When each process had four threads, this operation took
1.4 ms.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

import torch

VECTOR_FUNCTIONS = ("cos", "sin", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "tanh", "erf", "erfinv")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # constants of malloc.h
HOST_THREADS = 4


def prepare_cpu_process() -> None:
    """Set up a process that computes on a CPU.

    Set torch's number of threads first. Call this function from the thread that will compute.
    """
    choose_kernels()
    keep_memory()
    keep_one_pool()


def choose_kernels() -> None:
    """Call every vector function once, from one thread, so that each gets its accurate kernel.

    MKL's vector functions choose their kernel at their first call. If several threads make this first call at the same
    time, they may get a kernel of low accuracy. PyTorch 2.13 splits the first large cos or exp of a process among
    threads. As a result, one process in fifty computed the table of its rotary embedding with errors of 1.5e-4, and
    used this table until the process ended (pytorch/pytorch issue 188792).
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(one)


def keep_memory() -> None:
    """Keep freed memory in the process.

    By default glibc gives the memory of activations back to the system after every step. A fifth of the next step is
    then spent on page faults.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)


def keep_one_pool() -> None:
    """Let only this thread compute with worker threads.

    Other threads, such as gloo's, then compute without worker threads.

    OpenMP makes a pool of workers for each thread that computes with several threads. If there are more workers than
    cores, libgomp lets all workers sleep between two kernels, and has to wake them for each kernel. Without this
    function, the collectives of the first checkpoint made a second pool. After this checkpoint a step took twice the
    time.
    """
    # First this thread sets its own number of threads. Then another thread sets torch's default number, which holds for
    # all threads that have not set their own.
    torch.set_num_threads(torch.get_num_threads())
    other = threading.Thread(target=torch.set_num_threads, args=(1,))
    other.start()
    other.join()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Context manager in whose body this thread computes without worker threads.

    Use it for many short copies. If several threads share a copy, the copy is done when the slowest thread is done. On
    a busy machine the slowest thread may have to wait for a core. On four cores with twenty runnable processes, 165
    copies with 0.5 GB in total took 0.1 s on one thread and 0.6 to 9 s on two threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gpu_environment() -> dict[str, str]:
    """Environment variables that limit the host threads of a new process on a GPU.

    Empty if the machine has no GPU, or if the user has set OMP_NUM_THREADS.
    """
    if torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        return {"OMP_NUM_THREADS": str(HOST_THREADS)}
    return {}


def prepare_gpu_process() -> None:
    """Limit the host threads of this process, unless OMP_NUM_THREADS is set. Call this from the thread that will compute.

    This package sets OMP_NUM_THREADS for the processes that it spawns. A process that another program starts may lack
    this variable.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(HOST_THREADS, torch.get_num_threads()))
