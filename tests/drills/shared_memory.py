"""Finds the segments of shared memory (files in /dev/shm) that a run's processes use, and the segments that are left after the run.

A segment is identified by its inode and not by its name, because /proc/PID/maps may show an old name. For example, a
process maps a new POSIX semaphore while the file still has a temporary name. Then the file gets another name in
/dev/shm, but /proc/PID/maps goes on showing the temporary name.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

FOLDER = "/dev/shm"

Inode = tuple[int, int]
"""Device number and inode number of a file."""


def segments() -> dict[str, Inode]:
    """The segments that have a name in /dev/shm now: {name: inode}."""
    found = {}
    for entry in os.scandir(FOLDER):
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            found[entry.name] = (status.st_dev, status.st_ino)
    return found


def used_by(processes: Iterable[psutil.Process]) -> set[Inode]:
    """The segments that at least one of the processes has mapped or opened.

    Skips processes that have ended, and processes of other users, because their files in /proc cannot be read.
    """
    found: set[Inode] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            found |= _mapped(process.pid)
        with contextlib.suppress(OSError):
            found |= _open(process.pid)
    return found


def _mapped(pid: int) -> set[Inode]:
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if f" {FOLDER}/" in line:  # "7f…-7f… rw-s 00000000 00:1b 2 /dev/shm/name (deleted)"
            device, number = line.split()[3:5]
            major, minor = device.split(":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(number)))
    return found


def _open(pid: int) -> set[Inode]:
    found = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(entry.path).startswith(f"{FOLDER}/"):
                status = os.stat(entry.path)
                found.add((status.st_dev, status.st_ino))
    return found


def left_behind(own: set[Inode]) -> list[str]:
    """The names of the segments in `own` that still exist and that no running process uses."""
    left = {name: inode for name, inode in segments().items() if inode in own}
    if left:
        used = used_by(psutil.process_iter())
        left = {name: inode for name, inode in left.items() if inode not in used}
    return sorted(left)
