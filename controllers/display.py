"""Terminal output of a run: a live panel, or one line a step when stdout is a file or a pipe. Measures nothing."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from controllers.run_folder import Record

COLUMNS = (  # title, width, key of the record, format
    ("reward", 6, "reward/mean", ".3f"),
    ("accuracy", 8, "validation/accuracy", ".3f"),
    ("loss", 9, "loss", ".3g"),
    ("grad_norm", 9, "grad_norm", ".3g"),
    ("lr", 8, "learning_rate", ".2e"),
    ("tokens/s", 8, "tokens/s", ",.0f"),  # trained tokens over the whole step
    ("generate", 8, "time/generate", ".2f"),
    ("train", 5, "time/train", ".2f"),
    ("sync", 5, "time/sync", ".2f"),
    # Policy versions between the weights that sampled and the weights that were trained.
    ("lag", 3, "policy_lag", ".2g"),
)


class LineDisplay:
    """One aligned line a step, with a header line every 20 steps and at the start of a phase."""

    def __init__(self, console: Console, total_steps: int | None):
        self.console, self.total_steps = console, total_steps
        self.setups: dict[str, float] = {}  # label of an unfinished setup -> time of its start
        self.record: Record = {"step": 0, "phase": ""}  # of the last step
        self._start = time.perf_counter()
        self._recent = deque[float](maxlen=20)  # seconds of the last steps
        self._num_rows, self._phase = 0, ""

    @contextmanager
    def setup(self, label: str) -> Iterator[None]:
        self.setups[label] = start = time.perf_counter()
        self.setup_started(label)
        try:
            yield
        finally:
            del self.setups[label]
            self.print(f"{label}: {time.perf_counter() - start:.1f} s")

    def setup_started(self, label: str) -> None:
        self.print(f"{label} ...")

    def step(self, record: Record) -> None:
        self.record = record
        if seconds := record.get("time/step"):
            self._recent.append(seconds)
        self.row()

    def row(self) -> None:
        if self._num_rows % 20 == 0 or self.record["phase"] != self._phase:
            titles = "".join(f"  {title:>{width}}" for title, width, *_ in COLUMNS)
            self.print(f"{'done':>7}  {'':4}{titles}  {'elapsed':>7}  {'left':>7}")
        self._num_rows, self._phase = self._num_rows + 1, self.record["phase"]
        values = "".join(f"  {_text(self.record, key, spec):>{width}}" for _, width, key, spec in COLUMNS)
        skipped = "  skipped" if self.record.get("skipped") else ""
        self.print(f"{self.done:>7}  {self._phase:4}{values}  {self.elapsed:>7}  {self.left:>7}{skipped}")

    @property
    def done(self) -> str:
        return f"{self.record['step']}/{self.total_steps or '?'}"

    @property
    def elapsed(self) -> str:
        return _clock(time.perf_counter() - self._start)

    @property
    def left(self) -> str:
        if not self.total_steps or not self._recent:
            return "-"
        return _clock((self.total_steps - self.record["step"]) * sum(self._recent) / len(self._recent))

    def print(self, line: str) -> None:
        print(line, file=self.console.file, flush=True)

    def close(self) -> None:
        pass


class LiveDisplay(LineDisplay):
    """A panel at the bottom of a terminal. Every step with a validation leaves a line above the panel."""

    def __init__(self, console: Console, total_steps: int | None):
        super().__init__(console, total_steps)
        self._known = self.record  # the last value of each key
        redirect = console.file is sys.stdout  # other prints then appear above the panel instead of inside it
        self._live = Live(
            console=console, get_renderable=self._panel, redirect_stdout=redirect, redirect_stderr=redirect
        )
        self._live.start()

    def setup_started(self, label: str) -> None:
        pass  # the panel shows the seconds since the start

    def step(self, record: Record) -> None:
        super().step(record)
        self._known = self._known | {key: value for key, value in self.record.items() if value is not None}

    def row(self) -> None:
        if self.record.get("validation/accuracy") is not None:
            super().row()

    def print(self, line: str) -> None:
        self.console.print(Text(line), no_wrap=True, overflow="crop", crop=True)

    def close(self) -> None:
        self._live.stop()

    def _panel(self) -> Group:
        now = time.perf_counter()
        spinner = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"[int(now * 8) % 10]
        setups = list(self.setups.items())  # a copy: the panel is drawn by a thread of its own
        if setups or not self._known["phase"]:
            return Group(*(Text(f"{spinner} {label}: {now - start:.0f} s") for label, start in setups))
        bar = Table.grid(padding=(0, 2))
        progress = ProgressBar(total=self.total_steps, completed=self._known["step"], width=32)
        times = Text(f"{self.elapsed} elapsed, {self.left} left", style="dim")
        bar.add_row(Text(self._known["phase"], style="bold"), progress, self.done, times)
        cells = []
        for title, width, key, spec in COLUMNS:
            value = f"{_text(self._known, key, spec):<{width}}"
            cells.append(Text.assemble((f"{title} ", "dim"), (value, "bold")))
        return Group(bar, Columns(cells, padding=(0, 2)))


def _text(record: Record, key: str, spec: str) -> str:
    value = record.get(key)
    return "-" if value is None else format(value, spec)


def _clock(seconds: float) -> str:
    """3725.2 -> 1:02:05"""
    minutes, seconds = divmod(max(0, int(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
