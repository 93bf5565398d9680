"""Where the words of a process go: fd 1 and 2, logging, warnings. Knows nothing of actors or run folders."""

import atexit
import ctypes
import functools
import logging
import os
import sys
import tempfile
import threading
import warnings
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG_VARIABLE = "RL_ACTORS_LOG"
"""Environment variable of an actor's process: the file that holds its output and logs."""

LIBRARIES = ("datasets", "monarch", "torch", "torchao", "torchstore", "torchtitan", "transformers", "vllm")
"""Loggers whose lines go to a file in a process that also runs other people's code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRoute:
    """Files for the output and the logs of the processes that a client spawns: `<directory>/<name>-<rank>.log`.

    TrainerClient.spawn(config, logs=LogRoute(directory=Path("logs"), tee=True)) shows each line on the terminal, too.
    Without one, the files are in a new temporary directory; `info().result()[0].logs` says where.
    """

    directory: Path
    tee: bool = False

    def file(self, name: str, rank: int) -> Path:
        return self.directory / f"{name}-{rank}.log"


@functools.cache
def default_log_route() -> LogRoute:
    """Files in a temporary directory that is made once a process. It stays when the process ends: it holds the last words of a crash."""
    return LogRoute(directory=Path(tempfile.mkdtemp(prefix="rl_actors_logs_")))


def route_library_logs(name: str) -> None:
    """In a process that this package did not spawn: send the log lines and warnings of LIBRARIES to a file, and nothing else.

    The process belongs to somebody else, so its fd 1 and 2, its other loggers and its own warnings stay as they are. Does nothing in
    a process whose output has a file already.
    """
    if LOG_VARIABLE in os.environ:
        return
    path = default_log_route().file(f"{name}-pid", os.getpid())
    os.environ[LOG_VARIABLE] = str(path)
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # vLLM would give its logger a terminal handler again
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for library in LIBRARIES:
        logger = logging.getLogger(library)
        logger.handlers, logger.propagate = [handler], False
    show = warnings.showwarning

    def show_or_log(message, category, filename, lineno, file=None, line=None) -> None:
        if "site-packages" in filename and file is None:
            logging.getLogger("torch").warning(warnings.formatwarning(message, category, filename, lineno, line))
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_or_log


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
