"""Starts our Tinker server, runs recipes of tinker-cookbook against it, and reads their results. A recipe is a training program of the
cookbook. The recipes run in a Python environment of their own, which `make cookbook` makes.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_sets import write_data_sets

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("COOKBOOK_PYTHON", ROOT / ".venv-cookbook" / "bin" / "python"))
MODEL = "Qwen/Qwen3-8B"
"""A model name that the cookbook knows. Under this name the server serves its tiny model, or the model that `serving` gets as `base`."""
START_SECONDS = 600
"""The server must be ready within this number of seconds."""
RECIPE_SECONDS = 1800
"""A recipe must end within this number of seconds."""


@dataclass(frozen=True, kw_only=True)
class Cookbook:
    """A folder in which recipes run.

    environment: the environment variables of the recipes, with the server's address and its API key.
    """

    folder: Path
    environment: dict[str, str]

    def run(self, module: str, *arguments: str, log: str) -> "Outcome":
        """Run a recipe to its end. module: the recipe's module in tinker_cookbook. log: name of the recipe's log folder."""
        folder = self.folder / "logs" / log
        return self._run(["-m", f"tinker_cookbook.{module}", *arguments, f"log_path={folder}"], folder)

    def run_program(self, name: str, *arguments: str) -> "Outcome":
        """Run one of the cookbook's own test programs to its end. name: the program's file."""
        return self._run([str(PYTHON.parents[1] / "tests" / name), *arguments], self.folder)

    def _run(self, command: list[str], folder: Path) -> "Outcome":
        begun = time.monotonic()
        done = subprocess.run(
            [str(PYTHON), *command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=RECIPE_SECONDS,
        )
        print(
            f"exit status {done.returncode} after {time.monotonic() - begun:.0f} s: {shlex.join(command)}", flush=True
        )
        return Outcome(done.returncode, done.stdout + done.stderr, folder)


@dataclass(frozen=True)
class Outcome:
    """The result of a recipe or of a program."""

    returncode: int
    output: str  # stdout, then stderr
    folder: Path  # the recipe's log folder; for run_program the folder of the Cookbook

    def require_success(self) -> "Outcome":
        assert self.returncode == 0, self.output[-6000:]
        return self

    def metrics(self, name: str) -> list[float]:
        """The values of a metric, in the order of the steps."""
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [row[name] for row in rows if name in row]


@contextlib.contextmanager
def serving(folder: Path, base: Path | None = None) -> Iterator[Cookbook]:
    """Context manager that starts a server with its state in this folder, and yields a Cookbook that runs recipes in this folder.

    base: directory of the base model; None: the tiny model.
    """
    write_data_sets(folder)
    state = folder / "state"
    command = [str(ROOT / ".venv/bin/python"), "-m", "controllers.tinker_server", "--config", "tiny_chat"]
    serve_as = MODEL if base is None else f"{MODEL}={base}"
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--address", "127.0.0.1:0", "--serve-as", serve_as, "--state", str(state)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        exports = read_exports(server, folder / "server.log")
        # The cookbook loads the tokenizer by the name of the model. transformers first looks for a folder of this name in
        # the working directory. So this code makes a link of this name to the model's folder.
        (folder / MODEL).parent.mkdir(parents=True, exist_ok=True)
        (folder / MODEL).symlink_to(base or state / "base" / MODEL)
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}
        yield Cookbook(folder=folder, environment=os.environ | offline | exports)
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=300) == 0, (folder / "server.log").read_text()[-4000:]


def read_exports(server: subprocess.Popen, log: Path) -> dict[str, str]:
    """The two environment variables that the server prints when it is ready.

    Raises RuntimeError if the server ends early, or is not ready within START_SECONDS.
    """
    exports: dict[str, str] = {}
    too_late = threading.Timer(START_SECONDS, server.kill)
    too_late.start()
    try:
        for line in server.stdout:
            if line.startswith("export "):
                name, _, value = line.removeprefix("export ").strip().partition("=")
                exports[name] = value
            if len(exports) == 2:
                return exports
    finally:
        too_late.cancel()
    raise RuntimeError(f"the server did not start: {log.read_text()[-4000:]}")
