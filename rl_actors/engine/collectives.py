"""Collectives between the ranks of a trainer. They gather small values, raise errors on all ranks, and bring whole
tensors to rank 0."""

import contextlib
import pickle
import traceback
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

Value = TypeVar("Value")


def by_rank(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """The values that the ranks of the group passed, in the order of the ranks.

    The values must be picklable. They go over the group's CPU backend, even if the group's GPU tensors go over NCCL.
    """
    values: list[Value] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_all_ranks(holds: bool) -> bool:
    """True if `holds` is true on all ranks. The flag goes over the CPU backend, even if GPU tensors go over NCCL."""
    flag = torch.tensor(int(holds))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def raise_together(failure: Exception | None) -> None:
    """Raises on every rank if any rank has failed. All ranks must call this function.

    failure: the exception of this rank, or None if this rank has not failed.
    A rank that failed raises its own exception. The other ranks raise the exception of the lowest rank that failed, with
    that rank's traceback in a note. If this exception cannot be pickled, the other ranks raise a RuntimeError with the repr
    of the exception instead.
    The attribute `rank` of the raised exception is the rank on which this exception occurred.
    """
    if on_all_ranks(failure is None):
        return
    failures = by_rank(None if failure is None else _sendable(failure))
    rank, sent = next((rank, sent) for rank, sent in enumerate(failures) if sent is not None)
    if failure is not None:
        rank, raised = dist.get_rank(), failure
    else:
        raised = pickle.loads(sent)
    setattr(raised, "rank", rank)  # noqa: B010
    raise raised


def _sendable(failure: Exception) -> bytes:
    copy: Exception = RuntimeError(repr(failure))
    with contextlib.suppress(Exception):
        copy = pickle.loads(pickle.dumps(failure))
    copy.add_note("".join(traceback.format_exception(failure)))
    return pickle.dumps(copy)


def whole_tensors(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor | None]]:
    """(name, tensor) of every tensor that any rank has in its state, one at a time.

    Rank 0 gets the whole tensor on the CPU. The other ranks get None instead of the tensor. All ranks must iterate to
    the end. Each stage of a pipeline has its own tensors, so rank 0 may lack a tensor. Then the lowest rank that has
    the tensor sends it to rank 0.
    """
    rank = dist.get_rank()
    specs_by_rank = by_rank({name: (tensor.shape, tensor.dtype) for name, tensor in state.items()})
    names = dict.fromkeys(chain.from_iterable(specs_by_rank))
    for name in names:
        sender = next(other for other, specs in enumerate(specs_by_rank) if name in specs)
        if name in state:
            tensor = state[name].detach()
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if rank == sender != 0:
                dist.send(whole.cpu().contiguous(), dst=0)
        elif rank == 0:
            shape, dtype = specs_by_rank[sender][name]
            whole = torch.empty(shape, dtype=dtype)
            dist.recv(whole, src=sender)
        yield name, whole.cpu() if rank == 0 else None
