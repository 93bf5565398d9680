"""Collectives between the ranks of a trainer, for small values, errors and whole tensors."""

import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import TypeVar

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_actors.processes.errors import sendable

Value = TypeVar("Value")


def by_rank(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """The (picklable) values of all ranks of the group, in order, over its CPU backend."""
    values: list[Value] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_all_ranks(holds: bool) -> bool:
    """True if `holds` is true on all ranks. Over the CPU backend."""
    flag = torch.tensor(int(holds))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def raise_together(failure: Exception | None) -> None:
    """Raises on every rank if any rank has failed. failure: this rank's, if any.

    The other ranks raise the `sendable` exception of the lowest rank that failed, with its
    traceback in a note. The attribute `rank` is the rank on which the exception occurred.
    """
    if on_all_ranks(failure is None):
        return
    failures = by_rank(None if failure is None else _sendable(failure))
    rank, sent = next((rank, sent) for rank, sent in enumerate(failures) if sent is not None)
    if failure is not None:
        rank = dist.get_rank()
        raised = failure
    else:
        raised = pickle.loads(sent)
    setattr(raised, "rank", rank)  # noqa: B010
    raise raised


def _sendable(failure: Exception) -> bytes:
    copy = pickle.loads(cloudpickle.dumps(sendable(failure)))
    copy.add_note("".join(traceback.format_exception(failure)))
    return cloudpickle.dumps(copy)


def together(work: Callable[[], Value]) -> Value:
    """The result of `work`. If it fails on any rank, raises as `raise_together` does."""
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    raise_together(failure)
    return result


def whole_tensors(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor | None]]:
    """(name, tensor) of every tensor that any rank has in its state, one at a time.

    Rank 0 gets the whole tensor on the CPU, the others None. All ranks must iterate to the end.
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
