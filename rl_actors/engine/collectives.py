"""What the ranks tell each other of themselves: small values, and whole tensors one at a time. Collective; knows no model."""

import contextlib
import pickle
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def by_rank(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank of the group gave, by rank. torch.distributed prefers the CPU for objects, so it works beside NCCL."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_all_ranks(holds: bool) -> bool:
    """The logical and over the ranks, on CPU tensors, so that the same call works over gloo and beside NCCL."""
    flag = torch.tensor(int(holds))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def raise_together(failure: Exception | None) -> None:
    """Raises on every rank when one failed: its own failure where there is one, elsewhere the first failing rank's.

    That has the rank as its attribute `rank` and the traceback as a note; one that cannot be pickled becomes a RuntimeError with its words.
    """
    if on_all_ranks(failure is None):
        return
    failures = by_rank(failure and _sendable(failure))
    rank = next(rank for rank, sent in enumerate(failures) if sent is not None)
    first = failure or pickle.loads(failures[rank])
    setattr(first, "rank", dist.get_rank() if failure else rank)  # noqa: B010
    raise first


def _sendable(failure: Exception) -> bytes:
    copy: Exception = RuntimeError(repr(failure))
    with contextlib.suppress(Exception):
        copy = pickle.loads(pickle.dumps(failure))
    copy.add_note("".join(traceback.format_exception(failure)))
    return pickle.dumps(copy)


def whole_tensors(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor | None]]:
    """Every tensor that any rank has in its state, one at a time: whole and on the CPU on rank 0, None elsewhere.

    Under pipeline parallelism the ranks of a stage have names of their own; the first of them sends to rank 0.
    """
    rank = dist.get_rank()
    held = by_rank({name: (tensor.shape, tensor.dtype) for name, tensor in state.items()})
    for name in dict.fromkeys(name for names in held for name in names):
        sender = next(r for r, names in enumerate(held) if name in names)
        if name in state:
            tensor = state[name].detach()
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if rank == sender != 0:
                dist.send(whole.cpu().contiguous(), dst=0)
        elif rank == 0:
            shape, dtype = held[sender][name]
            whole = torch.empty(shape, dtype=dtype)
            dist.recv(whole, src=sender)
        yield name, whole.cpu() if rank == 0 else None
