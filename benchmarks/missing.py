"""Run the rows of the table that this machine can run and has no result of yet, one after another, each in a process of its own.

`make bench ROW=missing`. A result is kept as it comes, so a table that was broken off goes on where it stopped: give the same command again.
A row that fails does not end the table: it is named at the end, and the exit status is 1. Only results from the same kind of device count.
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

from benchmarks import results
from benchmarks.register import TABLE
from benchmarks.table import H200, newest, sentence

ROOT = Path(__file__).parents[1]
PYTHON = [sys.executable, "-m", "benchmarks"]
TIMEOUT = 600.0  # seconds
GRACE = 15.0  # seconds from an interrupt to the end by force


def gpu_here() -> str:
    """The kind of GPU whose results count here; a machine without GPUs shows those of an H200."""
    return next(iter(results.gpus()), H200)


def missing(names: Iterable[str], since: str = "") -> list[str]:
    """Those that this machine can run and has no result of; a quotient follows from its rows."""
    rows = {name: TABLE[name] for name in names}
    return [
        name for name, row in rows.items() if row.command and row.runs_here() and newest(row, gpu_here(), since) is None
    ]


def measure(
    names: Sequence[str], extra: Sequence[str] = (), *, timeout: float = TIMEOUT, until: float = inf
) -> list[str]:
    """Run these rows and return those that failed. None is begun after `until` (of time.monotonic)."""
    failed = []
    parts = [part for name in names for part in TABLE[name].quotient_of or (name,)]
    for command in dict.fromkeys(TABLE[name].command for name in parts):
        rows = [name for name in dict.fromkeys(parts) if TABLE[name].command == command]
        if time.monotonic() > until:
            print(f"not begun: {', '.join(rows)}", flush=True)
            continue
        arguments = dict.fromkeys(TABLE[name].argument for name in rows)
        began, start = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
        print(f"== {', '.join(rows)}", flush=True)
        status = _run([*PYTHON, *command, *filter(None, arguments), *extra], timeout)
        print(f"\n== {', '.join(rows)}: exit status {status}, {time.monotonic() - start:.0f} s", flush=True)
        failed += [name for name in rows if status or newest(TABLE[name], gpu_here(), since=began) is None]
    return failed


def _run(command: Sequence[str], timeout: float) -> int:
    """In a process group of its own, none of which outlives it; it dies with this process, too."""
    child = subprocess.Popen(command, cwd=ROOT, start_new_session=True, preexec_fn=_die_with_parent)
    try:
        return child.wait(timeout)
    except subprocess.TimeoutExpired:
        print(f"stopped after {timeout:g} s", flush=True)
        return 124
    finally:
        with suppress(ProcessLookupError):
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(GRACE)
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(names: Sequence[str], extra: Sequence[str] = (), *, timeout: float = TIMEOUT, until: float = inf) -> int:
    """`measure`, a line of each row, and the exit status."""
    if elsewhere := [f"{name} needs {TABLE[name].needs}" for name in names if not TABLE[name].runs_here()]:
        here = f"{len(results.gpus())} x {gpu_here()}" if results.gpus() else "no GPU"
        sys.exit(f"{'; '.join(elsewhere)}; here is {here}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = measure(names, extra, timeout=timeout, until=until)
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
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds that a process may take")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.rows if name not in TABLE]:
        parser.error(f"no row {unknown[0]!r}; there are: {', '.join(TABLE)}")
    names = missing(arguments.rows or TABLE, arguments.since or "")
    if not names:
        print("nothing is missing here")
        return
    print(f"missing here: {', '.join(names)}", flush=True)
    until = time.monotonic() + 60 * arguments.minutes
    sys.exit(run(names, timeout=arguments.timeout, until=until))


if __name__ == "__main__":
    main()
