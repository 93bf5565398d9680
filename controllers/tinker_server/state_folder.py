"""The folder of a server's state, which belongs to one running server and one base model."""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from rl_actors.json_files import read_object

SAMPLE_BYTES = 1 << 20
"""Bytes at each end of a file of weights that the fingerprint reads."""


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the folder for this process. Raises ValueError if another server holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{folder} holds the state of a server that is running (process {file.read().strip()}); stop it, or give "
                "another folder to --state"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def require_base(folder: Path, name: str, model: Path) -> None:
    """Record the state's base model. Raises ValueError, with both names, if the record has another."""
    record = folder / "base.json"
    found = fingerprint(model)
    if record.is_file():
        saved = read_object(record)
        if saved.get("fingerprint") != found:
            raise ValueError(
                f"{folder} holds runs of the base model {saved.get('name')!r} ({saved.get('directory')}), so it cannot serve "
                f"{name!r} ({model}); give another folder to --state"
            )
    written = record.with_suffix(".new")
    written.write_text(json.dumps({"name": name, "directory": str(model), "fingerprint": found}, indent=2))
    written.replace(record)  # a file half written by a kill would be refused for ever


def fingerprint(model: Path) -> str:
    """A hash of config.json, and of sizes, beginnings and ends of the files of weights."""
    whole = hashlib.sha256((model / "config.json").read_bytes())
    for path in sorted(model.glob("*.safetensors")):
        size = path.stat().st_size
        whole.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            whole.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, size - SAMPLE_BYTES))
            whole.update(file.read(SAMPLE_BYTES))
    return whole.hexdigest()
