"""MKL's vector functions choose their kernel at their first call, and threads that make it together may get one of low accuracy.

PyTorch 2.13 splits the first large cos or exp of a process among threads, so that one process in fifty kept a rotary embedding
with errors of 1.5e-4 for its whole life (pytorch/pytorch issue 188792).
"""

import torch

FUNCTIONS = ("cos", "sin", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "tanh", "erf", "erfinv")


def choose_kernels() -> None:
    """Make the first calls from this thread alone. To be called before the process computes anything on a CPU."""
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(one)
