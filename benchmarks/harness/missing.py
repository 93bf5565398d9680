"""Run the rows of the table that this machine can run and has no result of yet, one after another, each in a process of its own.

`make bench ROW=missing`. A result is kept as it comes, so a table that was broken off goes on where it stopped: give the same command again.
A row that fails does not end the table: it is named at the end, and the exit status is 1. Only results from the same kind of device count.
With --side-by-side the next row begins as soon as there are GPUs for it; what it prints is in runs/benchmarks.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.harness import results
from benchmarks.harness.register import TABLE
from benchmarks.harness.table import H200, newest, sentence

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-m", "benchmarks"]
TIMEOUT = 600.0  # seconds
GRACE = 75.0  # seconds from an interrupt to the end by force; a controller that a row runs has 60 to close
PAUSE = 0.05  # seconds
OUTPUTS = ROOT / "runs" / "benchmarks"


def gpu_here() -> str:
    """The kind of GPU whose results count here; a machine without GPUs shows those of an H200."""
    return next(iter(results.gpus()), H200)


def missing(names: Iterable[str], since: str = "") -> list[str]:
    """Those that this machine can run and has no result of; a quotient follows from its rows."""
    rows = {name: TABLE[name] for name in names}
    return [
        name for name, row in rows.items() if row.command and row.runs_here() and newest(row, gpu_here(), since) is None
    ]


@dataclass(slots=True, kw_only=True)
class _Running:
    """A process that measures rows, in a process group of its own, none of which outlives `end`; it dies with this process, too."""

    rows: list[str]
    places: list[str]  # the GPUs that it has
    child: subprocess.Popen
    start: float  # of time.monotonic
    date: str
    give_up: float = inf  # of time.monotonic; once it was interrupted

    @staticmethod
    def begin(command: Sequence[str], rows: list[str], places: list[str], output: Path | None) -> "_Running":
        """output: of a process beside others; None: this terminal."""
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(places)} if places else None
        start, date = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        where = f" on GPU {', '.join(places)}, output in {output}" if output else ""
        print(f"== {', '.join(rows)}{where}", flush=True)
        if output:
            output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("w") if output else nullcontext() as file:
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT if file else None,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        return _Running(rows=rows, places=places, child=child, start=start, date=date)

    def interrupt(self) -> None:
        self.give_up = min(self.give_up, time.monotonic() + GRACE)
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGINT)

    def has_ended(self) -> bool:
        return self.child.poll() is not None or time.monotonic() > self.give_up

    def end(self) -> list[str]:
        """Kill what is left of it, and return its rows without a result."""
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        status = self.child.wait()
        print(f"\n== {', '.join(self.rows)}: exit status {status}, {time.monotonic() - self.start:.0f} s", flush=True)
        return [row for row in self.rows if status or newest(TABLE[row], gpu_here(), since=self.date) is None]


def measure(
    names: Sequence[str],
    extra: Sequence[str] = (),
    *,
    timeout: float = TIMEOUT,
    until: float = inf,
    side_by_side: bool = False,
) -> list[str]:
    """Run these rows and return those that failed. None is begun after `until` (of time.monotonic)."""
    parts = dict.fromkeys(part for name in names for part in TABLE[name].quotient_of or (name,))
    waiting = {
        command: [name for name in parts if TABLE[name].command == command]
        for command in dict.fromkeys(TABLE[name].command for name in parts)
    }
    free = results.visible(len(results.gpus()))
    running: list[_Running] = []
    failed: list[str] = []
    try:
        while waiting or running:
            for one in list(running):
                if time.monotonic() - one.start > timeout and one.give_up == inf:
                    print(f"{', '.join(one.rows)}: stopped after {timeout:g} s", flush=True)
                    one.interrupt()
                if one.has_ended():
                    failed += one.end()
                    running.remove(one)
                    free += one.places
            if time.monotonic() > until and waiting:
                print(f"not begun: {', '.join(name for rows in waiting.values() for name in rows)}", flush=True)
                waiting = {}
            command, rows = next(iter(waiting.items()), ((), []))
            wanted = max((TABLE[name].num_gpus for name in rows), default=0) if side_by_side else 0
            if rows and (0 < wanted <= len(free) or not running):
                del waiting[command]
                places, free = free[:wanted], free[wanted:]
                output = OUTPUTS / f"{rows[0]}.log" if places else None
                arguments = filter(None, dict.fromkeys(TABLE[name].argument for name in rows))
                running.append(_Running.begin([*PYTHON, *command, *arguments, *extra], rows, places, output))
            else:
                time.sleep(PAUSE)
    finally:
        try:
            for one in running:
                one.interrupt()
            while not all(one.has_ended() for one in running):
                time.sleep(PAUSE)
        finally:  # also after a second interrupt
            for one in running:
                one.end()
    return failed


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(names: Sequence[str], extra: Sequence[str] = (), **options: Any) -> int:
    """`measure` with its options, a line of each row, and the exit status."""
    if elsewhere := [f"{name} needs {TABLE[name].needs}" for name in names if not TABLE[name].runs_here()]:
        here = f"{len(results.gpus())} x {gpu_here()}" if results.gpus() else "no GPU"
        sys.exit(f"{'; '.join(elsewhere)}; here is {here}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = measure(names, extra, **options)
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept, and the same command goes on from there", flush=True)
        return 130
    for name in names:
        print(sentence(name, gpu_here()))
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _date(text: str) -> str:
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC).isoformat(timespec="seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="of these rows alone")
    parser.add_argument("--since", type=_date, help="2026-11-23T08:00 (UTC): older results do not count")
    parser.add_argument("--minutes", type=float, default=inf, help="begin no row after these")
    parser.add_argument("--side-by-side", action="store_true", help="on all GPUs at once; rows may disturb each other")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds that a process may take")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.rows if name not in TABLE]:
        parser.error(f"no row {unknown[0]!r}; there are: {', '.join(TABLE)}")
    names = missing(arguments.rows or TABLE, arguments.since or "")
    if not names:
        print(
            "nothing is missing: this kind of device has a result of every row; --since DATE does not count older ones"
        )
        return
    print(f"missing here: {', '.join(names)}", flush=True)
    until = time.monotonic() + 60 * arguments.minutes
    sys.exit(run(names, timeout=arguments.timeout, until=until, side_by_side=arguments.side_by_side))


if __name__ == "__main__":
    main()
