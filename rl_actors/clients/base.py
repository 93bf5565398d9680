"""`Client`, the base class of the clients of actor meshes: start, calls, death and close of the
processes (ranks).
"""

import asyncio
import atexit
import contextlib
import sys
import time
import weakref
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, shutdown_context

from rl_actors.clients.call import Call, in_background
from rl_actors.processes.output import LogRoute, default_log_route, route_client_logs
from rl_actors.processes.races import unless
from rl_actors.processes.spawn import (
    LONGEST_CHECK_PAUSE,
    NotSharedError,
    Probe,
    Process,
    ProcessMesh,
    collect,
    spawn_processes,
)
from rl_actors.types import CollectiveTimeoutError

if TYPE_CHECKING:
    from monarch.actor import Actor, ActorMesh, ProcMesh

    from rl_actors.clients.remote import Connection
    from rl_actors.processes.hosts import Hosts

T = TypeVar("T")
SHUTDOWN_TIMEOUT = 15.0  # seconds until Monarch must have shut down at the end of the program
ASK_AGAIN = 10.0  # seconds after which is_alive asks the processes again
KILL_TIMEOUT = 5.0  # seconds that a killed process may take to end
POLL_SECONDS = 0.1  # between two checks of the start or the setup
SILENCE = 2.0  # seconds after which a collective's timeout names a process that gives no sign of life
ATTACH_TIMEOUT = 30.0  # default seconds within which a service must answer a client that attaches to it
STEP_WAIT = 60.0  # default seconds that a call to a service waits for the end of another client's step


class ActorDiedError(RuntimeError):
    """A process of an actor has ended, or its vLLM engine has failed for good."""

    def __init__(self, text: str, actor: str) -> None:
        """actor: the name of the actor's client."""
        super().__init__(text)
        self.actor = actor


class ActorSilentError(TimeoutError):
    """An actor has not answered in time. Its processes may hang, or still run the call."""

    def __init__(self, text: str, actor: str) -> None:
        """actor: the name of the actor's client."""
        super().__init__(text)
        self.actor = actor


_open_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


class Client:
    """The client of one actor mesh, which the caller passes or the client spawns."""

    IF_DEAD: ClassVar[str] = ""
    """What the caller can do after a death. A note of ActorDiedError."""

    def __init__(
        self,
        mesh: "ActorMesh[Actor] | None",
        *,
        name: str,
        call_timeout: float,
        setup_timeout: float,
        logs: LogRoute | None,
        hosts: "Hosts | None" = None,
    ) -> None:
        """mesh: None if the client spawns it, on `hosts` or this host. A subclass then calls
        `_start`.
        """
        self.name = name
        self.call_timeout = call_timeout
        self.setup_timeout = setup_timeout
        self._mesh = mesh
        self._hosts = hosts
        self._logs = default_log_route() if mesh is None and logs is None else logs
        # Who passes logs or a mesh knows where the output is, so the client does not print the
        # folder.
        self._is_quiet = logs is not None or mesh is not None
        if not self._is_quiet:
            route_client_logs(default_log_route().of_client())
        self._processes: ProcessMesh | None = None
        # The Probes in processes that the caller spawned; those of this client are in
        # _processes.probe.
        self._probes: Sequence[Probe] = ()
        self._spawning = asyncio.Lock()
        self._closed = False
        self.broken: str | None = None  # why calls are refused until the client is repaired
        self._version: int | None = None
        self._connection: Connection | None = None  # None if the client is not attached to a service
        self._phases: list[str] = []  # names of the calls that the ranks are running
        self._heard: dict[int, float] = {}  # rank -> time of its process's last sign of life, or of its start
        self._started: Call[None]

    def _start(self) -> None:
        """Begin the setup. Processes of a client that is never closed end with the program."""
        if self._mesh is None:
            _open_clients.add(self)
        self._started = in_background(self._set_up(), f"{self.name}: setup")

    async def _set_up(self) -> None:
        raise NotImplementedError

    def keep(self, connection: "Connection") -> None:
        """Keep the connection to a service until `close` or garbage collection."""
        self._connection = connection
        weakref.finalize(self, connection.close)

    def __repr__(self) -> str:
        version = "" if self.policy_version is None else f", policy_version {self.policy_version}"
        return f"<{type(self).__name__} {self.name}: {self._state()}{version}>"

    def _state(self) -> str:
        if self._closed:
            return "closed"
        if not self._started.done():
            return "starting"
        if self._started.failed():
            return "did not start"
        if self._processes is not None:
            ended = [str(process) for process in self._processes.processes if process.has_ended()]
            if ended:
                return f"dead, {', '.join(ended)} ended"
        return f"broken, {self.broken}" if self.broken else "ready"

    @property
    def policy_version(self) -> int | None:
        """The last policy_version that the actor reported. None before the first report."""
        return self._version

    def ready(self) -> Call[None]:
        """A call that is done when the actor is set up, or fails with the error of the start."""
        return self._started

    def is_alive(self, timeout: float = 5.0) -> Call[bool]:
        """True if every process answers within `timeout` seconds, which it does even while it runs
        a call.

        False before the processes have started (before the setup, if the caller spawned them), and
        after `close`.
        """
        return in_background(self._is_alive(timeout), f"{self.name}: is_alive")

    async def _is_alive(self, timeout: float) -> bool:
        probes = self._probes if self._processes is None else [self._processes.probe]
        if self._closed or not probes:
            return False
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            answers: list[Awaitable[list[tuple[int, int]]]] = [self._answers(probe.who, "is_alive") for probe in probes]
            try:
                await asyncio.wait_for(asyncio.gather(*answers), min(left, ASK_AGAIN))
            except TimeoutError:
                continue  # Monarch may lose a message while it handles the death of another process
            except Exception:
                return False
            return True
        return False

    def death(self, silent_after: float) -> Call[ActorDiedError | ActorSilentError | None]:
        """A call that is done when a process that this client spawned is dead. Its result is an
        error that names the process.

        Dead: ended, or silent for silent_after seconds, as after a SIGSTOP. None if the client is
        closed, has spawned no processes, or they did not start.
        """
        return in_background(self._death(silent_after), f"{self.name}: watch of its processes")

    async def _death(self, silent_after: float) -> ActorDiedError | ActorSilentError | None:
        while self._processes is None and not (self._closed or self._started.done()):
            await asyncio.sleep(POLL_SECONDS)
        processes = self._processes
        if processes is None:
            return None
        end = asyncio.ensure_future(processes.wait_any_exit())
        silence: asyncio.Task[list[Process]] | None = None
        silent: list[Process] = []
        try:
            # A process that imports its modules answers late, so silence counts only after the
            # setup.
            while not (end.done() or self._closed or self._started.done()):
                await asyncio.wait((end,), timeout=POLL_SECONDS)
            silence = asyncio.ensure_future(processes.first_silent(silent_after, self._note_sign))
            while not (end.done() or self._closed or silence.done()):
                await asyncio.wait((end, silence), timeout=LONGEST_CHECK_PAUSE, return_when=asyncio.FIRST_COMPLETED)
            silent = [] if end.done() or self._closed else silence.result()
        finally:
            end.cancel()
            if silence is not None:
                silence.cancel()
        if self._closed:
            return None
        if silent:
            names = ", ".join(map(str, silent))
            text = f"{self.name}: {names} did not answer for {silent_after:g} s, {self._phase()}"
            return ActorSilentError(text, self.name)
        return self._died(end.result(), self._phase())

    def _phase(self) -> str:
        return f"during {self._phases[-1]}" if self._phases else "between two calls"

    def _died(self, process: Process, phase: str) -> ActorDiedError:
        return ActorDiedError(f"{self.name}: the process of {process} ended {phase}{self._output()}", self.name)

    def _lost(self, error: Exception, phase: str) -> ActorDiedError:
        """The ActorDiedError for an error of Monarch, whose last line is the reason."""
        reason = (str(error).splitlines() or [""])[-1].strip()
        return ActorDiedError(f"{self.name}: Monarch has lost a process during {phase}: {reason}", self.name)

    def seconds_silent(self) -> dict[str, float]:
        """Seconds since the last sign of life of each process that this client spawned:
        {"trainer-0": 1.2}

        Only a running call of `death` asks for signs; without one the seconds count from the start.
        """
        now = time.monotonic()
        return {f"{self.name}-{rank}": now - heard for rank, heard in list(self._heard.items())}

    def kill(self) -> Call[None]:
        """Kill this client's processes on this host, although they do not answer, and close it."""
        self._closed = True
        return in_background(self._kill(), f"{self.name}: kill")

    async def _kill(self) -> None:
        processes = [] if self._processes is None else self._processes.of_this_host()
        for process in processes:
            process.kill()
        # `close` would wait for an answer of a killed process that has not ended yet.
        deadline = time.monotonic() + KILL_TIMEOUT
        while not all(process.has_ended() for process in processes) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await self.close()

    def close(self) -> Call[None]:
        """End the processes that this client spawned, but no mesh of the caller and no service."""
        self._closed = True
        _open_clients.discard(self)
        return in_background(self._close(), f"{self.name}: close")

    async def _spawn(self, num_processes: int, env: dict[str, str] | None = None) -> "ProcMesh":
        # A `close` during the spawn waits for its end, and then stops the processes.
        async with self._spawning:
            self.require_open("setup")
            try:
                self._processes = await spawn_processes(
                    self.name, num_processes, env=env, logs=self._logs, hosts=self._hosts
                )
                self._heard = {process.rank: time.monotonic() for process in self._processes.processes}
            except TimeoutError as error:
                raise ActorSilentError(str(error), self.name) from None
            except NotSharedError:
                raise
            except (RuntimeError, ValueError) as error:  # Monarch may raise either if a process is killed early
                raise self._lost(error, "the start of its processes") from error
            # Handlers run last in, first out. Ours must run before Monarch's, which the spawn has
            # registered.
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        return self._processes.mesh

    async def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        async with self._spawning:
            if self._processes is not None:
                processes = self._processes
                self._processes = None
                await processes.stop()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close().result()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    def show_start(self) -> None:
        """In a terminal or a REPL, print once that the actor is starting, and where its output is."""
        if self._is_quiet or self._started.done() or not (sys.stderr.isatty() or hasattr(sys, "ps1")):
            return
        self._is_quiet = True
        assert self._logs is not None
        print(f"{self.name} is starting; its output: {self._logs.directory}", file=sys.stderr)

    def require_open(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(f"{self.name}: {what} is not possible after close")

    async def ask(
        self,
        endpoint: str,
        *args: object,
        phase: str = "",
        timeout: float | None = None,
        breaks: bool = True,
        named: Mapping[str, object] | None = None,
    ) -> list[Any]:
        """The answers of all ranks. A rank's error is raised with a note that names client, rank
        and phase.

        phase: the call's name in errors; "": the endpoint's. timeout: None: call_timeout.
        breaks: whether a timeout breaks the client, because the ranks may still run the call.
        named: keyword arguments of the endpoint.
        """
        phase = phase or endpoint
        timeout = self.call_timeout if timeout is None else timeout
        self.require_open(phase)
        self._phases.append(phase)
        try:
            answers = self._answers(getattr(self._mesh, endpoint), phase, *args, **(named or {}))
            return await asyncio.wait_for(answers, timeout)
        except TimeoutError:
            late = f"{phase} did not answer within {timeout:g} s"
            self.broken = late if breaks else self.broken
            raise ActorSilentError(f"{self.name}: {late}; its ranks may still run this call", self.name) from None
        except ActorError as error:
            cause = error.exception
            if isinstance(cause, CollectiveTimeoutError):
                raise await self._hung(cause, phase) from cause
            cause.add_note(f"raised in {self.name}, rank {getattr(cause, 'rank', 'unknown')}, {phase}: {error}")
            raise cause from None
        except SupervisionError as error:
            raise self._lost(error, phase) from error
        except Exception as error:
            error.add_note(f"raised by {self.name} in {phase}")
            if isinstance(error, ActorDiedError) and self.IF_DEAD:
                error.add_note(self.IF_DEAD)
            raise
        finally:
            self._phases.remove(phase)

    def _note_sign(self, rank: int) -> None:
        self._heard[rank] = time.monotonic()

    async def _hung(self, error: CollectiveTimeoutError, phase: str) -> ActorSilentError:
        """The error of a call in which a rank waited too long for others, naming the silent ones."""
        silent: list[Process] = []
        if self.watched is not None:
            silent = await self.watched.silent(SILENCE, self._note_sign)
        names = ", ".join(map(str, silent))
        reason = f"; {names} did not answer for {SILENCE:g} s" if silent else ""
        self.broken = f"{error}, during {phase}"
        return ActorSilentError(f"{self.name}: {self.broken}{reason}{self._output()}", self.name)

    async def _answers(self, endpoint: Any, phase: str, *args: object, **kwargs: object) -> list[Any]:
        """The answers of the ranks. Raises ActorDiedError when a process in `watched` has ended."""
        answers: Awaitable[list[Any]] = collect(endpoint, *args, **kwargs)
        if self.watched is None:
            return await answers
        return await unless(self.watched.wait_any_exit(), lambda end: self._died(end, f"during {phase}"), answers)

    @property
    def watched(self) -> ProcessMesh | None:
        """The processes of the ranks. None if this client has not spawned them."""
        return self._processes

    def _output(self) -> str:
        return "" if self._logs is None else f"; its last output is in {self._logs.directory}"


def _close_all() -> None:
    """End the processes of all clients that the program or the REPL has not closed."""
    for closing in [client.close() for client in list(_open_clients)]:
        with contextlib.suppress(Exception):
            closing.result(timeout=10)
    # Monarch's own handler waits only a second for the shutdown, and then prints a traceback.
    with contextlib.suppress(Exception):
        shutdown_context().get(timeout=SHUTDOWN_TIMEOUT)
