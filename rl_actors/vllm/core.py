"""Runs vLLM's engine core on the thread that calls the engine, or in a process of its own. The core is the part of vLLM that schedules
requests and runs the model. This module handles neither requests nor weights.

A core in its own process schedules and computes while the generator actor's process handles the outputs. On a GPU this is faster; see docs/generator.md.
On a CPU this is not faster, because the two processes share the processors. On a CPU a start also takes 10 s longer.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing import resource_tracker, spawn
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from rl_actors.config import GeneratorConfig

if TYPE_CHECKING:
    from vllm import LLMEngine

NEWS_TIMEOUT = 1.0
"""Largest number of seconds that `has_died` waits for the thread of `watch` to notice the end of the core. A call to the core may fail before
the thread notices the end."""
DEATH_TIMEOUT = 10.0
"""Largest number of seconds to wait for the core's end after a call to the core has failed. The exit code, which the error names, is known only
after this end."""

KILLED_AT_START = r"Failed core proc\(s\): \{(\}|'EngineCore\w*': -\d+)"
"""Pattern of vLLM's error for a core that was killed before it was ready. If vLLM does not know the exit code yet, nothing is
between the braces."""

SCHEDULER = "rl_actors.vllm.clean_blocks.scheduler"
"""Makes vLLM's scheduler; see clean_blocks.py."""

PARENT_VARIABLE = "RL_ACTORS_CORE_PARENT"
"""Environment variable with which a process tells its pid to the processes that it starts. The core sets the variable, and so does every process
that the core starts, directly or through another process. If the variable is not set when the program CHILD (see below)
begins, CHILD is in the core's process."""

# A program that runs first in the core's process and in each process that the core starts.
# - vLLM's core and its workers do not notice if their parent is killed with kill -9 while they start. So the program makes the kernel end the
#   process when its parent ends.
# - Ctrl-C in a terminal would end the core in the middle of a step. So the program begins a session, to which the terminal sends no Ctrl-C.
# - Environment variables such as RANK describe the actor's process group of torch.distributed. vLLM makes a group of its own, so the program
#   removes these variables in the core's process.
# - A new process does not inherit the executable that its parent has set with multiprocessing.set_executable. So the program puts a call of
#   set_executable before the code that the process is to run. The code is the argument after "-c".
CHILD = """
import ctypes, os, signal, sys
os.setsid()
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
is_core = {variable!r} not in os.environ
if os.getppid() != int(os.environ.get({variable!r}, {parent})):
    sys.exit("the process that started this one has ended")
if is_core:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
os.environ[{variable!r}] = str(os.getpid())
arguments = sys.argv[1:]
code = arguments.index("-c") + 1
arguments[code] = "import multiprocessing; multiprocessing.set_executable(" + repr({program!r}) + "); " + arguments[code]
os.execv({python!r}, [{python!r}, *arguments])
"""


class EngineDiedError(RuntimeError):
    """vLLM's engine has failed for good. The generator must be spawned again."""


class Core(Protocol):
    """Protocol of InProcess and OwnProcess, which are the two ways to run vLLM's engine core."""

    recovers: bool  # True if the core can run the next step after an error in a step

    def options(self, config: GeneratorConfig) -> dict[str, object]:
        """Arguments of vLLM's engine that this way of running the core needs."""

    def starting(self) -> AbstractContextManager[None]:
        """Context manager. The engine must be started inside it."""

    def watch(self, engine: "LLMEngine", on_death: Callable[[BaseException], None]) -> None:
        """Start a thread that waits until a process of the core ends. The thread then calls `on_death` with an error that names the process."""

    def death(self, error: BaseException) -> BaseException:
        """The error to raise after a call to the core has failed with `error`. If the core has ended, the returned error says how it ended."""

    def has_died(self) -> bool:
        """True if the core has ended. Call it after an error of the core."""

    def updating(self, engine: "LLMEngine") -> AbstractContextManager[None]:
        """Context manager for an update of the weights. No step runs inside the context."""


def core_of(config: GeneratorConfig) -> Core:
    """The core that config.own_process selects. If own_process is None, the core has its own process on a GPU or with tensor parallelism.
    Otherwise the core runs on the engine's thread.
    """
    own = config.own_process
    if own is None:
        own = torch.cuda.is_available() or config.tensor_parallel > 1
    return OwnProcess() if own else InProcess()


class InProcess:
    """The core computes inside the method `step` of the engine, on the thread that calls `step`."""

    recovers = True

    def options(self, config: GeneratorConfig) -> dict[str, object]:
        return {}

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        yield

    def watch(self, engine: "LLMEngine", on_death: Callable[[BaseException], None]) -> None:
        """Does nothing: the core ends with this process."""

    def death(self, error: BaseException) -> BaseException:
        return error

    def has_died(self) -> bool:
        return False  # the core would end with this process

    def updating(self, engine: "LLMEngine") -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class OwnProcess:
    """The core computes in a child process, which vLLM starts. With tensor parallelism the child starts a further process for each rank."""

    recovers = False

    def options(self, config: GeneratorConfig) -> dict[str, object]:
        several = config.tensor_parallel > 1
        chosen: dict[str, object] = {
            "tensor_parallel_size": config.tensor_parallel,
            "distributed_executor_backend": "mp" if several else "uni",  # one rank computes in the core's process
            "scheduler_cls": SCHEDULER,
        }
        if torch.cuda.is_available():
            # With True, vLLM raises an error if it cannot schedule asynchronously. By default it would only log this.
            chosen["async_scheduling"] = True
        return chosen

    def __init__(self) -> None:
        self._death: BaseException | None = None
        self._has_died = threading.Event()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        # "spawn", because a fork would copy locks that threads of this process hold.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        # multiprocessing's resource tracker must outlive the core. If the tracker did not run already, the core would start it, and the tracker
        # would end with the core.
        resource_tracker.ensure_running()
        python = os.fsdecode(spawn.get_executable() or sys.executable)
        with tempfile.TemporaryDirectory(prefix="rl_actors_core_") as directory:
            # The folder of the sockets to the core. After the start the sockets are connected, so the folder can be deleted.
            os.environ["VLLM_RPC_BASE_PATH"] = directory
            multiprocessing.set_executable(_executable(Path(directory), python))
            try:
                yield
            except RuntimeError as error:
                if re.search(KILLED_AT_START, str(error)):
                    raise EngineDiedError(f"vLLM's engine core ended at its start: {error}") from error
                raise
            finally:
                multiprocessing.set_executable(python)
                del os.environ["VLLM_RPC_BASE_PATH"]

    def watch(self, engine: "LLMEngine", on_death: Callable[[BaseException], None]) -> None:
        [core] = engine.engine_core.resources.engine_manager.processes
        # Handles of the ranks' processes. Unlike a pid, which the system may later give to another process, a handle stays with its process.
        # remove_shared_names returns the pid of each rank's process.
        ranks: dict[int, str] = {}
        for rank, pid in enumerate(engine.collective_rpc("remove_shared_names")):
            if pid != core.pid:
                ranks[os.pidfd_open(pid)] = f"vLLM's worker of rank {rank} (pid {pid})"
        # At the end of this process vLLM would wait until the core ends. So this process kills the core first.
        atexit.register(core.kill)

        def wait() -> None:
            ended = multiprocessing.connection.wait([core.sentinel, *ranks])
            names = [ranks[handle] for handle in ended if handle in ranks]
            core.kill()
            for handle in ranks:
                with contextlib.suppress(ProcessLookupError):
                    # The rank may wait in a collective for a rank that has ended. Without this signal it would wait for ever.
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            how = f"{names[0]} ended" if names and core.sentinel not in ended else describe(core)
            self._death = RuntimeError(how)
            self._has_died.set()
            wake_callers(engine, self._death)
            on_death(self._death)

        threading.Thread(target=wait, name="vllm core watch", daemon=True).start()

    def death(self, error: BaseException) -> BaseException:
        self._has_died.wait(DEATH_TIMEOUT)
        return self._death or error

    def has_died(self) -> bool:
        return self._has_died.wait(NEWS_TIMEOUT)

    @contextlib.contextmanager
    def updating(self, engine: "LLMEngine") -> Iterator[None]:
        # Under asynchronous scheduling a step is under way whenever requests run. The tokens of the step get the version that the core has
        # when the step ends. So the core must be idle before the version changes.
        engine.sleep(level=0, mode="keep")
        try:
            yield
        finally:
            engine.wake_up(["scheduling"])


def _executable(directory: Path, python: str) -> str:
    """Write a program that runs CHILD and then becomes `python`. Returns its path, because multiprocessing takes a path, not a command."""
    child = directory / "child.py"
    program = directory / "python"
    child.write_text(CHILD.format(parent=os.getpid(), python=python, program=str(program), variable=PARENT_VARIABLE))
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(python)} -S {shlex.quote(str(child))} "$@"\n')
    program.chmod(0o700)
    return str(program)


def a_child_is_stopped() -> bool:
    """True if a child of this process, or a child of a child, is stopped, as after a SIGSTOP.

    While a core starts, nothing else shows that the core makes no progress.
    """
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_STOPPED:
                return True
    return False


def describe(process: BaseProcess) -> str:
    """A text that says how the core's process ended: "vLLM's engine core (pid 123) was killed by signal 9"."""
    # A thread of vLLM also waits for the process. If that thread gets the exit code first, `exitcode` is set only a moment after the end.
    deadline = time.monotonic() + DEATH_TIMEOUT
    while process.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.01)
    code = process.exitcode or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"vLLM's engine core (pid {process.pid}) {how}"


def wake_callers(engine: "LLMEngine", error: BaseException) -> None:
    """Make every call to a dead core raise an error. Without this, vLLM's synchronous client would wait for ever for the answer."""
    client = engine.engine_core
    client.resources.engine_dead = True  # from now on every new call raises
    for future in list(client.utility_results.values()):
        if not future.done():
            future.set_exception(error)
    client.outputs_queue.put(error)
