"""What a process beside a GPU sets: few threads for torch's work on the host; and whether there are GPUs enough.

Left to itself torch takes a thread for every core, in every process, for each operation over some ten thousand numbers. On 64 cores that
several such processes shared, to look through the ids of 65,536 positions took 170 to 200 ms; with four threads 1.4 ms.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from rl_actors import layouts

if TYPE_CHECKING:
    from rl_actors.config import GeneratorConfig, TrainerConfig

HOST_THREADS = 4


def require_gpus(config: TrainerConfig) -> None:
    """Raises ValueError for a layout of more processes than this program sees GPUs, where it sees any."""
    taken, count = config.num_processes(), torch.cuda.device_count()
    if torch.cuda.is_available() and taken > count:
        layout = layouts.described(layouts.all_degrees(config))
        raise ValueError(f"{layout} takes {taken} GPUs, but this program sees {count}")


def require_gpu(config: GeneratorConfig) -> None:
    """Raises ValueError for a generator's GPU that this program does not see, where it sees any."""
    count = torch.cuda.device_count()
    if torch.cuda.is_available() and config.gpu is not None and config.gpu >= count:
        raise ValueError(
            f"generator.gpu={config.gpu}, but this program sees {count} GPUs, from 0 on; one that the trainer has, too, "
            "wants a smaller generator.gpu_memory_utilization"
        )


def environment() -> dict[str, str]:
    """Of a process that is to be started on this machine. A user's own OMP_NUM_THREADS stands."""
    beside_gpu = torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ
    return {"OMP_NUM_THREADS": str(HOST_THREADS)} if beside_gpu else {}


def prepare() -> None:
    """The same in a process that somebody else started, from the thread that is to compute."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(HOST_THREADS, torch.get_num_threads()))
