"""Chooses the order in which a spawned process sees the GPUs.

The module makes no CUDA context. It only asks torch for the number of GPUs.
"""

import os

import torch


def environment(gpus: range) -> dict[str, str]:
    """The environment variable CUDA_VISIBLE_DEVICES for processes that use these GPUs. On a machine without GPUs the
    dict is empty.

    gpus: indices of the GPUs that the processes use, among the GPUs that this program sees. The variable lists these
    GPUs first, and then the other GPUs. The processes must see the other GPUs, too, because a process that pulls
    weights opens memory of the GPUs that hold the weights. If this program sees two GPUs, environment(range(1, 2))
    gives the value "1,0", so that device 0 of the process is GPU 1.
    """
    if not torch.cuda.is_available():
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    own = names[gpus.start : gpus.stop]
    return {"CUDA_VISIBLE_DEVICES": ",".join([*own, *(name for name in names if name not in own)])}
