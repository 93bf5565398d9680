"""What a process beside a GPU sets: few threads for torch's work on the host.

Left to itself torch takes a thread for every core, in every process, for each operation over some ten thousand numbers. On 64 cores that
several such processes shared, to look through the ids of 65,536 positions took 170 to 200 ms; with four threads 1.4 ms.
"""

import os

import torch

HOST_THREADS = 4


def environment() -> dict[str, str]:
    """Of a process that is to be started on this machine. A user's own OMP_NUM_THREADS stands."""
    beside_gpu = torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ
    return {"OMP_NUM_THREADS": str(HOST_THREADS)} if beside_gpu else {}


def prepare() -> None:
    """The same in a process that somebody else started, from the thread that is to compute."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(HOST_THREADS, torch.get_num_threads()))
