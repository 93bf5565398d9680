"""Checks whether files may be unpickled: whoever can write a pickle can run code as the user who
unpickles it.
"""

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path


def distrust(path: str | Path) -> str:
    """Why a file, or any file or folder in a directory, must not be unpickled.

    "" if only this user and root can write them, or `path` does not exist. Parent directories are
    not checked.
    """
    for each in _files(Path(path)):
        try:
            status = each.stat()
        except FileNotFoundError:
            continue  # removed meanwhile
        if status.st_uid not in (os.geteuid(), 0):
            return f"{each} belongs to {_user(status.st_uid)}, who could run code in this program; copy it, so that it belongs to you"
        writers = stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
        if writers & stat.S_IWOTH or (writers and not _is_private(status.st_gid, status.st_uid)):
            mode = oct(stat.S_IMODE(status.st_mode))[2:]
            return f"{each} can be written by others (mode {mode}), who could run code in this program; chmod go-w it"
    return ""


def require_trusted(path: str | Path) -> None:
    reason = distrust(path)
    if reason:
        raise ValueError(reason)


def _files(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir():
        yield from path.rglob("*")


def _is_private(group: int, user: int) -> bool:
    """True if the group is the user's primary, has the user's name and no other member.

    Many systems make one for each user and let it write the user's files by default.
    """
    try:
        entry = grp.getgrgid(group)
        owner = pwd.getpwuid(user)
    except KeyError:
        return False
    return owner.pw_gid == group and entry.gr_name == owner.pw_name and not set(entry.gr_mem) - {owner.pw_name}


def _user(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user {number}"
