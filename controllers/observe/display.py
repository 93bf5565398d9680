"""Shows a run as a live panel; with --verbose, or not on a terminal, as one line per step."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich import progress
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from controllers.observe.metric_table import METRICS
from controllers.observe.run_folder import Record

COLUMNS = {
    "reward/mean": 6,
    "eval/reward": 8,
    "loss": 9,
    "grad_norm": 9,
    "learning_rate": 8,
    "tokens/s": 8,
    "time/generate": 8,
    "time/train": 5,
    "time/sync": 5,
    "policy_lag": 3,
}
"""Metric -> width of its column in a printed line."""
PANEL_COLUMNS = COLUMNS | {"busy/trainer": 4, "busy/generator": 4}
"""Columns of the live panel."""


class LineDisplay:
    """Prints a line per step, and a header every 20 lines and at the start of a phase."""

    def __init__(self, console: Console, total_steps: int | None):
        self.console = console
        self.total_steps = total_steps
        self.record: Record = {"step": 0, "phase": ""}  # the record of the last step
        self.setups = progress.Progress(
            progress.SpinnerColumn(), progress.TextColumn("{task.description}: {task.elapsed:.0f} s"), console=console
        )
        self.steps = progress.Progress(
            progress.TextColumn("[bold]{task.description}"),
            progress.BarColumn(32),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("elapsed,"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("left"),
            console=console,
            speed_estimate_period=3600,  # seconds; long, because a step may take minutes
        )
        self.steps.add_task("", total=total_steps)
        self._num_rows = 0
        self._phase = ""

    @contextmanager
    def setup(self, label: str) -> Iterator[None]:
        number = self.setups.add_task(label, total=None)
        self.setup_started(label)
        start = self.console.get_time()
        try:
            yield
        finally:
            self.setups.remove_task(number)
            self.print(f"{label}: {self.console.get_time() - start:.1f} s")

    def setup_started(self, label: str) -> None:
        self.print(f"{label} ...")

    def step(self, record: Record) -> None:
        if record["phase"] != self.record["phase"]:
            self._start_phase(record["phase"])
        self.record = record
        self.steps.update(self._task.id, completed=record["step"], total=self.total_steps)
        self.row()

    def _start_phase(self, phase: str) -> None:
        """The steps of a phase alone estimate the remaining time."""
        began = self._task.start_time
        self.steps.remove_task(self._task.id)
        self.steps.add_task(phase, total=self.total_steps)
        self._task.start_time = began

    @property
    def _task(self) -> progress.Task:
        return self.steps.tasks[0]

    def row(self) -> None:
        if self._num_rows % 20 == 0 or self.record["phase"] != self._phase:
            titles = "".join(f"  {METRICS[name].title:>{width}}" for name, width in COLUMNS.items())
            self.print(f"{'done':>7}  {'':4}{titles}  {'elapsed':>7}  {'left':>7}")
        self._num_rows += 1
        self._phase = self.record["phase"]
        values = "".join(f"  {_text(self.record, name):>{width}}" for name, width in COLUMNS.items())
        elapsed = _clock(self._task.elapsed)
        left = _clock(self._task.time_remaining)
        skipped = "  skipped" if self.record.get("skipped") else ""
        done = f"{self.record['step']}/{self.total_steps or '?'}"
        self.print(f"{done:>7}  {self._phase:4}{values}  {elapsed:>7}  {left:>7}{skipped}")

    def print(self, line: str) -> None:
        print(line, file=self.console.file, flush=True)

    def close(self) -> None:
        pass


class LiveDisplay(LineDisplay):
    """A panel at the bottom of the terminal. A step with an evaluation also prints a line above it."""

    def __init__(self, console: Console, total_steps: int | None):
        super().__init__(console, total_steps)
        self._known = self.record  # the last value of each key, over all steps
        redirect = console.file is sys.stdout  # True: output of other code appears above the panel, not inside it
        self._live = Live(
            console=console, get_renderable=self._panel, redirect_stdout=redirect, redirect_stderr=redirect
        )
        self._live.start()

    def setup_started(self, label: str) -> None:
        pass  # the panel shows the label and the seconds of a setup that is not over

    def step(self, record: Record) -> None:
        super().step(record)
        self._known = self._known | {key: value for key, value in self.record.items() if value is not None}

    def row(self) -> None:
        if self.record.get("eval/reward") is not None:
            super().row()

    def print(self, line: str) -> None:
        self.console.print(Text(line), no_wrap=True, overflow="crop", crop=True)

    def close(self) -> None:
        self._live.stop()

    def _panel(self) -> Group:
        if self.setups.tasks or not self._known["phase"]:
            return Group(self.setups)
        cells = []
        for name, width in PANEL_COLUMNS.items():
            value = f"{_text(self._known, name):<{width}}"
            cells.append(Text.assemble((f"{METRICS[name].title} ", "dim"), (value, "bold")))
        return Group(self.steps, Columns(cells, padding=(0, 2)))


def _text(record: Record, name: str) -> str:
    value = record.get(name)
    return "-" if value is None else format(value, METRICS[name].format)


def _clock(seconds: float | None) -> str:
    """1:02:05 for 3725.2 seconds."""
    return "-" if seconds is None else str(timedelta(seconds=int(seconds)))
