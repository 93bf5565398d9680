"""Reads and writes checkpoints of a trainer, as directories of torch.distributed.checkpoint (DCP).

All ranks call require_checkpoint, require_replaceable, load and CheckpointWriter.start together.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from rl_actors.engine.build import BuiltModel
from rl_actors.engine.collectives import by_rank, on_all_ranks, together
from rl_actors.engine.lora import checkpointed
from rl_actors.trusted_files import distrust
from rl_actors.types import MAX_NAMES_REPORTED

METADATA = ".metadata"
HEAD = "lm_head.weight"
Shapes = Mapping[str, tuple[int, ...]]


class State(TypedDict):
    model: dict[str, Tensor]  # the adapters, if there are any
    policy_version: Tensor  # int64 scalar
    optimizer: NotRequired[dict[str, object]]  # torchtitan's flat state, by parameter name


def is_checkpoint(path: str | Path) -> bool:
    """True if `path` holds a complete checkpoint: DCP writes the metadata last."""
    return (Path(path) / METADATA).is_file()


def require_checkpoint(built: BuiltModel, path: str, *, optimizer: bool) -> None:
    """Raises ValueError on every rank if any finds another model, or files that others can write,
    because DCP unpickles. Without `optimizer` a value model accepts a language model, but its head.
    """
    if not on_all_ranks(is_checkpoint(path)):
        raise ValueError(f"{path} is not a checkpoint: it holds no {METADATA}")
    untrusted = [reason for reason in by_rank(distrust(path)) if reason]
    if untrusted:
        raise ValueError(untrusted[0])
    saved = together(lambda: read_metadata(path))
    there = {name: tuple(entry.size) for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
    here = {f"model.{name}": tuple(tensor.shape) for name, tensor in checkpointed(built.model).items()}
    # in a pipeline `here` has only this rank's names
    known = set().union(*by_rank(list(here)))
    if built.has_value_head and not optimizer:
        here.pop(f"model.{HEAD}", None)
    unknown = [name for name in there if name.startswith("model.") and name not in known]
    differing = differences([*here, *unknown], there, here, "the model")
    found_by_any = list(dict.fromkeys(chain.from_iterable(by_rank(differing))))
    if found_by_any:
        raise ValueError(f"{path} holds another model: {'; '.join(found_by_any[:MAX_NAMES_REPORTED])}")
    has_optimizer = any(name.startswith("optimizer.") for name in saved)
    if not on_all_ranks(has_optimizer or not optimizer):
        raise ValueError(f"{path} holds no optimizer state; optimizer=False loads only its weights")


def read_metadata(path: str | Path) -> dict[str, object]:
    """The entries of a checkpoint, by name. Raises ValueError if it is cut off or corrupt."""
    try:
        return FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # unpickling raises errors of many types
        raise ValueError(f"{Path(path) / METADATA} is cut off or corrupt: {error!r}") from None


def differences(names: Iterable[str], there: Shapes, here: Shapes, what: str) -> list[str]:
    """The errors of the tensors with these names. what: whose shapes are in `here`."""
    found = []
    for name in names:
        if name not in there:
            found.append(f"{name} is not in the checkpoint")
        elif name not in here:
            found.append(f"{name} is not in {what}")
        elif there[name] != here[name]:
            found.append(f"{name} is {there[name]} in the checkpoint but {here[name]} in {what}")
    return found


def require_replaceable(path: str | Path) -> None:
    """Raises ValueError on every rank if a save to `path` would delete other than a checkpoint."""
    target = Path(path)
    is_empty = target.is_dir() and not any(target.iterdir())
    if not on_all_ranks(not target.exists() or is_checkpoint(target) or is_empty):
        raise ValueError(f"{path} exists and is not a checkpoint: it holds no {METADATA}, so it is not replaced")


class CheckpointWriter:
    """Writes one checkpoint at a time while training goes on, with a process group of its own."""

    def __init__(self) -> None:
        self._written: Future[None] | None = None

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        return dist.new_group(backend="gloo")  # at the first save, which all ranks start together

    def start(
        self, built: BuiltModel, path: str, policy_version: int, *, optimizer: bool, extra_files: Sequence[Path]
    ) -> "Future[None]":
        """Copy the state to the CPU. The future is done when the directory is complete on disk.

        Waits for the previous write. extra_files: rank 0 copies them into the directory. If a rank
        could not write, the future raises RuntimeError and `path` is unchanged.
        """
        self.wait()
        upload = dcp.async_save(
            _state(built, policy_version, optimizer=optimizer),
            storage_writer=_WholeDirectoryWriter(path, extra_files),
            process_group=self._group,
        )
        written: Future[None] = Future()
        written.set_running_or_notify_cancel()  # a caller that stops waiting cannot cancel it
        upload.add_done_callback(lambda done: _settle(written, done, f"saving {path}"))
        self._written = written
        return written

    def wait(self) -> None:
        """Wait until no checkpoint is being written. Raises nothing: its future has the error."""
        if self._written is not None:
            self._written.exception()


class _WholeDirectoryWriter(FileSystemWriter):
    """Writes into <path>.partial, which is renamed to `path` after all ranks have written."""

    def __init__(self, path: str, extra_files: Sequence[Path]) -> None:
        super().__init__(f"{path}.partial")
        self.target = Path(path)
        self.extra_files = extra_files

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # from a killed save; a save with fewer ranks would not overwrite all of its files
        shutil.rmtree(self.path)
        self.path.mkdir()
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        for file in self.extra_files:
            shutil.copyfile(file, self.path / file.name)
        former = Path(f"{self.target}.former")
        shutil.rmtree(former, ignore_errors=True)
        if self.target.exists():
            # Renamed before it is deleted, so that a kill leaves no partial one under this name.
            self.target.rename(former)
        self.path.rename(self.target)
        shutil.rmtree(former, ignore_errors=True)


def _settle(written: "Future[None]", upload: "Future[object]", what: str) -> None:
    try:
        with plain_errors(what):
            upload.result()
    except BaseException as error:
        written.set_exception(error)
    else:
        written.set_result(None)


def load(built: BuiltModel, path: str, *, optimizer: bool) -> int:
    """Load a checkpoint of any layout into the model, and return its policy_version.

    A value model keeps its head if the checkpoint is a language model's.
    """
    state = _state(built, 0, optimizer=optimizer)
    if built.has_value_head and not _has_value_head(path):
        state["model"].pop(HEAD, None)
    with plain_errors(f"loading {path}"):
        dcp.load(state, checkpoint_id=str(path))
    built.model.load_state_dict(built.model.state_dict() | state["model"])
    if optimizer:
        built.optimizers.load_state_dict(state["optimizer"])
    else:
        for fresh in built.optimizers.optimizers:
            fresh.state.clear()
    return int(state["policy_version"])


def _has_value_head(path: str) -> bool:
    saved = read_metadata(path)[f"model.{HEAD}"]
    return isinstance(saved, TensorStorageMetadata) and saved.size[0] == 1


def _state(built: BuiltModel, policy_version: int, *, optimizer: bool) -> State:
    state: State = {"model": checkpointed(built.model), "policy_version": torch.tensor(policy_version)}
    if optimizer:
        state["optimizer"] = _optimizer_state(built)
    return state


def _optimizer_state(built: BuiltModel) -> dict[str, object]:
    # state_dict() creates a missing state by a step with zero gradients, which Adam's bias
    # correction would count
    without_state = [optimizer for optimizer in built.optimizers.optimizers if not optimizer.state]
    state_dict = built.optimizers.state_dict()
    for optimizer in without_state:
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].zero_()
    return state_dict


@contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """torch's CheckpointException, with which Monarch would end the actor, as a RuntimeError."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"{what} failed on {len(error.failures)} ranks; on rank {rank}: {cause!r}") from error
