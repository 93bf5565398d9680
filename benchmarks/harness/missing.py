"""`make bench ROW=missing` runs the missing rows of the table of benchmarks (register.py).

A row is missing if this machine can run it and it has no result from this kind of device. Rows with the same command run
together in one process. These processes run one after another. A result is written as soon as its row is done. After an
interrupt `make bench ROW=missing` therefore continues without repeating finished rows. If a process fails, the other
processes still run. If rows failed, the command prints their names at the end, and exits with status 1.
"""

import argparse
import ctypes
import itertools
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
# An interrupted process is killed if it still runs after this number of seconds. GRACE is longer than 60 s,
# because some benchmarks give a run 60 s to close.
GRACE = 75.0
PR_SET_PDEATHSIG = 1  # option of prctl(2); it chooses the signal that a process gets when its parent ends


def gpu_here() -> str:
    """Name of this machine's GPU. If the machine has no GPU, this is the name of an H200, so the results of H200s are shown."""
    names = results.gpus()
    return names[0] if names else H200


def missing(names: Iterable[str], since: str = "") -> list[str]:
    """The names of the missing rows: this machine can run them, and they have no result from this kind of device.

    since: older results do not count. If it is "", results of any date count.

    Some rows are the quotient of two other rows. Such a row is never missing, because it is computed from the results of the two rows.
    """
    found = []
    for name in names:
        row = TABLE[name]
        if row.command and row.runs_here() and newest(row, gpu_here(), since) is None:
            found.append(name)
    return found


def measure(
    names: Sequence[str], extra: Sequence[str] = (), *, timeout: float = TIMEOUT, until: float = inf
) -> list[str]:
    """Run these rows, and return the names of the rows that failed.

    One process runs all rows with the same command. timeout: seconds after which a process is stopped. until: a value of
    time.monotonic() after which no process begins. extra: further arguments for every process.
    """
    waiting = _rows_by_command(names)
    failed: list[str] = []
    for command in list(waiting):
        if time.monotonic() > until:
            break
        failed += _measure_together(waiting.pop(command), extra, timeout)
    if waiting:
        not_begun = itertools.chain.from_iterable(waiting.values())
        print(f"not begun: {', '.join(not_begun)}", flush=True)
    return failed


def _rows_by_command(names: Sequence[str]) -> dict[tuple[str, ...], list[str]]:
    """Rows grouped by their command, because one process measures all rows of a command. A row that is a quotient is replaced by its two rows.

    Returns {command: [names of rows]}.
    """
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        for part in TABLE[name].quotient_of or (name,):
            same_command = rows.setdefault(TABLE[part].command, [])
            if part not in same_command:
                same_command.append(part)
    return rows


def _measure_together(rows: Sequence[str], extra: Sequence[str], timeout: float) -> list[str]:
    """Measure the rows of one command in a new process group, and return the names of the rows that failed.

    The leader of the group runs the command. If its exit status is not 0, all rows count as failed. Otherwise the rows without a new result
    count as failed.

    No process of the group outlives this call. But if this program is killed during the call, the kernel kills only the leader.
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
    """End a process group and return the exit status of its leader.

    child: the leader of the group. If the leader still runs, the group gets SIGINT, and the leader has GRACE seconds to end. An interrupt of
    this program cuts the wait for the leader short. At last all remaining processes of the group are killed.
    """
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
    """Measure these rows, print a line for each, and return the exit status for this program: 0, 1 if a row failed, or
    130 after an interrupt. Exits at once if the machine cannot run one of the rows.
    """
    refused = [f"{name} needs {TABLE[name].needs}" for name in names if not TABLE[name].runs_here()]
    if refused:
        here = f"{len(results.gpus())} x {gpu_here()}" if results.gpus() else "no GPU"
        sys.exit(f"{'; '.join(refused)}; this machine has {here}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = measure(names, extra, timeout=timeout, until=until)
    except KeyboardInterrupt:
        print(
            "interrupted; finished rows keep their results, and `make bench ROW=missing` runs the rows that are still missing",
            flush=True,
        )
        return 130
    for name in names:
        print(sentence(name, gpu_here()))
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _date(text: str) -> str:
    """The date and time in `text`, converted to UTC and to the format of a result's date. A time without a zone is taken as UTC."""
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC).isoformat(timespec="seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="a row to run if it is missing (default: all rows)")
    parser.add_argument(
        "--since", type=_date, help="ignore results before this date and time, such as 2026-11-23T08:00 in UTC"
    )
    parser.add_argument("--minutes", type=float, default=inf, help="begin no process after this many minutes")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="stop a process after this many seconds")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.rows if name not in TABLE]
    if unknown:
        parser.error(f"no row {unknown[0]!r}; there are: {', '.join(TABLE)}")
    names = missing(arguments.rows or TABLE, arguments.since or "")
    if not names:
        print("nothing is missing: every row that runs here has a result from this kind of device")
        print("--since DATE also measures the rows whose results are all older than DATE")
        return
    print(f"missing here: {', '.join(names)}", flush=True)
    until = time.monotonic() + 60 * arguments.minutes
    sys.exit(run(names, timeout=arguments.timeout, until=until))


if __name__ == "__main__":
    main()
