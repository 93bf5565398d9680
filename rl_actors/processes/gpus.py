"""The GPUs that a spawned process sees, and their order. This module makes no CUDA context: it only lets torch count the GPUs."""

import os

import torch


def environment(gpus: range) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of processes that use these GPUs. Empty on a machine without GPUs.

    gpus: indices among the GPUs that this program sees. In the variable these GPUs come first, and the other GPUs follow. The processes must
    see the other GPUs, too, because a process that pulls weights opens memory of the GPUs on which the weights are. If this program sees two
    GPUs, environment(range(1, 2)) gives "1,0", so that device 0 of the process is GPU 1.
    """
    if not torch.cuda.is_available():
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    own = names[gpus.start : gpus.stop]
    return {"CUDA_VISIBLE_DEVICES": ",".join([*own, *(name for name in names if name not in own)])}
