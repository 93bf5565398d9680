"""Tensors that Hugging Face names apart and torchtitan keeps joined: experts, and query, key and value. Reads and writes no file.

G groups of key-value heads, R query heads in a group, W head width, D hidden size.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard
from torchtitan.models.qwen3 import Qwen3StateDictAdapter

EXPERTS, FUSED = ".inner_experts.", ".wqkv."


def is_joined(name: str) -> bool:
    """Whether Hugging Face has several tensors for this one, along its first dimension: experts, or query, key and value."""
    return EXPERTS in name or FUSED in name


def _split_placements(joined: DTensor) -> list[Placement]:
    """FSDP and expert parallelism lay whole experts and heads on ranks; a name that one rank alone has cannot be published. Cut every
    one instead: same memory. (torchtitan's adapter would name a rank's own experts, and takes no replicas.)
    """
    cut = {placement.dim for placement in joined.placements if not placement.is_replicate()}
    free = next(dim for dim in range(1, joined.ndim) if dim not in cut)
    return [
        Shard(free) if not placement.is_replicate() and placement.dim == 0 else placement
        for placement in joined.placements
    ]


def split_over_rows(joined: DTensor) -> DTensor:
    return joined.redistribute(placements=_split_placements(joined))


def empty_split_over_rows(joined: DTensor) -> DTensor:
    return torch.distributed.tensor.empty(
        joined.shape, dtype=joined.dtype, device_mesh=joined.device_mesh, placements=_split_placements(joined)
    )


def to_hf_names(adapter: Qwen3StateDictAdapter, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same under Hugging Face names; experts as views, query, key and value as copies where they are fused."""
    others: dict[str, Tensor] = {}
    experts: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if EXPERTS in name:
            names = adapter.to_hf({name: torch.empty(len(tensor), 1, 1, device="meta")})
            experts.update(zip(names, tensor.unbind(0), strict=True))
        else:
            others |= split_qkv(adapter, name, tensor) if FUSED in name else {name: tensor}
    return adapter.to_hf(others) | experts


def split_qkv(adapter: Qwen3StateDictAdapter, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A fused weight as torchtitan's unfused model would have it: wq, wk and wv, in this order."""
    groups, queries, width = _heads(adapter)
    # What a rank holds has all rows; DTensor's own arithmetic takes several times as long.
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    heads_GRWD = local.unflatten(0, (groups, queries + 2, width))
    split = {"wq": heads_GRWD[:, :queries], "wk": heads_GRWD[:, queries], "wv": heads_GRWD[:, queries + 1]}
    return {
        name.replace("wqkv", part): _like(tensor, heads.reshape(-1, local.shape[1])) for part, heads in split.items()
    }


def _like(whole: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a tensor that is cut through every row, distributed as it is."""
    if not isinstance(whole, DTensor):
        return rows
    shape = torch.Size((len(rows), whole.shape[1]))
    where = {"device_mesh": whole.device_mesh, "placements": whole.placements}
    return DTensor.from_local(rows, **where, run_check=False, shape=shape, stride=(shape[1], 1))


def join_qkv(adapter: Qwen3StateDictAdapter, split: list[Tensor]) -> Tensor:
    """The fused weight of a query, a key and a value."""
    groups, _, width = _heads(adapter)
    return torch.cat([part.unflatten(0, (groups, -1, width)) for part in split], dim=1).flatten(0, 2)


def _heads(adapter: Qwen3StateDictAdapter) -> tuple[int, int, int]:
    """G groups of key-value heads, query heads in a group, W: torchtitan lays a group's queries, key and value one after another."""
    attention = adapter.model_config.layers[0].attention
    return attention.n_kv_heads, attention.n_heads // attention.n_kv_heads, attention.head_dim
