"""Checks whether files may be unpickled.

Unpickling can run code. So a user who can write a pickle file can run code with the rights of the user who unpickles the file.
"""

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path


def distrust(path: str | Path) -> str:
    """The reason why a file, or any file in a directory, must not be unpickled. Empty if only this user and root can write the files, or
    if `path` does not exist.

    The directory and its subdirectories are checked, too, because a user who can write to a directory could replace its files. The parent
    directories of `path` are not checked.
    """
    for each in _files(Path(path)):
        try:
            status = each.stat()
        except FileNotFoundError:
            continue  # the file has been removed in the meantime
        if status.st_uid not in (os.geteuid(), 0):
            return f"{each} belongs to {_user(status.st_uid)}, who could run code in this program; copy it, so that it belongs to you"
        writers = stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
        if writers & stat.S_IWOTH or (writers and not _is_private(status.st_gid, status.st_uid)):
            mode = oct(stat.S_IMODE(status.st_mode))[2:]
            return f"{each} can be written by others (mode {mode}), who could run code in this program; chmod go-w it"
    return ""


def require_trusted(path: str | Path) -> None:
    """Raises ValueError naming the file that must not be unpickled."""
    reason = distrust(path)
    if reason:
        raise ValueError(reason)


def _files(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir():
        yield from path.rglob("*")


def _is_private(group: int, user: int) -> bool:
    """True if the group is the user's private group: the user's primary group, which has the user's name and lists no other member.

    Many systems create a private group for each user, and by default let this group write the user's files.
    """
    try:
        entry, owner = grp.getgrgid(group), pwd.getpwuid(user)
    except KeyError:
        return False
    return owner.pw_gid == group and entry.gr_name == owner.pw_name and not set(entry.gr_mem) - {owner.pw_name}


def _user(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user {number}"
