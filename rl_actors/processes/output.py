"""Where the words of a process go: fd 1 and 2, logging, warnings. Knows nothing of actors or run folders."""

import atexit
import ctypes
import logging
import os
import sys
import threading
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any


class RoutedOutput(AbstractContextManager):
    """`terminal` writes to the stdout of before; `restore()`, leaving `with`, or the end of the process ends it."""

    def __init__(self, path: Path, tee_prefix: str | None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._originals, self._done, self._tee = (os.dup(1), os.dup(2)), threading.Event(), None
        self.terminal = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace")
        with path.open("ab") as file:
            if tee_prefix is not None:
                self._tee = threading.Thread(target=self._follow, args=(path, file.tell(), tee_prefix), daemon=True)
                self._tee.start()
            _point_output((file.fileno(), file.fileno()))
        atexit.register(self.restore)

    def _follow(self, path: Path, start: int, prefix: str) -> None:
        # Reads the file: a pipe would lose the last words of a crash, and hang native code that fills it under the GIL.
        partial, last = b"", False
        with path.open("rb") as file, suppress(OSError):  # OSError: the terminal is gone, the file goes on
            file.seek(start)
            while not last:
                last = self._done.wait(0.2)
                *lines, partial = (partial + file.read()).split(b"\n")
                lines += [partial] if last and partial else []
                os.write(self._originals[1], b"".join(prefix.encode() + line + b"\n" for line in lines))

    def restore(self, *_) -> None:
        """Point fd 1 and 2 back, then show the last teed lines. A second call does nothing."""
        if not self._done.is_set():
            _point_output(self._originals)
            self._done.set()
            if self._tee is not None:
                self._tee.join(timeout=2)

    __exit__ = restore


def route_process_output(path: str | Path, tee_prefix: str | None = None) -> RoutedOutput:
    """Append all that this process and its later children write to fd 1 and 2, C++ and Rust included, to a file.

    route_process_output("trainer-0.log", tee_prefix="[trainer 0] ") shows each line where fd 2 was, too, within 0.2 s.
    """
    return RoutedOutput(Path(path), tee_prefix)


def route_logs(path: str | Path, *, label: str, verbose: bool = False) -> None:
    """Send the logging and warnings of this process to a file; verbose: also to stderr, `[label]` in front.

    Leave verbose False where `route_process_output` tees the same file.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(path), *([logging.StreamHandler()] if verbose else [])]
    for handler, prefix in zip(handlers, ("", f"[{label}] "), strict=False):
        handler.setFormatter(logging.Formatter(prefix + "%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.captureWarnings(True)
    for logger in logging.root.manager.loggerDict.values():  # libraries with a terminal handler of their own
        if isinstance(logger, logging.Logger) and any(type(h) is logging.StreamHandler for h in logger.handlers):
            logger.handlers, logger.propagate = [], True


def _point_output(targets: tuple[int, int]) -> None:
    streams: list[Any] = [sys.stdout, sys.stderr]
    for stream, fd, target in zip(streams, (1, 2), targets, strict=True):
        with suppress(AttributeError, ValueError, OSError):  # no stream, a closed one, or not a text file
            stream.reconfigure(line_buffering=True)  # flushes; and a killed process leaves its words in the file
        ctypes.CDLL(None).fflush(None)
        os.dup2(target, fd)
