"""Files of a run: their paths, and lines of JSON. Decides nothing."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RunFolder:
    """The paths of one run, and its JSON-lines files."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config, self.metrics = self.path / "config.json", self.path / "metrics.jsonl"
        self.rollouts, self.outcome = self.path / "rollouts.jsonl", self.path / "outcome.json"
        self.report, self.reward_png = self.path / "report.html", self.path / "reward.png"
        self.checkpoints, self.tensorboard = self.path / "checkpoints", self.path / "tensorboard"
        self.reference = self.path / "reference"

    @property
    def holds_run(self) -> bool:
        return any(path.exists() for path in (self.config, self.metrics, self.checkpoints))

    def log(self, name: str) -> Path:
        """log("trainer-0") -> logs/trainer-0.log"""
        return self.path / "logs" / f"{name}.log"

    def drop_from(self, step: int) -> None:
        """Forget the lines of steps >= step, and a line that a killed run left half written, each file in one rename."""
        for file in filter(Path.exists, (self.metrics, self.rollouts)):
            with file.with_suffix(".tmp").open("w") as temporary:
                temporary.writelines(to_json(line) + "\n" for line in read_jsonl(file) if line["step"] < step)
                temporary.flush()
                os.fsync(temporary.fileno())
            os.replace(temporary.name, file)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file; none when there is no file."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the run was killed while it wrote this line
    return records


def to_json(value: Any) -> str:
    """Strict JSON on one line: NaN and infinity become null, a tensor or an array its numbers."""
    return json.dumps(to_plain(value), allow_nan=False)


def to_plain(value: Any) -> Any:
    match value:
        case Mapping():
            return {str(key): to_plain(item) for key, item in value.items()}
        case list() | tuple():
            return [to_plain(item) for item in value]
        case float():
            return float(value) if math.isfinite(value) else None
        case None | bool() | int() | str():
            return value
    return to_plain(value.tolist()) if hasattr(value, "tolist") else str(value)
