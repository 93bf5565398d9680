"""What a process that computes on a CPU sets before it computes anything: exact vector functions, memory that stays, one pool of workers.

MKL's vector functions choose their kernel at their first call, and threads that make it together may get one of low accuracy.
PyTorch 2.13 splits the first large cos or exp of a process among threads, so that one process in fifty kept a rotary embedding
with errors of 1.5e-4 for its whole life (pytorch/pytorch issue 188792).
"""

import ctypes
import threading

import torch

VECTOR_FUNCTIONS = ("cos", "sin", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "tanh", "erf", "erfinv")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def prepare() -> None:
    """Call it from the one thread that is to compute with several cores, once it has set how many."""
    choose_kernels()
    keep_memory()
    keep_one_pool()


def choose_kernels() -> None:
    """Make the first calls from this thread alone."""
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(one)


def keep_memory() -> None:
    """glibc gives activations back to the system after every step, and a fifth of the next one is page faults."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)


def keep_one_pool() -> None:
    """Other threads that compute, such as gloo's, do it alone: OpenMP makes a pool of workers for each thread that does not.

    With more workers than cores libgomp lets all of them sleep between two kernels. A checkpoint's collectives made such a pool,
    and from then on a step took twice the time.
    """
    torch.set_num_threads(torch.get_num_threads())  # this thread's own number, which the next line leaves alone
    other = threading.Thread(target=torch.set_num_threads, args=(1,))
    other.start()
    other.join()
