"""Converts tensors between torchtitan's names and Hugging Face's names. torchtitan has one joined tensor where Hugging Face has several tensors.

A joined tensor holds the experts of a transformer block, or the fused query, key and value of its attention. Every slice along the first
dimension of a joined tensor belongs to one of Hugging Face's tensors. This module splits joined tensors, and joins tensors again. It reads and writes no file.

A group is a key-value head with its query heads. G is the number of groups, R the number of query heads in a group, W the width of a head, D
the hidden size. The name heads_GRWD is an exception: its R stands for R + 2, because a group has R query heads, a key and a value. A row of a
weight is a slice along its first dimension.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard
from torchtitan.models.qwen3 import Qwen3StateDictAdapter

EXPERTS = ".inner_experts."
FUSED = ".wqkv."


def is_joined(name: str) -> bool:
    """True if `name` is torchtitan's name of a block's experts, or of fused query, key and value."""
    return EXPERTS in name or FUSED in name


def _split_placements(joined: DTensor) -> list[Placement]:
    """Placements under which every rank holds a piece of every expert or attention head.

    FSDP and expert parallelism shard the first dimension, so each rank has only some of the experts or heads. But hf.py needs, on every rank,
    a shard of each Hugging Face tensor in `joined`. So these placements shard another dimension. Every expert and head is then split over all
    ranks, and each rank needs as much memory as before.

    torchtitan's own adapter is not used to split a sharded tensor, because it gives each rank only the names of that rank's experts, and does
    not support replicas.
    """
    sharded_dims = {placement.dim for placement in joined.placements if not placement.is_replicate()}
    free_dim = next(dim for dim in range(1, joined.ndim) if dim not in sharded_dims)
    placements: list[Placement] = []
    for placement in joined.placements:
        is_first_dim = not placement.is_replicate() and placement.dim == 0
        placements.append(Shard(free_dim) if is_first_dim else placement)
    return placements


def split_over_rows(joined: DTensor) -> DTensor:
    """The joined tensor, redistributed so that every rank holds a piece of every expert or attention head."""
    return joined.redistribute(placements=_split_placements(joined))


def empty_split_over_rows(joined: DTensor) -> DTensor:
    """An uninitialised tensor with the shape, dtype and placements of split_over_rows(joined)."""
    return torch.distributed.tensor.empty(
        joined.shape, dtype=joined.dtype, device_mesh=joined.device_mesh, placements=_split_placements(joined)
    )


def to_hf_names(adapter: Qwen3StateDictAdapter, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state under Hugging Face names. Experts become views of the joined tensor. Fused query, key and value become copies."""
    others: dict[str, Tensor] = {}
    experts: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if EXPERTS in name:
            # If torchtitan's adapter got a DTensor, it would return only this rank's experts. So it gets a small plain tensor, and only the
            # names that it returns are used.
            names = adapter.to_hf({name: torch.empty(len(tensor), 1, 1, device="meta")})
            experts.update(zip(names, tensor.unbind(0), strict=True))
        elif FUSED in name:
            others |= split_qkv(adapter, name, tensor)
        else:
            others[name] = tensor
    return adapter.to_hf(others) | experts


def split_qkv(adapter: Qwen3StateDictAdapter, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Split a fused weight into the three weights of torchtitan's unfused model. Returns them by name: wq, wk and wv, in this order."""
    num_groups, num_queries, width = _heads(adapter)
    # Every rank holds a piece of every row. So each rank can select the rows of query, key and value in its own pieces. DTensor's own
    # arithmetic takes several times as long.
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    heads_GRWD = local.unflatten(0, (num_groups, num_queries + 2, width))
    heads = {
        "wq": heads_GRWD[:, :num_queries],
        "wk": heads_GRWD[:, num_queries],
        "wv": heads_GRWD[:, num_queries + 1],
    }
    split: dict[str, Tensor] = {}
    for part, part_heads in heads.items():
        rows = part_heads.reshape(-1, local.shape[1])
        split[name.replace("wqkv", part)] = _distributed_like(tensor, rows)
    return split


def _distributed_like(whole: Tensor, rows: Tensor) -> Tensor:
    """Wrap `rows` as a DTensor with the placements of `whole`. `rows` is this rank's piece of the selected rows of `whole`.

    Every rank must hold a piece of every selected row. If `whole` is a plain tensor, `rows` is returned as it is.
    """
    if not isinstance(whole, DTensor):
        return rows
    shape = torch.Size((len(rows), whole.shape[1]))
    wrapped = DTensor.from_local(
        rows,
        device_mesh=whole.device_mesh,
        placements=whole.placements,
        run_check=False,
        shape=shape,
        stride=(shape[1], 1),
    )
    # from_local copies the rows to the mesh's device. With fsdp_cpu_offload the weights are on the host, so the rows go back.
    return wrapped.to(rows.device)


def join_qkv(adapter: Qwen3StateDictAdapter, split: list[Tensor]) -> Tensor:
    """The fused weight. split: the weights of query, key and value, in this order."""
    num_groups, _, width = _heads(adapter)
    return torch.cat([part.unflatten(0, (num_groups, -1, width)) for part in split], dim=1).flatten(0, 2)


def _heads(adapter: Qwen3StateDictAdapter) -> tuple[int, int, int]:
    """(G, R, W). For each group, torchtitan's fused weight has the rows of the group's queries, then of the key and then of the value."""
    attention = adapter.model_config.layers[0].attention
    return attention.n_kv_heads, attention.n_heads // attention.n_kv_heads, attention.head_dim
