"""What the ranks tell each other of themselves: small values, and whole tensors one at a time. Collective; knows no model."""

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
    """Raises on every rank when one failed: its own failure where there is one, elsewhere RuntimeError with the first rank's."""
    if on_all_ranks(failure is None):
        return
    failures = by_rank(repr(failure) if failure is not None else "")
    rank = next(rank for rank, text in enumerate(failures) if text)
    raise failure or RuntimeError(f"rank {rank} failed: {failures[rank]}")


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
