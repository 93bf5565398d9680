"""The GPUs that a spawned process sees, and their order. Makes no CUDA context: torch only counts the GPUs."""

import os

import torch


def environment(gpus: range) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of processes that use these GPUs. Empty on a machine without GPUs.

    gpus: indices among the GPUs that this program sees. The other GPUs follow after them, because a pull of weights opens memory of the
    GPUs that pushed them. With two visible GPUs, environment(range(1, 2)) gives "1,0", so that device 0 of the process is GPU 1.
    """
    if not torch.cuda.is_available():
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    own = names[gpus.start : gpus.stop]
    return {"CUDA_VISIBLE_DEVICES": ",".join([*own, *(name for name in names if name not in own)])}
