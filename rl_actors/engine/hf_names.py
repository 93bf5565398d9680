"""Hugging Face's names, which split torchtitan's experts and fused query, key and value.

G groups (a key-value head and its query heads), R query heads of a group, W width of a head, D
hidden size. heads_GRWD has R + 2: the queries, a key and a value.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard
from torchtitan.models.qwen3 import Qwen3StateDictAdapter

EXPERTS = ".inner_experts."
FUSED = ".wqkv."


def is_joined(name: str) -> bool:
    """True for torchtitan's names of experts and of fused query, key and value."""
    return EXPERTS in name or FUSED in name


def _split_placements(joined: DTensor) -> list[Placement]:
    """Shard another dimension than the first, as FSDP and expert parallelism do: torchtitan's
    adapter would give each rank only its own experts, and does not support replicas.
    """
    sharded_dims = {placement.dim for placement in joined.placements if not placement.is_replicate()}
    free_dim = next(dim for dim in range(1, joined.ndim) if dim not in sharded_dims)
    placements: list[Placement] = []
    for placement in joined.placements:
        is_first_dim = not placement.is_replicate() and placement.dim == 0
        placements.append(Shard(free_dim) if is_first_dim else placement)
    return placements


def split_over_rows(joined: DTensor) -> DTensor:
    """The joined tensor, redistributed so that every rank has a piece of every expert or head."""
    return joined.redistribute(placements=_split_placements(joined))


def empty_split_over_rows(joined: DTensor) -> DTensor:
    """An uninitialised tensor like split_over_rows(joined)."""
    return torch.distributed.tensor.empty(
        joined.shape, dtype=joined.dtype, device_mesh=joined.device_mesh, placements=_split_placements(joined)
    )


def to_hf_names(adapter: Qwen3StateDictAdapter, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state under Hugging Face names. Experts are views; query, key and value are copies."""
    others: dict[str, Tensor] = {}
    experts: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if EXPERTS in name:
            # For a DTensor torchtitan's adapter would return only this rank's experts, so a small
            # plain tensor gives the names.
            names = adapter.to_hf({name: torch.empty(len(tensor), 1, 1, device="meta")})
            experts.update(zip(names, tensor.unbind(0), strict=True))
        elif FUSED in name:
            others |= split_qkv(adapter, name, tensor)
        else:
            others[name] = tensor
    return adapter.to_hf(others) | experts


def split_qkv(adapter: Qwen3StateDictAdapter, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The three weights of torchtitan's unfused model by name: wq, wk and wv, in this order."""
    num_groups, num_queries, width = _heads(adapter)
    # Every rank holds a piece of every row; DTensor's own arithmetic takes several times as long.
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    heads_GRWD = local.unflatten(0, (num_groups, num_queries + 2, width))
    heads = {"wq": heads_GRWD[:, :num_queries], "wk": heads_GRWD[:, num_queries], "wv": heads_GRWD[:, num_queries + 1]}
    split: dict[str, Tensor] = {}
    for part, part_heads in heads.items():
        rows = part_heads.reshape(-1, local.shape[1])
        split[name.replace("wqkv", part)] = _distributed_like(tensor, rows)
    return split


def _distributed_like(whole: Tensor, rows: Tensor) -> Tensor:
    """`rows`, this rank's piece of every one of some rows of `whole`, as a DTensor placed like it."""
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
    # from_local moved the rows to the mesh's device; with fsdp_cpu_offload they belong on the host
    return wrapped.to(rows.device)


def join_qkv(adapter: Qwen3StateDictAdapter, split: list[Tensor]) -> Tensor:
    """The fused weight. split: query, key and value, in this order."""
    num_groups, _, width = _heads(adapter)
    return torch.cat([part.unflatten(0, (num_groups, -1, width)) for part in split], dim=1).flatten(0, 2)


def _heads(adapter: Qwen3StateDictAdapter) -> tuple[int, int, int]:
    """(G, R, W). The fused weight has for each group its queries, then the key, then the value."""
    attention = adapter.model_config.layers[0].attention
    return attention.n_kv_heads, attention.n_heads // attention.n_kv_heads, attention.head_dim
