"""Spawns the processes of actors, with their rendezvous and their logs.

The first spawn, not the import, sets up Monarch in this process. Spawned processes end within
seconds of this one, even after kill -9. On other hosts a worker (hosts.py) starts and ends them.
"""

import asyncio
import contextlib
import ctypes
import functools
import logging
import os
import select
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import monarch.actor
import setproctitle
from monarch.actor import (
    Actor,
    Endpoint,
    MeshFailure,
    Point,
    ProcMesh,
    context,
    default_bootstrap_cmd,
    endpoint,
    this_host,
    this_proc,
)
from torch.distributed import TCPStore

from rl_actors.processes import collector, kernel_caches, threads
from rl_actors.processes.address import lead_gloo_to
from rl_actors.processes.output import LOG_VARIABLE, LogRoute, RoutedOutput, default_log_route, route_logs, stderr_to
from rl_actors.processes.races import awaited

if TYPE_CHECKING:
    from rl_actors.processes.hosts import Hosts

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
LONGEST_CHECK_PAUSE = 5.0  # longest pause in seconds between two checks that the processes of an actor answer
START_TIMEOUT = 120.0  # seconds in which spawned processes must answer
STOP_TIMEOUT = 20.0  # seconds within which Monarch must stop the processes; those that still run are then killed
logger = logging.getLogger(__name__)

# Monarch notices a dead process in about one second instead of nine. Its time limits for answers
# stay: shorter ones took a process that imported vLLM on an overloaded machine for dead.
_SUPERVISION = {"HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s"}

BOOTSTRAP = """
import atexit, gc, os, runpy, sys

gc.disable()
del sys.argv[:2]
status = 1


def end():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


atexit.register(end)
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    status = 0
except SystemExit as error:
    status = error.code if isinstance(error.code, int) else int(error.code is not None)
    raise
"""
"""Code for `python -c CODE -m MODULE`: as `python -m MODULE`, but starts and ends faster.

No garbage collection until `collector.keep`. `end` skips the deletion of the objects of torch and
vLLM, one to two seconds of CPU time. Exit handlers run in reverse order, so `end` runs last.
"""


class Probe(Actor):
    """Answers beside the main actor of each process, even while that runs a call."""

    @endpoint
    async def who(self) -> tuple[int, int]:
        """(rank, pid) of this process."""
        return int(os.environ["RANK"]), os.getpid()

    @endpoint
    async def read(self, path: str) -> tuple[int, str, str]:
        """(rank, name of the host, text of a file or "")."""
        text = ""
        with contextlib.suppress(OSError, ValueError):
            text = Path(path).read_text()
        return int(os.environ["RANK"]), socket.gethostname(), text


async def probe_here() -> Probe:
    probe = this_proc().spawn(f"probe_{uuid.uuid4().hex[:12]}", Probe)
    await probe.initialized
    return probe


@dataclass(frozen=True, slots=True)
class Process:
    """A spawned process."""

    rank: int
    pid: int
    # From pidfd_open, because a pid may be reused; None on another host.
    handle: int | None = field(repr=False)

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    def has_ended(self) -> bool:
        """Always False on another host, where calls fail as soon as Monarch has noticed the end."""
        if self.handle is None:
            return False
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        """End the process at once; on another host Monarch's worker does it."""
        if self.handle is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)


@dataclass(slots=True, kw_only=True)
class ProcessMesh:
    mesh: ProcMesh
    # a mesh of one per process; Monarch types a mesh as its actor
    probe: Probe
    processes: list[Process]
    rendezvous: TCPStore = field(repr=False)  # keeps the ranks' store alive

    async def wait_any_exit(self) -> Process:
        """Wait until a process of this host has ended; for ever if there is none."""
        loop = asyncio.get_running_loop()
        first: asyncio.Future[Process] = loop.create_future()
        # copies, because an event loop takes one reader per handle and several callers may wait
        handles = {os.dup(each.handle): each for each in self.processes if each.handle is not None}

        def tell(process: Process) -> None:
            if not first.done():
                first.set_result(process)

        for handle, process in handles.items():
            loop.add_reader(handle, tell, process)
        try:
            return await first
        finally:
            for handle in handles:
                loop.remove_reader(handle)
                os.close(handle)

    async def silent(self, timeout: float, heard: Callable[[int], None] | None = None) -> list[Process]:
        """The processes that do not answer in time. heard: called with each rank that answers."""
        answered: set[int] = set()

        async def ask() -> None:
            for answer in self.probe.who.stream():
                rank, _ = await answer
                answered.add(rank)
                if heard is not None:
                    heard(rank)

        try:
            await asyncio.wait_for(ask(), timeout)
        except TimeoutError:
            pass
        except Exception:
            # a process has ended: wait, so that `wait_any_exit` reports it first
            await asyncio.sleep(timeout)
        return [process for process in self.processes if process.rank not in answered]

    async def first_silent(self, silent_after: float, heard: Callable[[int], None] | None = None) -> list[Process]:
        while not (silent := await self.silent(silent_after, heard)):
            await asyncio.sleep(min(silent_after / 4, LONGEST_CHECK_PAUSE))
        return silent

    async def stop(self) -> None:
        processes = self.processes
        self.processes = []
        # Monarch would wait for an answer from a process that has ended
        if any(process.has_ended() for process in processes) or not await _stop(self.mesh):
            for process in processes:
                process.kill()
        for process in processes:
            if process.handle is not None:
                os.close(process.handle)


async def spawn_processes(
    name: str,
    num_processes: int,
    *,
    env: Mapping[str, str] | None = None,
    logs: LogRoute | None = None,
    hosts: "Hosts | None" = None,
) -> ProcessMesh:
    """Spawn processes with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    hosts: spread evenly, the first ranks on the first host; None: this host. This process serves
    the rendezvous store. Raises TimeoutError after START_TIMEOUT, ValueError if the processes do
    not divide evenly or the hosts do not share the folder of the logs.
    """
    start_here()
    num_hosts = 1 if hosts is None else len(hosts)
    if num_processes % num_hosts:
        raise ValueError(f"{name}: {num_processes} processes cannot be spread evenly over {num_hosts} hosts")
    own_address = LOOPBACK if hosts is None else hosts.own_address
    rendezvous = open_rendezvous(own_address)
    caches = kernel_caches.environment() if hosts is None else {}
    common = {**_common_environment(num_processes, own_address, rendezvous.port), **caches, **(env or {})}
    machines = this_host() if hosts is None else hosts.mesh
    mesh = machines.spawn_procs(
        per_host={"gpus": num_processes // num_hosts},
        name=name,
        bootstrap=functools.partial(_prepare_rank, name, logs),
        bootstrap_command=functools.partial(_command, name, logs, common),
    )
    probe = mesh.spawn(f"{name}_probe", Probe)
    try:
        answers: list[tuple[int, int]] = await asyncio.wait_for(collect(probe.who), START_TIMEOUT)
        if hosts is not None and logs is not None:
            await require_shared(name, probe.read, logs.directory)
    except TimeoutError:
        await _stop(mesh)
        raise TimeoutError(f"{name}: not all of {num_processes} processes started within {START_TIMEOUT:g} s") from None
    except NotSharedError:
        await _stop(mesh)
        raise
    processes = [Process(rank, pid, os.pidfd_open(pid) if hosts is None else None) for rank, pid in sorted(answers)]
    return ProcessMesh(mesh=mesh, probe=probe, processes=processes, rendezvous=rendezvous)


def _common_environment(num_processes: int, own_address: str, port: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": own_address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # every rank, also rank 0, is a client of our store
        # the caller's import path: a rank that cannot unpickle a loss or actor of the caller's
        # modules ends
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
        "PYTHONFAULTHANDLER": "1",  # a crash in a library prints where it was
        # threads.keep_memory holds only in malloc's main arena
        "MALLOC_ARENA_MAX": "1",
        "SPT_NOENV": "1",  # setproctitle then leaves /proc/PID/environ as it is
        **threads.gpu_environment(),
    }


def _command(name: str, logs: LogRoute | None, common: Mapping[str, str], point: Point):
    """The command that starts the process at `point` with `common` and its own variables."""
    of_rank = {
        "RANK": str(point.rank),
        "LOCAL_RANK": str(point["gpus"]),
        "RL_ACTORS_PROCESS": f"{name}-{point.rank}",  # marks a process of this package, for collector.py and in lists of processes
    }
    if logs is not None:
        of_rank[LOG_VARIABLE] = str(logs.file(name, point.rank))
    monarchs = default_bootstrap_cmd()
    monarchs.args = ["-c", BOOTSTRAP, *monarchs.args]
    return monarchs.with_env({**common, **of_rank})


async def _stop(mesh: ProcMesh) -> bool:
    """False if Monarch did not end the processes in time."""
    try:
        await asyncio.wait_for(awaited(mesh.stop()), STOP_TIMEOUT)
    except Exception as error:
        logger.info("Monarch did not stop %s: %r", mesh, error)
        return False
    return True


def open_rendezvous(address: str) -> TCPStore:
    """A store that listens only at this address; torch's default is all interfaces."""
    listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listening.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(), use_libuv=True
    )


class NotSharedError(ValueError):
    """A host does not see a folder that all hosts must share."""


async def require_shared(name: str, read: Endpoint[..., tuple[int, str, str]], folder: Path) -> None:
    """Raises NotSharedError naming a host that does not see a new file. read: of the hosts' Probes."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".shared-{uuid.uuid4().hex}"
    text = uuid.uuid4().hex
    mark.write_text(text)
    try:
        answers: list[tuple[int, str, str]] = await asyncio.wait_for(collect(read, str(mark)), START_TIMEOUT)
    finally:
        mark.unlink(missing_ok=True)
    for rank, host, seen in sorted(answers):
        if seen != text:
            raise NotSharedError(
                f"{name}: rank {rank} on {host} does not see the files of {folder}; "
                "put the run on a disk that all hosts share, at the same path on each host"
            )


async def collect(endpoint: Endpoint[..., T], *args: object, **kwargs: object) -> list[T]:
    """The answers of all ranks, in order of arrival. The first error is raised at once, because the
    other ranks may wait in a collective for the failed one.
    """
    return [await answer for answer in endpoint.stream(*args, **kwargs)]


def _prepare_rank(name: str, logs: LogRoute | None) -> None:
    """Set up a spawned process before its first actor."""
    collector.keep()
    setproctitle.setproctitle(f"rl_actors {os.environ['RL_ACTORS_PROCESS']}")
    os.environ |= lead_gloo_to(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    # Ctrl-C and a scheduler's SIGTERM reach all processes, but the spawning process may still need
    # the ranks for a checkpoint; they end with it.
    libc = ctypes.CDLL(None)
    for number in (signal.SIGINT, signal.SIGTERM):
        libc.signal(number, ctypes.c_void_p(signal.SIG_IGN))
    if logs is not None:
        rank = int(os.environ["RANK"])
        path = logs.file(name, rank)
        label = f"{name} {rank}"
        RoutedOutput(path, f"[{label}] " if logs.tee else None)
        route_logs(path, label=label)


@functools.cache
def start_here() -> None:
    """Start Monarch in this process, after hosts are connected. At a terminal or in a REPL, its
    line about its own logs goes to a file.
    """
    prepare_this_process()
    if sys.stderr.isatty() or hasattr(sys, "ps1"):
        with stderr_to(default_log_route().of_client()):
            context()


def prepare_this_process() -> None:
    """Set up Monarch in this process, before its first use. A second call does nothing."""
    for variable, value in _SUPERVISION.items():
        os.environ.setdefault(variable, value)
    # Monarch's default hook ends this process when any actor dies; calls to a dead actor raise anyway
    if monarch.actor.unhandled_fault_hook is _DEFAULT_HOOK:
        monarch.actor.unhandled_fault_hook = _log_fault


_DEFAULT_HOOK = monarch.actor.unhandled_fault_hook


def _log_fault(failure: MeshFailure) -> None:
    logger.warning("an actor failed: %s", failure)
