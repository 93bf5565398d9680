"""Deadlines of collectives: how long a rank waits in one for another rank.

After it gloo raises in the waiting rank (see `late`), and NCCL's watchdog kills the process.
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
"""Matches gloo's errors in the collective that timed out, and in all later ones of the group."""


@contextlib.contextmanager
def default_timeout(seconds: float) -> Iterator[None]:
    """New process groups get this deadline in the body; gloo's point-to-point calls keep it."""
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
    """Set every group's deadline, but for gloo's point-to-point calls, when all ranks have called."""
    on_all_ranks(True)
    groups = {mesh.get_group() for mesh in parallel_dims.get_all_one_dimensional_meshes().values()}
    default = dist.group.WORLD
    assert default is not None
    for group in groups | {default}:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def late(error: BaseException) -> bool:
    """True if the error or a cause is gloo's error about a collective that timed out."""
    causes = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__
    return any(LATE.search(str(each)) for each in causes)
