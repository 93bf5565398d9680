"""The database of a Tinker server, in SQLite. Weights are files beside it, named in the database
only once they are complete, so after a kill every checkpoint has all its files.
"""

import json
import re
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

KIND_SEGMENTS = {"training": "weights", "sampler": "sampler_weights", "external": "external_weights"}
"""Kind of a checkpoint -> second part of its path."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
JSON_COLUMNS = frozenset({"tags", "user_metadata", "lora"})
for json_type in (dict, list):
    sqlite3.register_adapter(json_type, json.dumps)
BOOL_COLUMNS = frozenset({"public", "is_ephemeral", "is_dropped"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    id: str
    owner: str
    tags: list[str] = field(default_factory=list)
    user_metadata: Mapping[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    created: float = field(default_factory=time.time)
    last_seen: float = field(default_factory=time.time)
    finished: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A training run, which the protocol also calls a model."""

    id: str
    session_id: str
    owner: str
    base_model: str
    # rank (0: all weights are trained), seed, train_attn, train_mlp, train_unembed
    lora: Mapping[str, Any]
    user_metadata: Mapping[str, Any] | None = None
    created: float = field(default_factory=time.time)
    last_request: float = field(default_factory=time.time)
    parked: str | None = None  # directory of a state that waits on disk
    inflight_version: int | None = None  # newest version for "inflight" samplers


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Saved weights with a name."""

    path: str  # of checkpoint_path
    run_id: str
    owner: str
    kind: str  # key of KIND_SEGMENTS
    name: str
    directory: str
    version: int | None = None  # of the kind "sampler": number in `versions`
    size_bytes: int = 0
    created: float = field(default_factory=time.time)
    expires: float | None = None
    public: bool = False
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A sampling session of the protocol."""

    id: str
    session_id: str
    owner: str
    base_model: str
    model_path: str | None = None
    run_id: str | None = None
    version: int
    kind: str = "snapshot"  # uses its own version; "inflight": its run's inflight_version
    created: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Weights that the generator can load: the base model's, or those saved for a sampler."""

    number: int = 0  # 0: the next one
    run_id: str | None = None  # None: the base model
    directory: str = ""  # "" until it is written
    is_ephemeral: bool = False  # without a name
    is_dropped: bool = False


Row = TypeVar("Row", Session, TrainingRun, Checkpoint, Sampler, Version)
OwnRow = TypeVar("OwnRow", Session, TrainingRun, Checkpoint, Sampler)
TABLES = {Session: "sessions", TrainingRun: "runs", Checkpoint: "checkpoints", Sampler: "samplers", Version: "versions"}
"""By the class of the rows, whose first field is the key."""


def checkpoint_path(run_id: str, kind: str, name: str) -> str:
    """tinker://RUN/SEGMENT/NAME. Raises ValueError for a name that is not allowed."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"the name {name!r} is not possible; it must have 1 to 128 characters (letters, digits, '.', '_' and '-'), "
            "and must not begin with '.' or '-'"
        )
    return f"tinker://{run_id}/{KIND_SEGMENTS[kind]}/{name}"


class Store:
    """The database. All calls are short and come from one thread."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.db = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        self.db.row_factory = sqlite3.Row
        self.db.execute("PRAGMA journal_mode=WAL")
        # NORMAL: a kill loses nothing, a power failure perhaps the last rows
        self.db.execute("PRAGMA synchronous=NORMAL")
        for kind, table in TABLES.items():
            key, *others = _names(kind)
            key_type = "INTEGER" if kind is Version else "TEXT"
            columns = ", ".join([f"{key} {key_type} PRIMARY KEY", *others])
            self.db.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")
        self.db.execute("CREATE INDEX IF NOT EXISTS checkpoints_of_run ON checkpoints (run_id)")
        self.db.execute("CREATE INDEX IF NOT EXISTS runs_of_session ON runs (session_id)")

    def put(self, row: Session | TrainingRun | Checkpoint | Sampler | Version) -> int:
        """Add a row, replacing one of the same key. Returns the number of a Version."""
        names = _names(type(row))
        values = [getattr(row, name) for name in names]
        values[0] = values[0] or None
        marks = ", ".join("?" * len(names))
        query = f"INSERT OR REPLACE INTO {TABLES[type(row)]} ({', '.join(names)}) VALUES ({marks})"
        return self.db.execute(query, values).lastrowid or 0

    def get(self, kind: type[Row], key: str | int) -> Row | None:
        rows = self._rows(kind, f"WHERE {_key(kind)} = ?", key)
        return rows[0] if rows else None

    def find(self, kind: type[Row], /, limit: int = -1, offset: int = 0, **equal: Any) -> list[Row]:
        """The rows whose fields have these values, newest first. limit -1: all."""
        tail = f"WHERE {_condition(equal)} ORDER BY rowid DESC LIMIT ? OFFSET ?"
        return self._rows(kind, tail, *equal.values(), limit, offset)

    def count(self, kind: type[Row], /, **equal: Any) -> int:
        query = f"SELECT COUNT(*) FROM {TABLES[kind]} WHERE {_condition(equal)}"
        return self.db.execute(query, list(equal.values())).fetchone()[0]

    def update(self, kind: type[Row], key: str | int, /, **values: Any) -> None:
        names = ", ".join(f"{name} = ?" for name in values)
        self.db.execute(f"UPDATE {TABLES[kind]} SET {names} WHERE {_key(kind)} = ?", [*values.values(), key])

    def delete(self, kind: type[Row], key: str) -> None:
        self.db.execute(f"DELETE FROM {TABLES[kind]} WHERE {_key(kind)} = ?", (key,))

    def parked_runs(self) -> list[TrainingRun]:
        """Runs whose state waits on disk, least recently used first."""
        return self._rows(TrainingRun, "WHERE parked IS NOT NULL ORDER BY last_request")

    def expired(self, now: float) -> list[Checkpoint]:
        return self._rows(Checkpoint, "WHERE expires IS NOT NULL AND expires <= ?", now)

    def shown_versions(self, owner: str, limit: int) -> list[Version]:
        """Newest finished, undropped versions of an owner's runs and of base models."""
        of_owner = "run_id IS NULL OR run_id IN (SELECT id FROM runs WHERE owner = ?)"
        tail = f"WHERE NOT is_dropped AND directory != '' AND ({of_owner}) ORDER BY number DESC LIMIT ?"
        return self._rows(Version, tail, owner, limit)

    def forgotten_versions(self, seen_before: float) -> list[Version]:
        """Finished, unnamed, undropped versions of runs whose session was last seen before."""
        silent = "SELECT runs.id FROM runs JOIN sessions ON sessions.id = runs.session_id WHERE sessions.last_seen < ?"
        tail = f"WHERE is_ephemeral AND NOT is_dropped AND directory != '' AND run_id IN ({silent})"
        return self._rows(Version, tail, seen_before)

    def _rows(self, kind: type[Row], tail: str, *arguments: Any) -> list[Row]:
        rows = self.db.execute(f"SELECT * FROM {TABLES[kind]} {tail}", arguments)
        return [kind(**_from_row(row)) for row in rows]


def _names(kind: type) -> list[str]:
    return [each.name for each in fields(kind)]


def _key(kind: type) -> str:
    return _names(kind)[0]


def _condition(equal: Mapping[str, Any]) -> str:
    return " AND ".join(f"{name} IS ?" for name in equal) or "1"  # IS: also None


def _from_row(row: sqlite3.Row) -> dict[str, Any]:
    values = dict(row)
    for name in JSON_COLUMNS & values.keys():
        values[name] = None if values[name] is None else json.loads(values[name])
    for name in BOOL_COLUMNS & values.keys():
        values[name] = bool(values[name])
    return values
