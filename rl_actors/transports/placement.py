"""Chooses whether the slots of a rank are in the memory of its GPU or in the host's memory.

A slot is the memory in which a rank of the trainer keeps its part of one version of the weights (slots.py). A push writes a version into a slot,
and readers pull it from there. This module needs only numbers, so it runs without a GPU.
"""

from dataclasses import dataclass

from rl_actors.config import WeightsPath

MARGIN = 1.1
"""Factor by which the estimate of training's GPU memory is multiplied. Fragmentation and kernels take memory that the estimate does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the slots of a rank are, and how many slots the rank has.

    If num_slots is 1, a push overwrites the former version. Such a push waits until no reader reads the former version. If the push fails,
    the former version is lost.
    """

    on_gpu: bool = False
    num_slots: int = 2
    pinned: bool = False  # True: the host memory is pinned, so that a GPU copies it at full speed
    reason: str = "the weights are on a CPU"  # why this place was chosen, for the log


def choose(num_bytes: int, *, weights_on_gpu: bool, path: WeightsPath, room: int) -> Place:
    """Choose the place and the number of a rank's slots.

    If the weights are on a CPU, the slots are in the host's memory, which is not pinned. If the weights are on a GPU and the path is
    shared_memory or tcp, the slots are in pinned memory of the host. With every other path the choice is the first of these three that fits: two
    slots on the GPU, one slot on the GPU, two slots in pinned memory of the host.
    The path cuda_ipc excludes the third choice, because its slots must be on the GPU. With cuda_ipc, raises ValueError if the
    weights are on a CPU or no slot fits on the GPU.
    The paths auto and point_to_point may serve readers on other hosts. The slots can be on the GPU even then: NCCL sends the bytes from the
    GPU, and gloo and TCP send them in pieces through the host's memory.
    num_bytes: size of one slot. room: bytes of the GPU that training leaves free.
    """
    if not weights_on_gpu:
        if path == "cuda_ipc":
            raise ValueError('weights.path="cuda_ipc", but the weights of the trainer are on a CPU')
        return Place()
    if path in ("shared_memory", "tcp"):
        return Place(pinned=True, reason=f"weights.path is {path}")
    leaves = f"a version takes {num_bytes / 1e9:.1f} GB and training leaves {max(room, 0) / 1e9:.1f} GB of the GPU"
    if 2 * num_bytes <= room:
        return Place(on_gpu=True, reason=leaves)
    if num_bytes <= room:
        return Place(on_gpu=True, num_slots=1, reason=f"{leaves}, which is too little for two slots")
    if path == "cuda_ipc":
        raise ValueError(f'weights.path="cuda_ipc" needs a slot on the GPU, but {leaves}')
    return Place(pinned=True, reason=f"{leaves}, which is too little for one slot")


def room_for_slots(free: int, held_by_torch: int, training: int) -> int:
    """Bytes of a GPU that training leaves free.

    free: bytes that no process holds now. held_by_torch: bytes that torch holds in this process. training: an estimate of the bytes that
    training holds at its peak. The peak may still be ahead. The bytes that torch holds now count as part of this estimate, so this
    function adds them to `free`.
    """
    return free + held_by_torch - int(MARGIN * training)
