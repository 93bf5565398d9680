"""The database of a Tinker server, in SQLite: sessions, training runs, checkpoints, samplers and
versions of weights.

Weights are files beside it, named in the database only once they are complete, so after a kill
every checkpoint has all its files.
"""

import json
import re
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, owner TEXT, tags TEXT, user_metadata TEXT, sdk_version TEXT,
    project_id TEXT, display_name TEXT, created REAL, last_seen REAL, finished TEXT);
CREATE TABLE IF NOT EXISTS runs (id TEXT PRIMARY KEY, session_id TEXT, owner TEXT, base_model TEXT, lora TEXT, user_metadata TEXT,
    created REAL, last_request REAL, parked TEXT, inflight_version INTEGER);
CREATE TABLE IF NOT EXISTS checkpoints (path TEXT PRIMARY KEY, run_id TEXT, owner TEXT, kind TEXT, name TEXT, directory TEXT,
    version INTEGER, size_bytes INTEGER, created REAL, expires REAL, public INTEGER, user_metadata TEXT);
CREATE TABLE IF NOT EXISTS versions (number INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT, directory TEXT, is_ephemeral INTEGER,
    is_dropped INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS samplers (id TEXT PRIMARY KEY, session_id TEXT, owner TEXT, base_model TEXT, model_path TEXT,
    run_id TEXT, version INTEGER, kind TEXT, created REAL);
CREATE INDEX IF NOT EXISTS checkpoints_of_run ON checkpoints (run_id);
CREATE INDEX IF NOT EXISTS runs_of_session ON runs (session_id);
"""
KIND_SEGMENTS = {"training": "weights", "sampler": "sampler_weights", "external": "external_weights"}
"""Kind of a checkpoint -> second part of its path."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run, which the protocol also calls a model."""

    id: str
    session_id: str
    owner: str
    base_model: str
    # rank (0: all weights are trained), seed, train_attn, train_mlp, train_unembed
    lora: Mapping[str, Any]
    user_metadata: Mapping[str, Any] | None = None
    created: float = 0.0
    last_request: float = 0.0
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
    created: float = 0.0
    expires: float | None = None
    public: bool = False
    user_metadata: Mapping[str, str] | None = None

    @property
    def id(self) -> str:
        return f"{KIND_SEGMENTS[self.kind]}/{self.name}"

    def has_expired(self, now: float) -> bool:
        return self.expires is not None and self.expires <= now


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A sampling session of the protocol: "snapshot" uses its own `version`, "inflight" its run's
    inflight_version.
    """

    id: str
    session_id: str
    owner: str
    base_model: str
    model_path: str | None = None
    run_id: str | None = None
    version: int
    kind: str = "snapshot"
    created: float = 0.0


def checkpoint_path(run_id: str, kind: str, name: str) -> str:
    """checkpoint_path("s:train:0", "sampler", "7") -> "tinker://s:train:0/sampler_weights/7".
    Raises ValueError for a name that is not allowed.
    """
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
        self.db.executescript(SCHEMA)

    def close(self) -> None:
        self.db.close()

    # sessions

    def add_session(self, session_id: str, owner: str, fields: Mapping[str, Any]) -> None:
        now = time.time()
        self._insert("sessions", dict(fields) | {"id": session_id, "owner": owner, "created": now, "last_seen": now})

    def session(self, session_id: str) -> dict[str, Any] | None:
        return self._one("SELECT * FROM sessions WHERE id = ?", session_id)

    def sessions(self, owner: str | None, limit: int, offset: int) -> list[dict[str, Any]]:
        where, arguments = _owned(owner)
        query = f"SELECT * FROM sessions WHERE {where} ORDER BY created DESC, id LIMIT ? OFFSET ?"
        return self._all(query, *arguments, limit, offset)

    def touch_session(self, session_id: str) -> None:
        self.db.execute("UPDATE sessions SET last_seen = ? WHERE id = ?", (time.time(), session_id))

    def update_session(self, session_id: str, **fields: Any) -> None:
        self._update("sessions", "id", session_id, fields)

    # training runs

    def add_run(self, run: Run) -> None:
        now = time.time()
        self._insert("runs", _columns(replace(run, created=now, last_request=now)))

    def run(self, run_id: str) -> Run | None:
        row = self._one("SELECT * FROM runs WHERE id = ?", run_id)
        return None if row is None else Run(**row)

    def runs(self, owner: str | None, limit: int, offset: int, session_id: str | None = None) -> list[Run]:
        where, arguments = _owned(owner)
        if session_id is not None:
            where = f"{where} AND session_id = ?"
            arguments = [*arguments, session_id]
        query = f"SELECT * FROM runs WHERE {where} ORDER BY created DESC, id LIMIT ? OFFSET ?"
        return [Run(**row) for row in self._all(query, *arguments, limit, offset)]

    def count_runs(self, owner: str | None) -> int:
        where, arguments = _owned(owner)
        return self.db.execute(f"SELECT COUNT(*) FROM runs WHERE {where}", arguments).fetchone()[0]

    def parked_runs(self) -> list[Run]:
        """Runs whose state waits on disk, least recently used first."""
        return [Run(**row) for row in self._all("SELECT * FROM runs WHERE parked IS NOT NULL ORDER BY last_request")]

    def update_run(self, run_id: str, **fields: Any) -> None:
        self._update("runs", "id", run_id, fields)

    # checkpoints

    def put_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, replacing one of the same path."""
        self._insert("checkpoints", _columns(replace(checkpoint, created=time.time())), replaces=True)

    def checkpoint(self, path: str) -> Checkpoint | None:
        row = self._one("SELECT * FROM checkpoints WHERE path = ?", path)
        return None if row is None else _checkpoint(row)

    def checkpoints(self, *, run_id: str | None = None, owner: str | None = None) -> list[Checkpoint]:
        """Newest first, of a run, an owner, or all."""
        where, arguments = _owned(owner)
        if run_id is not None:
            where = f"{where} AND run_id = ?"
            arguments = [*arguments, run_id]
        rows = self._all(f"SELECT * FROM checkpoints WHERE {where} ORDER BY created DESC, path", *arguments)
        return [_checkpoint(row) for row in rows]

    def update_checkpoint(self, path: str, **fields: Any) -> None:
        self._update("checkpoints", "path", path, fields)

    def delete_checkpoint(self, path: str) -> None:
        self.db.execute("DELETE FROM checkpoints WHERE path = ?", (path,))

    def expired(self, now: float) -> list[Checkpoint]:
        rows = self._all("SELECT * FROM checkpoints WHERE expires IS NOT NULL AND expires <= ?", now)
        return [_checkpoint(row) for row in rows]

    # versions of weights for samplers

    def add_version(self, run_id: str | None, *, is_ephemeral: bool) -> int:
        """Add a version whose directory is not written yet, and return its number. is_ephemeral:
        without a name.
        """
        query = "INSERT INTO versions (run_id, directory, is_ephemeral) VALUES (?, '', ?)"
        number = self.db.execute(query, (run_id, is_ephemeral)).lastrowid
        assert number is not None
        return number

    def finish_version(self, number: int, directory: str) -> None:
        self.db.execute("UPDATE versions SET directory = ? WHERE number = ?", (directory, number))

    def version_of_base(self, directory: str) -> int:
        """The base model's version, added if missing."""
        row = self._one("SELECT number FROM versions WHERE run_id IS NULL AND directory = ?", directory)
        if row is not None:
            return row["number"]
        number = self.add_version(None, is_ephemeral=False)
        self.finish_version(number, directory)
        return number

    def directory_of(self, number: int) -> str | None:
        """None for a version that is dropped, unknown or unfinished."""
        row = self._one("SELECT directory FROM versions WHERE number = ? AND NOT is_dropped", number)
        return None if row is None else row["directory"] or None

    def ephemeral_versions(self, run_id: str) -> list[int]:
        """A run's finished, unnamed, undropped versions, oldest first."""
        query = "SELECT number FROM versions WHERE run_id = ? AND is_ephemeral AND NOT is_dropped AND directory != '' ORDER BY number"
        return [row["number"] for row in self._all(query, run_id)]

    def versions(self, owner: str, limit: int) -> list[dict[str, Any]]:
        """Newest finished, undropped versions of an owner's runs and of base models: number,
        run_id, path (None if no checkpoint), is_ephemeral.
        """
        query = """SELECT versions.number, versions.run_id, versions.is_ephemeral, checkpoints.path FROM versions
            LEFT JOIN runs ON runs.id = versions.run_id LEFT JOIN checkpoints ON checkpoints.version = versions.number
            WHERE NOT is_dropped AND versions.directory != '' AND (versions.run_id IS NULL OR runs.owner = ?)
            ORDER BY versions.number DESC LIMIT ?"""
        return self._all(query, owner, limit)

    def forgotten_versions(self, seen_before: float) -> list[int]:
        """Finished, unnamed, undropped versions of runs whose session was last seen before this
        time (seconds since 1970).
        """
        query = """SELECT number FROM versions JOIN runs ON runs.id = versions.run_id JOIN sessions ON sessions.id = runs.session_id
            WHERE is_ephemeral AND NOT is_dropped AND directory != '' AND sessions.last_seen < ?"""
        return [row["number"] for row in self._all(query, seen_before)]

    def drop_version(self, number: int) -> None:
        self.db.execute("UPDATE versions SET is_dropped = 1 WHERE number = ?", (number,))

    # samplers

    def add_sampler(self, sampler: Sampler) -> None:
        self._insert("samplers", _columns(replace(sampler, created=time.time())), replaces=True)

    def sampler(self, sampler_id: str) -> Sampler | None:
        row = self._one("SELECT * FROM samplers WHERE id = ?", sampler_id)
        return None if row is None else Sampler(**row)

    def samplers_of(self, session_id: str) -> list[str]:
        return [
            row["id"] for row in self._all("SELECT id FROM samplers WHERE session_id = ? ORDER BY created", session_id)
        ]

    def _insert(self, table: str, fields: Mapping[str, Any], *, replaces: bool = False) -> None:
        names = ", ".join(fields)
        marks = ", ".join("?" * len(fields))
        verb = "INSERT OR REPLACE" if replaces else "INSERT"
        values = [_to_column(value) for value in fields.values()]
        self.db.execute(f"{verb} INTO {table} ({names}) VALUES ({marks})", values)

    def _update(self, table: str, key: str, value: str, fields: Mapping[str, Any]) -> None:
        names = ", ".join(f"{name} = ?" for name in fields)
        values = [_to_column(each) for each in fields.values()]
        self.db.execute(f"UPDATE {table} SET {names} WHERE {key} = ?", [*values, value])

    def _one(self, query: str, *arguments: Any) -> dict[str, Any] | None:
        row = self.db.execute(query, arguments).fetchone()
        return None if row is None else _from_row(row)

    def _all(self, query: str, *arguments: Any) -> list[dict[str, Any]]:
        return [_from_row(row) for row in self.db.execute(query, arguments).fetchall()]


JSON_COLUMNS = frozenset({"tags", "user_metadata", "lora"})


def _to_column(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, Mapping | list) else value


def _from_row(row: sqlite3.Row) -> dict[str, Any]:
    values = dict(row)
    for name in JSON_COLUMNS & values.keys():
        values[name] = None if values[name] is None else json.loads(values[name])
    return values


def _columns(row: Run | Checkpoint | Sampler) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__slots__}


def _checkpoint(row: dict[str, Any]) -> Checkpoint:
    return Checkpoint(**(row | {"public": bool(row["public"])}))


def _owned(owner: str | None) -> tuple[str, list[Any]]:
    """(SQL condition, arguments) for the rows of an owner; None: all."""
    return ("1", []) if owner is None else ("owner = ?", [owner])
