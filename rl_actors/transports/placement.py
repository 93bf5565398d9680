"""Chooses whether the slots of a rank are on its GPU or in the host's memory. Runs without a GPU."""

from dataclasses import dataclass

from rl_actors.config import WeightsPath

MARGIN = 1.1
"""Factor on the estimate of training's GPU memory, for fragmentation and uncounted kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the slots of a rank are, and how many. A push into a single slot waits for the readers
    of the former version, and a failed push loses it.
    """

    on_gpu: bool = False
    num_slots: int = 2
    pinned: bool = False  # host memory, pinned
    reason: str = "the weights are on a CPU"  # for the log


def choose(num_bytes: int, *, weights_on_gpu: bool, path: WeightsPath, room: int) -> Place:
    """The first that fits: two slots on the GPU, one on the GPU, two in pinned host memory. For
    weights on a CPU two slots there.

    shared_memory and tcp always take host memory. Raises ValueError if cuda_ipc is impossible.
    num_bytes: of one slot. room: bytes of the GPU that training leaves free.
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
    """Bytes of a GPU that training leaves free. held_by_torch: a part of `training`, its peak."""
    return free + held_by_torch - int(MARGIN * training)
