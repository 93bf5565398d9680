"""Runs vLLM's engine core (scheduler and model) on the engine's thread, or in a process of its own,
which overlaps with the handling of outputs: faster on a GPU (docs/generator.md).
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
from typing import TYPE_CHECKING

import torch

from rl_actors.config import GeneratorConfig

if TYPE_CHECKING:
    from vllm import LLMEngine

NEWS_TIMEOUT = 1.0
"""Seconds that `has_died` waits for `watch` to notice, because a call may fail first."""
DEATH_TIMEOUT = 10.0
"""Seconds to wait for the exit code of a core that failed a call."""

KILLED_AT_START = r"Failed core proc\(s\): \{(\}|'EngineCore\w*': -\d+)"
"""vLLM's error for a core killed at its start. The braces are empty for an unknown exit code."""

SCHEDULER = "rl_actors.vllm.scheduler.scheduler"
PARENT_VARIABLE = "RL_ACTORS_CORE_PARENT"
"""A process's pid, for those that it starts. Not set when CHILD begins in the core's process."""

# Runs first in the core's process and all that it starts.
# - The kernel ends it with its parent: at their start vLLM's processes would not notice a kill -9.
# - A session of its own, because Ctrl-C would end the core in the middle of a step.
# - Without RANK and the like, which describe the actor's group; vLLM makes its own.
# - set_executable is not inherited, so it is put before the code after "-c".
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


class Core:
    """How vLLM's engine core runs: inside the engine's `step`, on its thread."""

    recovers = True  # a step may follow an error in a step

    def options(self, config: GeneratorConfig) -> dict[str, object]:
        """Arguments of vLLM's engine."""
        return {}

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Around the start of the engine."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        yield

    def watch(self, engine: "LLMEngine", on_death: Callable[[BaseException], None]) -> None:
        """Start a thread that calls `on_death`, naming the process, when one of the core ends."""

    def death(self, error: BaseException) -> BaseException:
        """What to raise after a call failed with `error`: if the core has ended, how."""
        return error

    def has_died(self) -> bool:
        """Whether the core has ended, after an error of it."""
        return False

    def updating(self, engine: "LLMEngine") -> AbstractContextManager[None]:
        """Around an update of the weights. No step runs inside."""
        return contextlib.nullcontext()


class OwnProcess(Core):
    """The core is a child process, with tensor parallelism with a child for each rank."""

    recovers = False

    def options(self, config: GeneratorConfig) -> dict[str, object]:
        several = config.tensor_parallel > 1
        chosen: dict[str, object] = {
            "tensor_parallel_size": config.tensor_parallel,
            "distributed_executor_backend": "mp" if several else "uni",  # one rank: in the core's process
            "scheduler_cls": SCHEDULER,
        }
        if torch.cuda.is_available():
            # by default vLLM would only log that it cannot
            chosen["async_scheduling"] = True
        return chosen

    def __init__(self) -> None:
        self._death: BaseException | None = None
        self._has_died = threading.Event()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        # a fork would copy locks that threads hold
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        # it must outlive the core, which would otherwise start it
        resource_tracker.ensure_running()
        python = os.fsdecode(spawn.get_executable() or sys.executable)
        with tempfile.TemporaryDirectory(prefix="rl_actors_core_") as directory:
            # of the sockets, connected after the start
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
        # Handles, because a pid may be given to another process. remove_shared_names returns pids.
        ranks: dict[int, str] = {}
        for rank, pid in enumerate(engine.collective_rpc("remove_shared_names")):
            if pid != core.pid:
                ranks[os.pidfd_open(pid)] = f"vLLM's worker of rank {rank} (pid {pid})"
        # at exit vLLM would wait for the core
        atexit.register(core.kill)

        def wait() -> None:
            ended = multiprocessing.connection.wait([core.sentinel, *ranks])
            names = [ranks[handle] for handle in ended if handle in ranks]
            core.kill()
            for handle in ranks:
                with contextlib.suppress(ProcessLookupError):
                    # it may wait in a collective for a rank that has ended
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
        # With asynchronous scheduling a step is always under way, and its tokens get the version at
        # its end.
        engine.sleep(level=0, mode="keep")
        try:
            yield
        finally:
            engine.wake_up(["scheduling"])


def _executable(directory: Path, python: str) -> str:
    """Write a program that runs CHILD and then `python`: multiprocessing takes no command."""
    child = directory / "child.py"
    program = directory / "python"
    child.write_text(CHILD.format(parent=os.getpid(), python=python, program=str(program), variable=PARENT_VARIABLE))
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(python)} -S {shlex.quote(str(child))} "$@"\n')
    program.chmod(0o700)
    return str(program)


def a_child_is_stopped() -> bool:
    """True if a descendant is stopped, as by SIGSTOP: nothing else shows it while a core starts."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_STOPPED:
                return True
    return False


def describe(process: BaseProcess) -> str:
    """Such as "vLLM's engine core (pid 123) was killed by signal 9"."""
    # if a thread of vLLM gets the exit code first, it is set only a moment later
    deadline = time.monotonic() + DEATH_TIMEOUT
    while process.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.01)
    code = process.exitcode or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"vLLM's engine core (pid {process.pid}) {how}"


def wake_callers(engine: "LLMEngine", error: BaseException) -> None:
    """Raise in every call to a dead core: vLLM's synchronous client would wait for ever."""
    client = engine.engine_core
    client.resources.engine_dead = True  # for new calls
    for future in list(client.utility_results.values()):
        if not future.done():
            future.set_exception(error)
    client.outputs_queue.put(error)


def core_of(config: GeneratorConfig) -> Core:
    """By config.own_process. None: a process of its own on a GPU or with tensor parallelism."""
    own = config.own_process
    if own is None:
        own = torch.cuda.is_available() or config.tensor_parallel > 1
    return OwnProcess() if own else Core()
