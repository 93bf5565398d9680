"""`make bench ROW=missing` runs the missing rows of the table of benchmarks (register.py).

A row is missing if this machine can run it and it has no result from this kind of device. Rows with the same command run
together in one process. These processes run one after another. A result is written as soon as its row is done. After an
interrupt `make bench ROW=missing` therefore continues without repeating finished rows. If a process fails, the other
processes still run. At the end the failed rows are named, and the exit status is 1.
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
# Seconds between the interrupt of a process and its kill. GRACE is longer than 60 s, because a row gives its controller 60 s to close.
GRACE = 75.0
PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent ends


def gpu_here() -> str:
    """Name of this machine's GPU. If the machine has no GPU, this is the name of an H200, so the results of H200s are shown."""
    names = results.gpus()
    return names[0] if names else H200


def missing(names: Iterable[str], since: str = "") -> list[str]:
    """Names of the rows that this machine can run and that have no result of the date `since` or later. since: "" for any date.

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
    """Run these rows, and return the names of the rows that failed. No row begins after `until`, a value of time.monotonic()."""
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
    """Rows grouped by their command, because one process measures all rows of a command. A quotient is replaced by its two rows.

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

    If the leader of the group fails, the failed rows are all rows of the command. Otherwise the failed rows are the rows without a result.

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
    this program cuts the wait for the leader short. At last all processes of the group that remain are killed.
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
    """Measure these rows, print a line for each, and return the exit status. Exits this program if the machine cannot
    run one of the rows.
    """
    refused = [f"{name} needs {TABLE[name].needs}" for name in names if not TABLE[name].runs_here()]
    if refused:
        here = f"{len(results.gpus())} x {gpu_here()}" if results.gpus() else "no GPU"
        sys.exit(f"{'; '.join(refused)}; here is {here}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = measure(names, extra, timeout=timeout, until=until)
    except KeyboardInterrupt:
        print("interrupted; finished rows are kept, and `make bench ROW=missing` continues from there", flush=True)
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
    parser.add_argument("rows", nargs="*", metavar="ROW", help="run only these rows, in this order")
    parser.add_argument(
        "--since", type=_date, help="date and time, such as 2026-11-23T08:00 in UTC; ignore older results"
    )
    parser.add_argument("--minutes", type=float, default=inf, help="begin no row after this many minutes")
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
