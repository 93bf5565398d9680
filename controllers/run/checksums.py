"""Checksums of a checkpoint's files: written before state.json, compared before a run reads the
files."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from controllers.observe.run_folder import naming

FILE = "checksums.json"


def write(folder: Path, others: Mapping[str, str]) -> None:
    """Write checksums.json for all files under the folder. others: {name: content} of files that
    the caller writes later. Raises OSError naming the file."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != FILE]
    found = dict(zip([str(path.relative_to(folder)) for path in paths], _checksums(paths), strict=True))
    for name, text in others.items():
        found[name] = {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    write_durably(folder / FILE, json.dumps(found, indent=2) + "\n")


def fault(folder: Path) -> str:
    """What is wrong with one damaged file; "" if none is, or without checksums.json."""
    file = folder / FILE
    try:
        if not file.exists():
            return ""
        expected = json.loads(file.read_text())
        paths = [folder / name for name in expected]
        for path, entry in zip(paths, expected.values(), strict=True):
            if not path.is_file():
                return f"{path} is missing"
            if path.stat().st_size != entry["bytes"]:
                return f"{path} has {path.stat().st_size} bytes instead of {entry['bytes']}"
        for path, entry, found in zip(paths, expected.values(), _checksums(paths), strict=True):
            if found["sha256"] != entry["sha256"]:
                return f"{path} has another checksum than when it was written"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{file} or a file that it lists cannot be read: {error}"
    return ""


def write_durably(path: Path, text: str) -> None:
    """Write atomically and to disk: a reader gets the old or the new content. Raises OSError naming
    `path`.tmp."""
    temporary = path.with_name(f"{path.name}.tmp")
    with naming(temporary):
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            # Without fsync, a crash of the machine could leave the file without its content.
            os.fsync(file.fileno())
        os.replace(temporary, path)
        # Without the fsync of the folder, a crash of the machine could bring the old file back.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _checksums(paths: list[Path]) -> list[dict[str, object]]:
    """Size and SHA-256 of each file, on several threads, because hashlib releases the GIL."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(_checksum, paths))


def _checksum(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
