"""Sends a process's output (fd 1 and 2, log lines, warnings) to files. Imports no other module."""

import atexit
import ctypes
import functools
import logging
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG_VARIABLE = "RL_ACTORS_LOG"
"""Path of an actor process's log file."""

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"

LIBRARIES = ("datasets", "monarch", "torch", "torchao", "torchstore", "torchtitan", "transformers", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRoute:
    """Spawned processes log to `<directory>/<name>-<rank>.log`. tee: also on the terminal.

    Example: TrainerClient.spawn(config, logs=LogRoute(directory=Path("logs"), tee=True)).
    """

    directory: Path
    tee: bool = False

    def file(self, name: str, rank: int) -> Path:
        return self.directory / f"{name}-{rank}.log"

    def of_client(self) -> Path:
        """The file for the program that spawns the processes."""
        return self.directory / "client.log"


@functools.cache
def default_log_route() -> LogRoute:
    """A temporary directory per process, not deleted, because it may have the output of a crash."""
    return LogRoute(directory=Path(tempfile.mkdtemp(prefix="rl_actors_logs_")))


def route_library_logs(name: str) -> None:
    """In a process of another program, send only the log lines of LIBRARIES and the warnings of
    site-packages to a file, and set LOG_VARIABLE to its path. Does nothing if it is set.
    """
    if LOG_VARIABLE in os.environ:
        return
    path = default_log_route().file(f"{name}-pid", os.getpid())
    os.environ[LOG_VARIABLE] = str(path)
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # otherwise vLLM logs to the terminal
    handler = _file_handler(path)
    for library in LIBRARIES:
        logger = logging.getLogger(library)
        logger.handlers = [handler]
        logger.propagate = False
    show = warnings.showwarning

    def show_or_log(message, category, filename, lineno, file=None, line=None) -> None:
        if "site-packages" in filename and file is None:
            logging.getLogger("torch").warning(warnings.formatwarning(message, category, filename, lineno, line))
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_or_log


@functools.cache
def route_client_logs(path: Path) -> None:
    """Send the log lines of this package and of LIBRARIES to a file, in a program that has not
    configured logging, such as a REPL: Python would print their warnings to the terminal.
    """
    if logging.root.handlers:
        return
    handler = _file_handler(path)
    for name in ("rl_actors", *LIBRARIES):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False


def _file_handler(path: Path) -> logging.Handler:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(LINE))
    return handler


@contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Append what this process writes to fd 2, also from C++ and Rust, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    original = os.dup(2)
    sys.stderr.flush()
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original, 2)
        os.close(original)


class RoutedOutput(AbstractContextManager):
    """Redirects fd 1 and 2 of this process and its later children to a file, also from C++ and
    Rust, until `restore()` or the end. `terminal`: a text stream to the original fd 1.
    """

    def __init__(self, path: str | Path, tee_prefix: str | None = None) -> None:
        """tee_prefix: such as "[trainer 0] "; each line also appears with it on the original fd 2."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._originals = (os.dup(1), os.dup(2))
        self._done = threading.Event()
        self._tee: threading.Thread | None = None
        self.terminal = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace")
        with path.open("ab") as file:
            if tee_prefix is not None:
                self._tee = threading.Thread(target=self._follow, args=(path, file.tell(), tee_prefix), daemon=True)
                self._tee.start()
            _point_output((file.fileno(), file.fileno()))
        atexit.register(self.restore)

    def _follow(self, path: Path, start: int, prefix: str) -> None:
        """Copy new lines of the file to the terminal until the redirection ends.

        No pipe: it loses the last output before a crash, and hangs native code once it is full.
        """
        partial = b""
        is_last = False
        # OSError: the terminal is gone; the file still gets all output
        with path.open("rb") as file, suppress(OSError):
            file.seek(start)
            while not is_last:
                is_last = self._done.wait(0.2)
                *lines, partial = (partial + file.read()).split(b"\n")
                if is_last and partial:
                    lines.append(partial)
                os.write(self._originals[1], b"".join(prefix.encode() + line + b"\n" for line in lines))

    def restore(self, *_) -> None:
        """End the redirection and show the last lines. A second call does nothing."""
        if not self._done.is_set():
            _point_output(self._originals)
            self._done.set()
            if self._tee is not None:
                self._tee.join(timeout=2)

    __exit__ = restore


def route_logs(path: str | Path, *, label: str, verbose: bool = False) -> None:
    """verbose: also to stderr, as `[label] line`; not together with a tee of the same file."""
    handlers = [_file_handler(Path(path))]
    if verbose:
        on_terminal = logging.StreamHandler()
        on_terminal.setFormatter(logging.Formatter(f"[{label}] {LINE}"))
        handlers.append(on_terminal)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.captureWarnings(True)
    # libraries that log to the terminal now log to the handlers above
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and any(type(h) is logging.StreamHandler for h in logger.handlers):
            logger.handlers = []
            logger.propagate = True


def _point_output(targets: tuple[int, int]) -> None:
    streams: list[Any] = [sys.stdout, sys.stderr]
    for stream, fd, target in zip(streams, (1, 2), targets, strict=True):
        with suppress(AttributeError, ValueError, OSError):  # the stream is None, closed or not text
            # flushes, and keeps the last lines of a killed process
            stream.reconfigure(line_buffering=True)
        ctypes.CDLL(None).fflush(None)
        os.dup2(target, fd)
