"""Checkpoints of a run: the trainer's weights and the controller's own state. A folder is complete when state.json is there.

checkpoints/step-N/trainer is what PolicyTrainer.save_checkpoint wrote; state.json is written last and is the commit.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from rl_actors import TrainerClient

STATE = "state.json"


async def save(trainer: TrainerClient, folder: Path, state: dict[str, Any], *, keep: int) -> Path:
    """Write step-N with N = state["step"], the number of steps done; then remove all but the newest `keep`."""
    path = folder / f"step-{state['step']}"
    shutil.rmtree(path, ignore_errors=True)
    await trainer.save_checkpoint(str(path / "trainer"))
    temporary = path / f"{STATE}.tmp"
    temporary.write_text(json.dumps(state, indent=2) + "\n")
    os.replace(temporary, path / STATE)
    for old in complete(folder)[:-keep]:
        (old / STATE).unlink()  # first: half removed is not complete
        shutil.rmtree(old)
    return path


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    found = [path.parent for path in folder.glob(f"step-*/{STATE}")]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def read(path: Path) -> dict[str, Any]:
    """The controller's state. Raises ValueError when `path` is not a complete checkpoint of a run."""
    if not (path / STATE).is_file():
        raise ValueError(f"{path} is not a complete checkpoint of a run: it holds no {STATE}")
    return json.loads((path / STATE).read_text())


def newest(folder: Path) -> Path:
    """Raises ValueError when there is none."""
    if not (paths := complete(folder)):
        raise ValueError(f"{folder} holds no complete checkpoint")
    return paths[-1]
