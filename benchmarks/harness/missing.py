"""Run the rows of the table that this machine can run and that have no result yet, one after another, each in a process of its own.

`make bench ROW=missing`. A result is kept as soon as its row is done. If the command is interrupted, give it again: finished rows are not run again.
A row that fails does not stop the others: it is named at the end, and the exit status is 1. Only results from the same kind of device count.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from benchmarks.harness import results
from benchmarks.harness.register import TABLE
from benchmarks.harness.table import H200, newest, sentence

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-m", "benchmarks"]
TIMEOUT = 600.0  # seconds
GRACE = 75.0  # seconds between an interrupt and the kill; a controller that a row runs has 60 to close
PR_SET_PDEATHSIG = 1


def gpu_here() -> str:
    """The kind of GPU whose results count here. A machine without a GPU shows the results of an H200."""
    names = results.gpus()
    return names[0] if names else H200


def missing(names: Iterable[str], since: str = "") -> list[str]:
    """The rows that this machine can run and that have no result. A quotient is never missing: it follows from its rows."""
    found = []
    for name in names:
        row = TABLE[name]
        if row.command and row.runs_here() and newest(row, gpu_here(), since) is None:
            found.append(name)
    return found


def measure(
    names: Sequence[str], extra: Sequence[str] = (), *, timeout: float = TIMEOUT, until: float = inf
) -> list[str]:
    """Run these rows and return the ones that failed. No row begins after `until`, in seconds of time.monotonic."""
    waiting = _rows_by_command(names)
    failed: list[str] = []
    for command in list(waiting):
        if time.monotonic() > until:
            break
        failed += _measure_together(waiting.pop(command), extra, timeout)
    if waiting:
        print(f"not begun: {', '.join(name for rows in waiting.values() for name in rows)}", flush=True)
    return failed


def _rows_by_command(names: Sequence[str]) -> dict[tuple[str, ...], list[str]]:
    """Rows with the same command are measured by one process. A quotient is replaced by its two rows."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        for part in TABLE[name].quotient_of or (name,):
            same_command = rows.setdefault(TABLE[part].command, [])
            if part not in same_command:
                same_command.append(part)
    return rows


def _measure_together(rows: Sequence[str], extra: Sequence[str], timeout: float) -> list[str]:
    """Measure rows of one command in a process group of its own, and return the rows without a result.

    No process of the group outlives this call, nor this process if it is killed.
    """
    arguments = [TABLE[name].argument for name in rows if TABLE[name].argument]
    command = [*PYTHON, *TABLE[rows[0]].command, *dict.fromkeys(arguments), *extra]
    start, date = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    print(f"== {', '.join(rows)}", flush=True)
    child = subprocess.Popen(command, cwd=ROOT, start_new_session=True, preexec_fn=_die_with_parent)
    try:
        child.wait(timeout)
    except subprocess.TimeoutExpired:
        print(f"{', '.join(rows)}: stopped after {timeout:g} s", flush=True)
    finally:
        status = _end(child)
        print(f"\n== {', '.join(rows)}: exit status {status}, {time.monotonic() - start:.0f} s", flush=True)
    if status:
        return list(rows)
    return [name for name in rows if newest(TABLE[name], gpu_here(), since=date) is None]


def _end(child: subprocess.Popen) -> int:
    """Interrupt a process that still runs, and kill what is left of its group after GRACE or at a second interrupt."""
    try:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGINT)
            child.wait(GRACE)
    except (subprocess.TimeoutExpired, ProcessLookupError):
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        status = child.wait()
    return status


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run(names: Sequence[str], extra: Sequence[str] = (), *, timeout: float = TIMEOUT, until: float = inf) -> int:
    """Measure these rows, print a line for each, and return the exit status. Exits if this machine cannot run one of them."""
    elsewhere = [f"{name} needs {TABLE[name].needs}" for name in names if not TABLE[name].runs_here()]
    if elsewhere:
        here = f"{len(results.gpus())} x {gpu_here()}" if results.gpus() else "no GPU"
        sys.exit(f"{'; '.join(elsewhere)}; here is {here}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = measure(names, extra, timeout=timeout, until=until)
    except KeyboardInterrupt:
        print("interrupted; the results so far are kept, and the same command continues from there", flush=True)
        return 130
    for name in names:
        print(sentence(name, gpu_here()))
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _date(text: str) -> str:
    """The same moment in UTC, in the format of a line's date. A time without a zone is UTC."""
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC).isoformat(timespec="seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="run only these rows, in this order")
    parser.add_argument("--since", type=_date, help="2026-11-23T08:00 (UTC): results before this moment do not count")
    parser.add_argument("--minutes", type=float, default=inf, help="begin no row after this many minutes")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds that one process may take")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.rows if name not in TABLE]
    if unknown:
        parser.error(f"no row {unknown[0]!r}; there are: {', '.join(TABLE)}")
    names = missing(arguments.rows or TABLE, arguments.since or "")
    if not names:
        print("nothing is missing: every row that runs here has a result from this kind of device")
        print("--since DATE ignores older results")
        return
    print(f"missing here: {', '.join(names)}", flush=True)
    until = time.monotonic() + 60 * arguments.minutes
    sys.exit(run(names, timeout=arguments.timeout, until=until))


if __name__ == "__main__":
    main()
