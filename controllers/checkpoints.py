"""Checkpoints of a run: the trainer's weights and the controller's own state. A folder is complete when state.json is there.

checkpoints/step-N/trainer is what PolicyTrainer.save_checkpoint wrote; state.json is written last and is the commit.
"""

import asyncio
import json
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_actors import TrainerClient

STATE = "state.json"


class Checkpoints:
    """Writes one checkpoint at a time while training goes on, and removes those that are not to be kept."""

    def __init__(self, folder: Path, *, keep: int, keep_every: int = 0) -> None:
        self.folder, self.keep, self.keep_every = folder, keep, keep_every
        self._writing: asyncio.Task[None] | None = None

    async def save(self, trainer: TrainerClient, state: dict[str, Any]) -> None:
        """Begin to write step-N with N = state["step"], the number of steps done; returns when all state is copied.

        Waits for the one before, and raises RuntimeError or OSError when that one could not be written.
        """
        await self.finish()
        path = self.folder / f"step-{state['step']}"
        text = json.dumps(state | {"random": random_states()}, indent=2, default=str) + "\n"
        shutil.rmtree(path, ignore_errors=True)
        saved = await trainer.save_checkpoint(str(path / "trainer"))
        self._writing = asyncio.create_task(self._commit(saved, path, text))

    async def finish(self) -> None:
        """Wait for the one that is being written. Raises what kept it from the disk, as often as it is asked."""
        if self._writing is not None:
            await asyncio.shield(self._writing)  # who gives up waiting does not take the commit from it

    async def _commit(self, saved: Any, path: Path, text: str) -> None:
        await saved.wait()
        temporary = path / f"{STATE}.tmp"
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(
                file.fileno()
            )  # as the trainer's part is: a commit must not outlive a crash that its content does not
        os.replace(temporary, path / STATE)
        there = {int(found.name.removeprefix("step-")): found for found in complete(self.folder)}
        for step in removable(list(there), keep=self.keep, keep_every=self.keep_every):
            (there[step] / STATE).unlink()  # first: half removed is not complete
            shutil.rmtree(there[step])


def removable(steps: Sequence[int], *, keep: int, keep_every: int = 0) -> list[int]:
    """The steps, of these in order, that are neither the newest `keep` nor `keep_every` steps after the last one kept for good.

    removable([25, 50, 75, 100, 125], keep=1, keep_every=50) -> [25, 75]
    """
    removed, last = [], 0
    for step in steps:
        if keep_every and step - last >= keep_every:
            last = step
        elif step not in steps[-keep:]:
            removed.append(step)
    return removed


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    found = [path.parent for path in folder.glob(f"step-*/{STATE}")]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def remove_incomplete(folder: Path) -> None:
    """What a killed run left of the checkpoint that it was writing or removing."""
    for path in folder.glob("step-*"):
        if not (path / STATE).is_file():
            shutil.rmtree(path)


def read(path: Path) -> dict[str, Any]:
    """The controller's state. Raises ValueError when `path` is not a complete checkpoint of a run."""
    if not (path / STATE).is_file():
        raise ValueError(f"{path} is not a complete checkpoint of a run: it holds no {STATE}")
    return json.loads((path / STATE).read_text())


def newest(folder: Path) -> Path | None:
    """None when no checkpoint is complete."""
    return paths[-1] if (paths := complete(folder)) else None


def seed_random(seed: int) -> None:
    """Of Python, NumPy and torch in this process: a user's environment may draw from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """Of the same three, as JSON."""
    version, words, python_gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tobytes().hex()
    return {
        "python": [version, np.array(words, np.uint32).tobytes().hex(), python_gauss],
        "numpy": numpy,
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Go on where `random_states` was asked."""
    version, words, python_gauss = states["python"]
    random.setstate((version, tuple(np.frombuffer(bytes.fromhex(words), np.uint32).tolist()), python_gauss))
    numpy, key = states["numpy"], np.frombuffer(bytes.fromhex(states["numpy"]["state"]["key"]), np.uint32)
    np.random.set_state(numpy | {"state": numpy["state"] | {"key": key}})
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))
