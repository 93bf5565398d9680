"""Processes for actors on this host. Spawning sets up what a rank needs (rendezvous, logs); importing this changes nothing.

A process ends with the process that spawned it, within seconds, also after kill -9.
"""

import asyncio
import contextlib
import ctypes
import functools
import logging
import os
import select
import signal
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import monarch.actor
from monarch.actor import Actor, ProcMesh, default_bootstrap_cmd, endpoint, this_host, this_proc
from torch.distributed import TCPStore

from rl_actors.processes import threads
from rl_actors.processes.output import LOG_VARIABLE, LogRoute, route_logs, route_process_output

START_TIMEOUT = 120.0
STOP_TIMEOUT = 20.0
logger = logging.getLogger(__name__)

# A dead process is noticed within seconds instead of Monarch's nine; a value that the user set stays.
_SUPERVISION = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "3s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "3s",
}


class Probe(Actor):
    """Beside the real actor on each process, because that one does not answer while a call runs."""

    @endpoint
    async def who(self) -> tuple[int, int]:
        """Rank and pid."""
        return int(os.environ["RANK"]), os.getpid()


async def probe_here() -> Any:
    """A Probe on the process of the actor that calls this."""
    probe = this_proc().spawn(f"probe_{uuid.uuid4().hex[:12]}", Probe)
    await probe.initialized
    return probe


@dataclass(frozen=True, slots=True)
class Process:
    rank: int
    pid: int
    handle: int = field(repr=False)  # of pidfd_open: unlike a pid it never comes to mean another process

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)


@dataclass(slots=True, kw_only=True)
class ProcessMesh:
    mesh: ProcMesh
    probe: Any  # Probe actors, one a process
    processes: list[Process]
    # The rendezvous of the ranks lives as long as they do.
    rendezvous: TCPStore = field(repr=False)

    async def first_end(self) -> Process:
        """Wait until one of the processes has ended, whatever ended it."""
        loop = asyncio.get_running_loop()
        first: asyncio.Future[Process] = loop.create_future()
        handles = {os.dup(process.handle): process for process in self.processes}  # a loop takes one reader a handle

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

    async def stop(self) -> None:
        """End the processes; a second call does nothing."""
        processes, self.processes = self.processes, []
        # Monarch would wait for the goodbye of one that ended before.
        if any(process.has_ended() for process in processes) or not await self._stop_in_time():
            for process in processes:
                process.kill()
        for process in processes:
            os.close(process.handle)

    async def _stop_in_time(self) -> bool:
        try:
            await asyncio.wait_for(_future(self.mesh.stop()), STOP_TIMEOUT)
        except Exception as error:
            logger.info("%s does not stop and is killed: %r", self.mesh, error)
            return False
        return True


async def spawn_processes(
    name: str, num_processes: int, *, env: Mapping[str, str] | None = None, logs: LogRoute | None = None
) -> ProcessMesh:
    """Spawn processes with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their environment.

    The rendezvous store is bound here, on a port that the system chose, so that no rank can find it taken.
    Raises TimeoutError when they are not up within START_TIMEOUT.
    """
    _prepare_this_process()
    rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(rendezvous.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # every rank is a client of our store
        # Losses and actors of the caller's modules can be imported there: a rank that cannot read a message ends.
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
        "PYTHONFAULTHANDLER": "1",  # a process that a library ends says where it was
        "MALLOC_ARENA_MAX": "1",  # threads.keep_memory works in the main arena only
        **threads.gpu_environment(),
        **(env or {}),
    }

    def command(point):
        # The last is for people who look at a process list.
        rank = {"RANK": str(point.rank), "LOCAL_RANK": str(point["gpus"]), "RL_ACTORS_PROCESS": f"{name}-{point.rank}"}
        if logs is not None:
            rank[LOG_VARIABLE] = str(logs.file(name, point.rank))
        return default_bootstrap_cmd().with_env({**common, **rank})

    bootstrap = functools.partial(_prepare_rank, name, logs)
    mesh = this_host().spawn_procs(
        per_host={"gpus": num_processes}, name=name, bootstrap=bootstrap, bootstrap_command=command
    )
    probe = mesh.spawn(f"{name}_probe", Probe)
    try:
        answers = await asyncio.wait_for(collect(probe.who), START_TIMEOUT)
    except TimeoutError:
        raise TimeoutError(f"{name}: not all of {num_processes} processes started within {START_TIMEOUT:g} s") from None
    processes = [Process(rank, pid, os.pidfd_open(pid)) for rank, pid in sorted(answers)]
    return ProcessMesh(mesh=mesh, probe=probe, processes=processes, rendezvous=rendezvous)


async def collect(endpoint: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """The answers as they come, and the first error at once: other ranks may wait in a collective for the one that failed."""
    return [await answer for answer in endpoint.stream(*args, **kwargs)]


def _prepare_rank(name: str, logs: LogRoute | None) -> None:
    # A terminal sends Ctrl-C to all processes of the program; its own answers it and, when it ends, the ranks end.
    ctypes.CDLL(None).signal(signal.SIGINT, ctypes.c_void_p(signal.SIG_IGN))
    if logs is not None:
        rank = int(os.environ["RANK"])
        path, label = logs.file(name, rank), f"{name} {rank}"
        route_process_output(path, f"[{label}] " if logs.tee else None)
        route_logs(path, label=label)


def _prepare_this_process() -> None:
    for variable, value in _SUPERVISION.items():
        os.environ.setdefault(variable, value)
    # Monarch's own hook ends this process when any actor dies; the caller of a dead actor gets an exception anyway.
    if monarch.actor.unhandled_fault_hook is _DEFAULT_HOOK:
        monarch.actor.unhandled_fault_hook = _log_fault


_DEFAULT_HOOK = monarch.actor.unhandled_fault_hook


def _log_fault(failure) -> None:
    logger.warning("an actor failed: %s", failure)


async def _future(future):
    return await future
