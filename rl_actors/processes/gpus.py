"""Chooses the order in which a spawned process sees the GPUs. Makes no CUDA context."""

import os

import torch


def environment(gpus: range) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for processes on these of this program's GPUs; empty without GPUs.

    The others follow, to open weights on them: of two GPUs, range(1, 2) gives "1,0".
    """
    if not torch.cuda.is_available():
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    own = names[gpus.start : gpus.stop]
    return {"CUDA_VISIBLE_DEVICES": ",".join([*own, *(name for name in names if name not in own)])}
