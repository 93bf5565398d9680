"""Refuses weights that are not finite, before they are published or exported."""

from collections.abc import Callable, Mapping
from itertools import chain

import torch
from torch import Tensor

from rl_actors.processes.threads import one_thread
from rl_actors.types import MAX_NAMES_REPORTED, NonFiniteError


def require_finite(
    what: str, weights: Mapping[str, Tensor], gather: Callable[[list[str]], list[list[str]]] = lambda names: [names]
) -> None:
    """Raises NonFiniteError on every rank if a shard has a NaN or an infinity."""
    names = list(dict.fromkeys(chain.from_iterable(gather(nonfinite(weights)))))
    if names:
        listed = ", ".join(names[:MAX_NAMES_REPORTED])
        raise NonFiniteError(
            f"{what}: weights are not finite: {listed} ({len(names)} in all). "
            "Load a checkpoint from before that, and train with a lower learning rate"
        )


@torch.no_grad()
def nonfinite(weights: Mapping[str, Tensor]) -> list[str]:
    shards = {name: _shard(tensor) for name, tensor in weights.items() if tensor.is_floating_point()}
    if not shards:
        return []
    with one_thread():
        # a sum is the cheapest pass, but finite values may overflow
        sums = torch.stack([shard.sum(dtype=torch.float32) for shard in shards.values()])
        suspects = [name for name, holds in zip(shards, torch.isfinite(sums).tolist(), strict=True) if not holds]
        return [name for name in suspects if not torch.isfinite(shards[name]).all()]


def _shard(tensor: Tensor) -> Tensor:
    # clients import this module and need not import DTensor
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
