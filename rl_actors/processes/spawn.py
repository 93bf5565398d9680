"""Spawn the processes of actors, with their rendezvous and their logs.

Importing this module changes nothing. The first spawn sets up Monarch in this process.
When a process ends, even by kill -9, the processes that it has spawned end within seconds. On another host, a
worker of Monarch (hosts.py) starts the processes and ends them.
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
from collections.abc import Awaitable, Callable, Mapping
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

from rl_actors.processes import collector, network, threads
from rl_actors.processes.bootstrap import BOOTSTRAP
from rl_actors.processes.output import (
    LOG_VARIABLE,
    LogRoute,
    default_log_route,
    route_logs,
    route_process_output,
    stderr_to,
)

if TYPE_CHECKING:
    from rl_actors.processes.hosts import Hosts

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
LONGEST_PAUSE = 5.0  # longest pause in seconds between two checks that the processes of an actor answer
START_TIMEOUT = 120.0  # seconds in which spawned processes must answer
STOP_TIMEOUT = 20.0  # seconds within which Monarch must stop the processes; those that still run are then killed
logger = logging.getLogger(__name__)

# By default Monarch notices a dead process after nine seconds. With this value Monarch takes about one second. If the user has set the
# variable, the user's value is kept. Monarch also asks its processes whether they are alive. The time limits for their answers are
# not changed. With shorter limits Monarch took a process on an overloaded machine for dead, because the process did not answer for over three
# seconds while it imported vLLM.
_SUPERVISION = {"HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s"}


class Probe(Actor):
    """An actor beside the main actor of each process. The Probe answers even while the main actor runs a call."""

    @endpoint
    async def who(self) -> tuple[int, int]:
        """(rank, pid) of this process."""
        return int(os.environ["RANK"]), os.getpid()

    @endpoint
    async def read(self, path: str) -> tuple[int, str, str]:
        """(rank, name of the host, text of a file). The text is empty if the process cannot read the file."""
        text = ""
        with contextlib.suppress(OSError, ValueError):
            text = Path(path).read_text()
        return int(os.environ["RANK"]), socket.gethostname(), text


async def probe_here() -> Probe:
    """A Probe on the process of the actor that calls this function."""
    probe = this_proc().spawn(f"probe_{uuid.uuid4().hex[:12]}", Probe)
    await probe.initialized
    return probe


@dataclass(frozen=True, slots=True)
class Process:
    """A spawned process."""

    rank: int
    pid: int
    # A handle from pidfd_open. After the process has ended, the system may give its pid to another process, but the handle never refers to
    # another process. So checks and signals use the handle. None: the process is on another host.
    handle: int | None = field(repr=False)

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    def has_ended(self) -> bool:
        """True if the process has ended. Always False for a process on another host. If such a process ends, calls to it fail as soon as
        Monarch has noticed the end.
        """
        if self.handle is None:
            return False
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        """End the process at once. Does nothing if the process is on another host, because Monarch's worker on that host ends it."""
        if self.handle is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)


@dataclass(slots=True, kw_only=True)
class ProcessMesh:
    """Processes that were spawned together."""

    mesh: ProcMesh
    # A mesh of one Probe on each process. The annotation is Probe, because Monarch types a mesh of actors as the actor.
    probe: Probe
    processes: list[Process]
    rendezvous: TCPStore = field(repr=False)  # kept alive by this reference, because the ranks need the store

    def of_this_host(self) -> list[Process]:
        return [process for process in self.processes if process.handle is not None]

    async def first_end(self) -> Process:
        """Wait until one of the processes of this host has ended for any reason, and return this process. If all processes are on other hosts,
        the wait never ends.
        """
        loop = asyncio.get_running_loop()
        first: asyncio.Future[Process] = loop.create_future()
        # Copies of the handles, because an event loop takes only one reader per handle and several callers may wait.
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
        """The processes that do not answer within `timeout` seconds. heard: called with the rank of each process as soon as it answers."""
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
            # The error means that a process has ended, not that the process is silent. `first_end` reports the end of a process of this host.
            # This method waits for `timeout` seconds, so that `first_end` reports first.
            await asyncio.sleep(timeout)
        return [process for process in self.processes if process.rank not in answered]

    async def first_silent(self, silent_after: float, heard: Callable[[int], None] | None = None) -> list[Process]:
        """Wait until some processes have not answered for silent_after seconds, and return them."""
        while not (silent := await self.silent(silent_after, heard)):
            await asyncio.sleep(min(silent_after / 4, LONGEST_PAUSE))
        return silent

    async def stop(self) -> None:
        """End the processes. A second call does nothing."""
        processes, self.processes = self.processes, []
        # If one process has ended already, the others are killed, because Monarch would wait for an answer from the ended one.
        if any(process.has_ended() for process in processes) or not await self._stop_in_time():
            for process in processes:
                process.kill()
        for process in processes:
            if process.handle is not None:
                os.close(process.handle)

    async def _stop_in_time(self) -> bool:
        try:
            await asyncio.wait_for(_future(self.mesh.stop()), STOP_TIMEOUT)
        except Exception as error:
            logger.info("Monarch did not stop %s, so its processes on this host are killed: %r", self.mesh, error)
            return False
        return True


async def spawn_processes(
    name: str,
    num_processes: int,
    *,
    env: Mapping[str, str] | None = None,
    logs: LogRoute | None = None,
    hosts: "Hosts | None" = None,
) -> ProcessMesh:
    """Spawn processes with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their environment.

    hosts: the hosts of the processes; None: this host. Every host gets the same number of processes, and the first host gets the first
    ranks.
    The caller's process serves the rendezvous store. The system chooses a free port for the store.
    Raises TimeoutError if the processes have not started within START_TIMEOUT. Raises ValueError if the number of hosts does not divide the
    number of processes, or if the hosts do not share the folder of the logs.
    """
    start_here()
    num_hosts = 1 if hosts is None else len(hosts)
    if num_processes % num_hosts:
        raise ValueError(f"{name}: {num_processes} processes cannot be spread evenly over {num_hosts} hosts")
    own_address = LOOPBACK if hosts is None else hosts.own_address
    rendezvous = open_rendezvous(own_address)
    common = {**_common_environment(num_processes, own_address, rendezvous.port), **(env or {})}
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
    except TimeoutError:
        await _stop(mesh)
        raise TimeoutError(f"{name}: not all of {num_processes} processes started within {START_TIMEOUT:g} s") from None
    if hosts is None:
        processes = [Process(rank, pid, os.pidfd_open(pid)) for rank, pid in sorted(answers)]
    else:
        processes = [Process(rank, pid, None) for rank, pid in sorted(answers)]
        if logs is not None:
            await _require_shared_or_stop(name, mesh, probe, logs.directory)
    return ProcessMesh(mesh=mesh, probe=probe, processes=processes, rendezvous=rendezvous)


def _common_environment(num_processes: int, own_address: str, port: int) -> dict[str, str]:
    """The environment that all ranks share. own_address, port: the address and the port of the rendezvous store."""
    return {
        "WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": own_address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # makes every rank, also rank 0, a client of our store
        # The ranks get the caller's import path, because messages may contain losses and actors that the caller's modules define. A rank
        # that cannot unpickle a message ends.
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
        "PYTHONFAULTHANDLER": "1",  # a process that crashes in a library prints where it was
        # All threads use malloc's main arena, because malloc keeps freed memory (threads.keep_memory) only in this arena.
        "MALLOC_ARENA_MAX": "1",
        "SPT_NOENV": "1",  # setproctitle then leaves /proc/PID/environ as it is
        **threads.gpu_environment(),
    }


def _command(name: str, logs: LogRoute | None, common: Mapping[str, str], point: Point):
    """The command that starts the process at `point` of the mesh. The command sets the variables in `common` and those of this rank."""
    of_rank = {
        "RANK": str(point.rank),
        "LOCAL_RANK": str(point["gpus"]),
        "RL_ACTORS_PROCESS": f"{name}-{point.rank}",  # marks a process of this package, for collector.py and for people who list processes
    }
    if logs is not None:
        of_rank[LOG_VARIABLE] = str(logs.file(name, point.rank))
    monarchs = default_bootstrap_cmd()
    monarchs.args = ["-c", BOOTSTRAP, *monarchs.args]
    return monarchs.with_env({**common, **of_rank})


async def _require_shared_or_stop(name: str, mesh: ProcMesh, probe: Probe, folder: Path) -> None:
    """Call `require_shared`, and end the processes if it raises an error."""
    try:
        await require_shared(name, probe.read, folder)
    except BaseException:
        await _stop(mesh)
        raise


async def _stop(mesh: ProcMesh) -> None:
    """End the processes of a mesh whose start failed. The error of the start is more useful than an error of this stop."""
    with contextlib.suppress(Exception):
        await asyncio.wait_for(_future(mesh.stop()), STOP_TIMEOUT)


def open_rendezvous(address: str) -> TCPStore:
    """A store that listens only at this address. By default torch would listen on all interfaces."""
    listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listening.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(), use_libuv=True
    )


class NotSharedError(ValueError):
    """A host does not see the files of a folder that all hosts must share."""


async def require_shared(name: str, read: Endpoint[..., tuple[int, str, str]], folder: Path) -> None:
    """Write a file to the folder, and check that all hosts see the file. Raises NotSharedError naming a host that does not see the file.

    read: the endpoint of the Probes on the hosts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark, text = folder / f".shared-{uuid.uuid4().hex}", uuid.uuid4().hex
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
    """The answers of all ranks, in the order in which they arrive.

    Raises the first error at once, and does not wait for the remaining answers. They may never come, because other ranks may wait in a
    collective for the rank that failed.
    """
    return [await answer for answer in endpoint.stream(*args, **kwargs)]


def _prepare_rank(name: str, logs: LogRoute | None) -> None:
    """Set up a spawned process. Monarch calls this function in the process before the first actor starts there."""
    collector.keep()
    setproctitle.setproctitle(f"rl_actors {os.environ['RL_ACTORS_PROCESS']}")
    os.environ |= network.lead_gloo_to(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    # A terminal sends Ctrl-C, and a scheduler sends SIGTERM, to all processes of a program. The ranks ignore both signals,
    # because the spawning process may still need the ranks for a checkpoint. A rank ends when the spawning process
    # stops it, or when the spawning process ends.
    libc = ctypes.CDLL(None)
    for number in (signal.SIGINT, signal.SIGTERM):
        libc.signal(number, ctypes.c_void_p(signal.SIG_IGN))
    if logs is not None:
        rank = int(os.environ["RANK"])
        path, label = logs.file(name, rank), f"{name} {rank}"
        route_process_output(path, f"[{label}] " if logs.tee else None)
        route_logs(path, label=label)


@functools.cache
def start_here() -> None:
    """Start Monarch in this process. At a terminal or in a REPL, the line in which Monarch says where its own logs are goes to a file.

    Hosts must be connected before.
    """
    prepare_this_process()
    if sys.stderr.isatty() or hasattr(sys, "ps1"):
        with stderr_to(default_log_route().of_client()):
            context()


def prepare_this_process() -> None:
    """Set up Monarch in this process, before its first use. A second call does nothing."""
    for variable, value in _SUPERVISION.items():
        os.environ.setdefault(variable, value)
    # Monarch calls unhandled_fault_hook when any actor dies. The default hook ends this process. This process need not
    # end, because every call to a dead actor raises an exception. So `_log_fault` replaces the default hook.
    if monarch.actor.unhandled_fault_hook is _DEFAULT_HOOK:
        monarch.actor.unhandled_fault_hook = _log_fault


_DEFAULT_HOOK = monarch.actor.unhandled_fault_hook


def _log_fault(failure: MeshFailure) -> None:
    logger.warning("an actor failed: %s", failure)


async def _future(future: Awaitable[T]) -> T:
    """Wrap a future of Monarch in a coroutine, for asyncio.wait_for."""
    return await future
