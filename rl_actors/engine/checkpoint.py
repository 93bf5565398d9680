"""Read and write weights: DCP directories of the whole trainer, Hugging Face directories of the model. Collective over all ranks."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from rl_actors.config import ModelConfig
from rl_actors.engine.build import Parts

METADATA = ".metadata"


def is_checkpoint(path: str | Path) -> bool:
    """DCP writes its metadata last, so its presence is what makes a directory a checkpoint."""
    return (Path(path) / METADATA).is_file()


def save(parts: Parts, path: str, policy_version: int) -> None:
    """Write under a temporary name and rename: a directory is a whole checkpoint or is not there."""
    target, partial = Path(path), Path(f"{path}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
    _barrier()
    dcp.save(_state(parts, policy_version), checkpoint_id=str(partial))
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    _barrier()


def load(parts: Parts, path: str) -> int:
    """Load in place, resharding to this layout, and return the policy_version."""
    state = _state(parts, 0)
    dcp.load(state, checkpoint_id=str(path))
    parts.model.load_state_dict(state["model"])
    parts.optimizers.load_state_dict(state["optimizer"])
    return int(state["policy_version"])


def load_hf(parts: Parts, path: str) -> None:
    """Load a directory of safetensors into the sharded model; each rank reads its part.

    Raises ValueError when config.json describes another model.
    """
    state = parts.adapter.to_hf(parts.model.state_dict())
    dcp.load(state, storage_reader=parts.adapter.get_hf_storage_reader(path))
    parts.model.load_state_dict(parts.adapter.from_hf(state))


def require_same_model(config: ModelConfig, path: str) -> None:
    """Raises ValueError listing every dimension in which config.json differs from the config."""
    found = ModelConfig.from_hf(path)
    differing = [
        f"{name}={getattr(config, name)} but {getattr(found, name)} there"
        for name in config.__dataclass_fields__
        if getattr(config, name) != getattr(found, name)
    ]
    if differing:
        raise ValueError(f"{path} holds another model: {'; '.join(differing)}")


def _state(parts: Parts, policy_version: int) -> dict[str, Any]:
    return {
        "model": parts.model.state_dict(),
        "optimizer": parts.optimizers.state_dict(),
        "policy_version": torch.tensor(policy_version),
    }


def _barrier() -> None:
    # On CPU tensors, so that the same call works over gloo and beside NCCL.
    dist.all_reduce(torch.zeros(1))
