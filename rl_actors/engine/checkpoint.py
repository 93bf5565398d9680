"""Read and write DCP directories of the whole trainer. Collective over all ranks; hf.py knows Hugging Face directories."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from rl_actors.engine.build import Parts
from rl_actors.engine.lora import checkpointed

METADATA = ".metadata"
MAX_NAMES_REPORTED = 5


def is_checkpoint(path: str | Path) -> bool:
    """DCP writes its metadata last, so its presence is what makes a directory a checkpoint."""
    return (Path(path) / METADATA).is_file()


def require_checkpoint(parts: Parts, path: str) -> None:
    """Raises ValueError on every rank when any rank finds no checkpoint of this model there; nothing was touched."""
    if not _all(is_checkpoint(path)):
        raise ValueError(f"{path} is not a checkpoint: it holds no {METADATA}")
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    there = {name: tuple(entry.size) for name, entry in saved.items() if hasattr(entry, "size")}
    here = {f"model.{name}": tuple(tensor.shape) for name, tensor in checkpointed(parts.model).items()}
    differing = [
        f"{name} is {there.get(name)} and {shape} here" for name, shape in here.items() if there.get(name) != shape
    ]
    differing += [f"{name} is unknown here" for name in there if name.startswith("model.") and name not in here]
    if not _all(not differing):
        raise ValueError(f"{path} holds another model: {'; '.join(differing[:MAX_NAMES_REPORTED])}")


def require_replaceable(path: str | Path) -> None:
    """Raises ValueError on every rank when saving to path would delete something other than a checkpoint."""
    target = Path(path)
    taken = target.exists() and not is_checkpoint(target) and not (target.is_dir() and not any(target.iterdir()))
    if not _all(not taken):
        raise ValueError(f"{path} exists and is not a checkpoint: it holds no {METADATA}, so it is not replaced")


def save(parts: Parts, path: str, policy_version: int) -> None:
    """Write under a temporary name and rename: a directory is a whole checkpoint or is not there."""
    target, partial = Path(path), Path(f"{path}.partial")

    def clear() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)

    def commit() -> None:
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)

    _on_first_rank(clear)
    with _plain_errors(f"saving {path}"):
        dcp.save(_state(parts, policy_version), checkpoint_id=str(partial))
    _on_first_rank(commit)


def load(parts: Parts, path: str) -> int:
    """Load in place, resharding to this layout, and return the policy_version."""
    state = _state(parts, 0)
    with _plain_errors(f"loading {path}"):
        dcp.load(state, checkpoint_id=str(path))
    parts.model.load_state_dict(parts.model.state_dict() | state["model"])
    parts.optimizers.load_state_dict(state["optimizer"])
    return int(state["policy_version"])


def _state(parts: Parts, policy_version: int) -> dict[str, Any]:
    # torchtitan makes missing optimizer state by a step of zeros, which Adam would count in its bias correction.
    fresh = [optimizer for optimizer in parts.optimizers.optimizers if not optimizer.state]
    optimizer_state = parts.optimizers.state_dict()
    for optimizer in fresh:
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].zero_()
    return {
        "model": checkpointed(parts.model),
        "optimizer": optimizer_state,
        "policy_version": torch.tensor(policy_version),
    }


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """torch's CheckpointException is no Exception; out of an endpoint it would end the actor instead of reaching the caller."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"{what} failed on {len(error.failures)} ranks; on rank {rank}: {cause!r}") from error


def _on_first_rank(work: Callable[[], None]) -> None:
    """Do the file work that one rank does for all. Its error is raised on every rank, so that none goes on alone."""
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            work()
        except Exception as error:
            failure = error
    if not _all(failure is None):
        raise failure or RuntimeError("rank 0 could not write the checkpoint")


def _all(holds: bool) -> bool:
    """The logical and over the ranks, on CPU tensors, so that the same call works over gloo and beside NCCL."""
    flag = torch.tensor(int(holds))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)
