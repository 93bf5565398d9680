"""Sets the deadline of collectives, which is how long a rank waits in a collective for another rank.

Process groups of gloo and of NCCL get the same deadline. After the deadline gloo raises an error in the waiting rank, and `late`
recognises this error. In an NCCL group torch's watchdog kills the waiting process. Without this deadline the trainer's caller would
learn of a hang only after call_timeout, the longer timeout of a whole call.
"""

import contextlib
import re
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torchtitan.distributed import ParallelDims

from rl_actors.engine.collectives import on_all_ranks

LATE = re.compile(r"Timed out waiting \d+ms for (recv|send) operation|Application timeout caused pair closure")
"""Matches two error messages of gloo.

gloo raises the first error in a collective whose deadline has passed. The rank that waited then closes all its
connections in this group. So gloo raises the second error in every later collective of this rank in this group.
"""


@contextlib.contextmanager
def default_timeout(seconds: float) -> Iterator[None]:
    """Context manager in whose body new process groups get a deadline of `seconds`.

    torch's default is ten minutes for NCCL and half an hour for gloo. The point-to-point sends and receives of a gloo
    group keep the deadline that the group gets at its creation. So the groups must be created with the right deadline.
    """
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    before = {name: getattr(distributed_c10d, name) for name in names}
    for name in names:
        setattr(distributed_c10d, name, timedelta(seconds=seconds))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(distributed_c10d, name, value)


def set_timeouts(parallel_dims: ParallelDims, seconds: float) -> None:
    """Wait until all ranks have called this function, and then set the deadline of every group.

    The point-to-point sends and receives of a gloo group are an exception: they keep the deadline that the group got at
    its creation.

    If the ranks did not wait, one rank could already use a new, shorter deadline while a slower rank is still busy with
    its setup. Then the slower rank could miss the deadline.
    """
    on_all_ranks(True)
    groups = {mesh.get_group() for mesh in parallel_dims.get_all_one_dimensional_meshes().values()}
    default = dist.group.WORLD
    assert default is not None
    for group in groups | {default}:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def late(error: BaseException) -> bool:
    """True if the error, or one of its causes, is gloo's error about a rank that did not join a collective in time."""
    causes = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__
    return any(LATE.search(str(each)) for each in causes)
