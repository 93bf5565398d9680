"""Checkpoints of a run: checkpoints/step-N, after step N.

It has trainer/ (weights and optimizer), critic/ if there is one, checksums.json, and state.json (the
loop's state), which is written last: a checkpoint that has it is complete.
"""

import asyncio
import hashlib
import json
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import JsonValue, TypeAdapter, ValidationError

from controllers.observe.run_folder import naming
from rl_actors.json_files import read_object

if TYPE_CHECKING:
    from rl_actors.clients.trainer import TrainerClient
    from rl_actors.clients.training import SavedCheckpoint

STATE = "state.json"
CHECKSUMS = "checksums.json"
CRITIC_FOLDER = "critic"  # of PPO's value model, in a checkpoint

JSON = TypeAdapter(dict[str, JsonValue])
State = dict[str, Any]
"""The loop's: "step" (steps done), "cursor" (first problem not drawn), "random", "config", …"""


def require_state(state: State) -> None:
    """Raises ValueError for a loop's state that a checkpoint would not give back as it is."""
    try:
        JSON.validate_python(state)
    except ValidationError as error:
        fault = error.errors()[0]
        where = f"end_step: state[{fault['loc'][0]!r}] has {fault['input']!r}"
        raise ValueError(f"{where}; it must be JSON: lists, dicts with str keys, str, numbers, bool, None") from None
    if "step" not in state or {"config", "random"} & state.keys():
        raise ValueError(f'end_step: state has {", ".join(state)}; it needs "step", and not "config" or "random"')


class Checkpoints:
    """Writes one checkpoint at a time while training continues, and keeps those of `removable`."""

    def __init__(self, folder: Path, *, keep: int, keep_every: int = 0) -> None:
        self.folder = folder
        self.keep = keep
        self.keep_every = keep_every
        self.saved_step = 0  # step of the newest checkpoint that this run has completed
        self._copying: asyncio.Task[list[SavedCheckpoint]] | None = None
        self._writing: asyncio.Task[None] | None = None

    async def save(self, trainers: Mapping[str, "TrainerClient"], state: State) -> None:
        """Begin to write step-N, N = state["step"]; trainers: by the name of their folder.

        Returns when the state is copied. Raises the former checkpoint's RuntimeError or OSError.
        """
        await self.finish()
        path = self.folder / f"step-{state['step']}"
        text = json.dumps(state, indent=2, default=str) + "\n"
        shutil.rmtree(path, ignore_errors=True)
        self._copying = asyncio.create_task(self._copy(trainers, path))
        saved = await asyncio.shield(self._copying)
        self._writing = asyncio.create_task(self._commit(saved, path, text))

    async def finish(self) -> None:
        """Wait until the last checkpoint is on disk. Every call raises the error of its writing."""
        if self._writing is not None:
            await asyncio.shield(self._writing)  # shield: the writing goes on if the caller is cancelled

    async def abandon(self) -> None:
        """`finish` without the error: an actor has died, but the checkpoint may become complete."""
        for task in (self._copying, self._writing):
            if task is not None:
                await asyncio.wait((task,))
                _ = task.cancelled() or task.exception()  # reads the error; otherwise asyncio would log it
        copying = self._copying
        if copying is not None and not copying.cancelled() and copying.exception() is None:
            # If `save` was cancelled, `_commit` was not started, and the trainers may still write.
            await asyncio.gather(*(part.wait() for part in copying.result()), return_exceptions=True)
        self._copying = self._writing = None

    async def _copy(self, trainers: Mapping[str, "TrainerClient"], path: Path) -> "list[SavedCheckpoint]":
        copying = [trainer.save_checkpoint(str(path / name)) for name, trainer in trainers.items()]
        results = await asyncio.gather(*copying, return_exceptions=True)
        saved = [result for result in results if not isinstance(result, BaseException)]
        for error in results:
            if isinstance(error, BaseException):
                # A failed write that nobody awaited would come up in the trainer's next optim_step.
                await asyncio.gather(*(part.wait() for part in saved), return_exceptions=True)
                raise error
        return saved

    async def _commit(self, saved: Sequence["SavedCheckpoint"], path: Path, text: str) -> None:
        await asyncio.gather(*(part.wait() for part in saved))
        await asyncio.to_thread(_write_checksums, path, text)  # a thread, because training goes on
        write_durably(path / STATE, text)  # synced to disk, as the trainer's part is
        by_step = _by_step(self.folder)
        for step in removable(list(by_step), keep=self.keep, keep_every=self.keep_every):
            # first, so that what is left by a kill is not complete
            (by_step[step] / STATE).unlink()
            shutil.rmtree(by_step[step])
        self.saved_step = _step(path)


def removable(steps: Sequence[int], *, keep: int, keep_every: int = 0) -> list[int]:
    """The steps whose checkpoints go. steps: ascending.

    The newest `keep` stay. With keep_every > 0, so do the first at or after it, the first at least
    keep_every later, and so on: removable([25, 50, 75, 100, 125], keep=1, keep_every=50) -> [25, 75]
    """
    removed = []
    last_for_good = 0
    for step in steps:
        if keep_every and step - last_for_good >= keep_every:
            last_for_good = step
        elif step not in steps[-keep:]:
            removed.append(step)
    return removed


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return sorted((path.parent for path in folder.glob(f"step-*/{STATE}")), key=_step)


def newest(folder: Path) -> Path | None:
    return next(reversed(complete(folder)), None)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _by_step(folder: Path) -> dict[int, Path]:
    return {_step(checkpoint): checkpoint for checkpoint in complete(folder)}


def remove_incomplete(folder: Path) -> None:
    """Remove what a run leaves that is killed while it writes or removes a checkpoint."""
    for path in folder.glob("step-*"):
        if not (path / STATE).is_file():
            shutil.rmtree(path)


def set_aside_damaged(folder: Path) -> list[str]:
    """Rename damaged checkpoints that are newer than the newest whole one: step-9 -> damaged-step-9.
    Returns a line for each. Raises ValueError, and renames none, if all are damaged."""
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(complete(folder)):
        fault = _fault(checkpoint)
        if not fault:
            break
        damaged[checkpoint] = fault
    else:
        if damaged:
            raise ValueError(f"every complete checkpoint in {folder} is damaged: {'; '.join(damaged.values())}")
    lines = []
    for checkpoint, fault in damaged.items():
        aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
        lines.append(f"{checkpoint} is damaged and was renamed to {aside.name}: {fault}")
    return lines


def read(path: Path) -> State:
    """The loop's state. Raises ValueError if `path` is no complete checkpoint."""
    if not (path / STATE).is_file():
        raise ValueError(f"{path} is not a complete checkpoint of a run: it holds no {STATE}")
    return read_object(path / STATE)


def find(path: Path, step: int | None = None) -> Path:
    """The complete checkpoint of `step` (None: the newest) in the run's folder `path`, or `path` if
    it is one itself. Raises ValueError if there is none, or if its files have changed."""
    if (path / STATE).is_file():
        if step is not None:
            raise ValueError(f"{path} is a checkpoint itself, so step={step} cannot be chosen; name the run's folder")
        checkpoint = path
    else:
        by_step = _by_step(path / "checkpoints")
        if not by_step:
            raise ValueError(
                f"{path} is not a complete checkpoint of a run, nor a run's folder with one: it holds no {STATE}"
            )
        if step is not None and step not in by_step:
            raise ValueError(
                f"{path} has no complete checkpoint of step {step}; it has the steps {', '.join(map(str, by_step))}"
            )
        checkpoint = by_step[max(by_step) if step is None else step]
    if fault := _fault(checkpoint):
        raise ValueError(f"{checkpoint} is damaged: {fault}")
    return checkpoint


def _write_checksums(folder: Path, state: str) -> None:
    """Of all files under the folder, and of state.json, which is written later."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != CHECKSUMS]
    entries = dict(zip([str(path.relative_to(folder)) for path in paths], _checksums(paths), strict=True))
    entries[STATE] = {"bytes": len(state.encode()), "sha256": hashlib.sha256(state.encode()).hexdigest()}
    write_durably(folder / CHECKSUMS, json.dumps(entries, indent=2) + "\n")


def _fault(checkpoint: Path) -> str:
    """What is wrong with one damaged file; "" if none is, or without checksums.json."""
    file = checkpoint / CHECKSUMS
    try:
        if not file.exists():
            return ""
        expected = json.loads(file.read_text())
        paths = [checkpoint / name for name in expected]
        for path, entry in zip(paths, expected.values(), strict=True):
            if not path.is_file():
                return f"{path} is missing"
            if path.stat().st_size != entry["bytes"]:
                return f"{path} has {path.stat().st_size} bytes instead of {entry['bytes']}"
        for path, entry, actual in zip(paths, expected.values(), _checksums(paths), strict=True):
            if actual["sha256"] != entry["sha256"]:
                return f"{path} has another checksum than when it was written"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{file} or a file that it lists cannot be read: {error}"
    return ""


def _checksums(paths: list[Path]) -> list[dict[str, object]]:
    """Size and SHA-256 of each file, on several threads, because hashlib releases the GIL."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(_checksum, paths))


def _checksum(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_durably(path: Path, text: str) -> None:
    """Atomic, and safe from a crash of the machine. Raises OSError naming `path`.tmp."""
    temporary = path.with_name(f"{path.name}.tmp")
    with naming(temporary):
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def seed_random(seed: int) -> None:
    """Seed Python, NumPy and torch, from whose global states an environment may draw."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> State:
    """The global random states of Python, NumPy and torch, as JSON."""
    version, words, python_gauss = random.getstate()
    numpy = dict(np.random.get_state(legacy=False))
    key = numpy["state"]["key"].tobytes().hex()
    return {
        "python": [version, np.array(words, np.uint32).tobytes().hex(), python_gauss],
        "numpy": numpy | {"state": numpy["state"] | {"key": key}},
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def restore_random_states(states: State) -> None:
    """Set them to what `random_states` returned."""
    version, words, python_gauss = states["python"]
    random.setstate((version, tuple(_words(words)), python_gauss))
    numpy = states["numpy"]
    key = _words(numpy["state"]["key"])
    np.random.set_state(numpy | {"state": numpy["state"] | {"key": key}})
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))


def _words(text: str) -> list[int]:
    """The 32-bit words of a hexadecimal text, in this machine's byte order."""
    return np.frombuffer(bytes.fromhex(text), np.uint32).tolist()
