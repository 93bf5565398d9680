"""Read and write DCP directories of the whole trainer. Collective over all ranks; hf.py knows Hugging Face directories."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rl_actors.engine.build import BuiltModel
from rl_actors.engine.collectives import by_rank, on_all_ranks
from rl_actors.engine.lora import checkpointed

METADATA = ".metadata"
MAX_NAMES_REPORTED = 5


def is_checkpoint(path: str | Path) -> bool:
    """DCP writes its metadata last, so its presence is what makes a directory a checkpoint."""
    return (Path(path) / METADATA).is_file()


def require_checkpoint(built: BuiltModel, path: str, *, optimizer: bool) -> None:
    """Raises ValueError on every rank when any rank finds no such checkpoint of this model there; nothing was touched."""
    if not on_all_ranks(is_checkpoint(path)):
        raise ValueError(f"{path} is not a checkpoint: it holds no {METADATA}")
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    there = {name: tuple(entry.size) for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
    here = {f"model.{name}": tuple(tensor.shape) for name, tensor in checkpointed(built.model).items()}
    differing = [
        f"{name} is {there.get(name)} and {shape} here" for name, shape in here.items() if there.get(name) != shape
    ]
    known = set().union(*by_rank(list(here)))  # under pipeline parallelism the ranks of a stage have their own
    differing += [f"{name} is unknown here" for name in there if name.startswith("model.") and name not in known]
    # Under pipeline parallelism each rank knows of its own parts alone.
    differing = list(dict.fromkeys(text for of_rank in by_rank(differing) for text in of_rank))
    if differing:
        raise ValueError(f"{path} holds another model: {'; '.join(differing[:MAX_NAMES_REPORTED])}")
    if not on_all_ranks(not optimizer or any(name.startswith("optimizer.") for name in saved)):
        raise ValueError(f"{path} holds no optimizer state; optimizer=False loads its weights alone")


def require_replaceable(path: str | Path) -> None:
    """Raises ValueError on every rank when saving to path would delete something other than a checkpoint."""
    target = Path(path)
    taken = target.exists() and not is_checkpoint(target) and not (target.is_dir() and not any(target.iterdir()))
    if not on_all_ranks(not taken):
        raise ValueError(f"{path} exists and is not a checkpoint: it holds no {METADATA}, so it is not replaced")


class CheckpointWriter:
    """Writes one checkpoint at a time while training goes on, over a process group of its own.

    Its collectives run in another thread than training's, so in one group the two would meet in an order of their own on each rank.
    """

    def __init__(self) -> None:
        self._written: Future[None] | None = None

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        return dist.new_group(backend="gloo")  # at the first save, which all ranks reach together

    def start(
        self, built: BuiltModel, path: str, policy_version: int, *, optimizer: bool, add: Callable[[Path], None]
    ) -> "Future[None]":
        """Copy the state to the CPU and return; the answer comes when the directory is whole on disk.

        add(directory) puts more files into it, on rank 0.
        It raises RuntimeError with path and rank when a rank could not write; then `path` is what it was before.
        """
        self.wait()
        upload = dcp.async_save(
            _state(built, policy_version, optimizer=optimizer),
            storage_writer=_WholeDirectoryWriter(path, add),
            process_group=self._group,
        )
        written: Future[None] = Future()
        written.set_running_or_notify_cancel()  # a waiter that goes away does not cancel it
        upload.add_done_callback(lambda done: _settle(written, done, f"saving {path}"))
        self._written = written
        return written

    def wait(self) -> None:
        """Until nothing is being written any more. A failure belongs to whoever holds the answer of `start`."""
        if self._written is not None:
            self._written.exception()


class _WholeDirectoryWriter(FileSystemWriter):
    """Writes beside the path and renames once all ranks have written: a directory is a whole checkpoint or is not there.

    DCP runs prepare_global_plan and finish on its first rank alone, between its own collectives, and spreads their errors.
    """

    def __init__(self, path: str, add: Callable[[Path], None]) -> None:
        super().__init__(f"{path}.partial")
        self.target, self.add = Path(path), add

    def prepare_global_plan(self, plans):
        shutil.rmtree(self.path)  # what a killed save left may hold files of more ranks than there are now
        self.path.mkdir()
        return super().prepare_global_plan(plans)

    def finish(self, metadata, results) -> None:
        super().finish(metadata, results)
        self.add(self.path)
        former = Path(f"{self.target}.former")
        shutil.rmtree(former, ignore_errors=True)
        if self.target.exists():
            # Removing it in place would leave half a checkpoint under its name; a kill between the two renames leaves both beside it.
            self.target.rename(former)
        self.path.rename(self.target)
        shutil.rmtree(former, ignore_errors=True)


def _settle(written: "Future[None]", upload: "Future[Any]", what: str) -> None:
    try:
        with plain_errors(what):
            upload.result()
    except BaseException as error:
        written.set_exception(error)
    else:
        written.set_result(None)


def load(built: BuiltModel, path: str, *, optimizer: bool) -> int:
    """Load in place, resharding to this layout, and return the policy_version; without its state the optimizer starts anew."""
    state = _state(built, 0, optimizer=optimizer)
    with plain_errors(f"loading {path}"):
        dcp.load(state, checkpoint_id=str(path))
    built.model.load_state_dict(built.model.state_dict() | state["model"])
    if optimizer:
        built.optimizers.load_state_dict(state["optimizer"])
    else:
        for part in built.optimizers.optimizers:
            part.state.clear()
    return int(state["policy_version"])


def _state(built: BuiltModel, policy_version: int, *, optimizer: bool) -> dict[str, Any]:
    state = {"model": checkpointed(built.model), "policy_version": torch.tensor(policy_version)}
    return state | {"optimizer": _optimizer_state(built)} if optimizer else state


def _optimizer_state(built: BuiltModel) -> dict[str, Any]:
    # torchtitan makes missing optimizer state by a step of zeros, which Adam would count in its bias correction.
    fresh = [optimizer for optimizer in built.optimizers.optimizers if not optimizer.state]
    optimizer_state = built.optimizers.state_dict()
    for optimizer in fresh:
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].zero_()
    return optimizer_state


@contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """torch's CheckpointException is no Exception; out of an endpoint it would end the actor instead of reaching the caller."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"{what} failed on {len(error.failures)} ranks; on rank {rank}: {cause!r}") from error
