"""The paths of a run's files, and JSON."""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]
"""One line of a file such as metrics.jsonl: a JSON object."""


class RunFolder:
    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.rollouts = self.path / "rollouts.jsonl"
        self.outcome = self.path / "outcome.json"
        self.evaluation = self.path / "evaluation.jsonl"
        self.timeline = self.path / "timeline.jsonl"
        self.restarts = self.path / "restarts.jsonl"
        self.report = self.path / "report.html"
        self.start = self.path / "start.json"  # the command that began the run, and the time
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.reference = self.path / "reference"
        self.held_out = self.path / "held_out.json"  # HeldOut.to_json
        self.data = self.path / "data.json"  # RunConfig.data_digests, when the run began

    @property
    def step_files(self) -> tuple[Path, ...]:
        """Their lines belong to a step each."""
        return self.metrics, self.rollouts, self.evaluation, self.timeline

    @property
    def holds_run(self) -> bool:
        return any(path.exists() for path in (self.config, self.metrics, self.checkpoints))

    def log(self, name: str) -> Path:
        """log("trainer-0") is logs/trainer-0.log in the run folder."""
        return self.path / "logs" / f"{name}.log"

    def add_restart(self, line: Record) -> None:
        """Append a line, made by `survival.restart_line`, to restarts.jsonl."""
        with self.restarts.open("a") as file:
            file.write(to_json(line) + "\n")

    def drop_after(self, step: int) -> None:
        """Remove the lines of later steps and half-written ones, by a new file and a rename."""
        for file in self.step_files:
            if not file.exists():
                continue
            with file.with_suffix(".tmp").open("w") as temporary:
                for record in read_jsonl(file):
                    if record["step"] <= step:
                        temporary.write(to_json(record) + "\n")
                temporary.flush()
                os.fsync(temporary.fileno())
            os.replace(temporary.name, file)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds `path` to an OSError of the block that names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def read_jsonl(path: Path) -> list[Record]:
    """The objects on complete lines; [] if there is no file."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the run was killed while it wrote this line
    return records


def to_json(value: object) -> str:
    """Strict JSON on one line: NaN and infinity become null."""
    return json.dumps(to_plain(value), allow_nan=False)


def to_plain(value: object) -> Any:
    """In JSON's types: NaN and infinity None, tensors and arrays lists, other objects str."""
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
