"""Recipes of tinker-cookbook as programs in an environment of their own (`make cookbook`), and what they left behind."""

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("COOKBOOK_PYTHON", ROOT / ".venv-cookbook" / "bin" / "python"))
MODEL = "Qwen/Qwen3-8B"
"""A name that the cookbook knows. The server answers for it with the tiny model."""
START_SECONDS = 600
RECIPE_SECONDS = 1800


@dataclass(frozen=True, kw_only=True)
class Cookbook:
    """A folder in which recipes run, and the server that they use."""

    folder: Path
    environment: dict[str, str]

    def run(self, module: str, *arguments: str, log: str | None = None) -> "Outcome":
        """Run a recipe to its end. log: name of its log folder."""
        folder = self.folder / "logs" / (log or module.replace(".", "_"))
        command = [str(PYTHON), "-m", f"tinker_cookbook.{module}", *arguments]
        if log is not None:
            command.append(f"log_path={folder}")
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=RECIPE_SECONDS
        )
        return Outcome(done.returncode, done.stdout + done.stderr, folder)


@dataclass(frozen=True)
class Outcome:
    returncode: int
    output: str
    folder: Path

    def require_success(self) -> "Outcome":
        assert self.returncode == 0, self.output[-6000:]
        return self

    def metrics(self, name: str) -> list[float]:
        """The values of a metric, in the order of the steps."""
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [row[name] for row in rows if name in row]


def read_exports(server: subprocess.Popen, log: Path) -> dict[str, str]:
    """The variables that the server prints when it is ready."""
    exports: dict[str, str] = {}
    deadline = time.monotonic() + START_SECONDS
    while len(exports) < 2 and time.monotonic() < deadline:
        line = server.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended: {log.read_text()[-4000:]}")
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").strip().partition("=")
            exports[name] = value
    return exports
