"""`Client`, the base class of the clients of actor meshes. An actor mesh is a group of Monarch actors, one in each process.

These actors are called ranks. A client calls the ranks of its mesh, and can start and end their processes. If a rank
raises an error, the client adds a note that names the rank.
"""

import asyncio
import atexit
import contextlib
import sys
import time
import weakref
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, shutdown_context

from rl_actors.clients.call import Call, in_background
from rl_actors.processes.output import LogRoute, default_log_route, route_client_logs
from rl_actors.processes.spawn import (
    LONGEST_PAUSE,
    NotSharedError,
    Probe,
    Process,
    ProcessMesh,
    collect,
    spawn_processes,
)
from rl_actors.types import CollectiveTimeoutError

if TYPE_CHECKING:
    from monarch.actor import Actor, ActorMesh, Endpoint, ProcMesh

    from rl_actors.clients.remote import Lease
    from rl_actors.processes.hosts import Hosts

T = TypeVar("T")
SHUTDOWN_TIMEOUT = 15.0
"""Seconds to wait at the end of the program until Monarch has shut down."""
ASK_AGAIN = 10.0
"""Seconds that is_alive waits for an answer before it asks the processes again."""
KILL_TIMEOUT = 5.0
"""Seconds that a killed process may take to end."""
POLL_SECONDS = 0.1
"""Seconds between two checks whether the processes of a client have started, or whether the client's setup has ended."""
SILENCE = 2.0
"""If a call fails because a rank has waited too long for another rank, the client asks every process for a sign of life.
The error of the call names each process that has not answered after this number of seconds."""
ATTACH_TIMEOUT = 30.0
"""Default number of seconds within which a service must answer a client that attaches to it. A service is a program that
owns actors, and passes the calls of several other programs on to them."""
STEP_WAIT = 60.0
"""Default of `step_wait`: the largest number of seconds that a call to a service waits until another client's training
step has ended."""


class ActorDiedError(RuntimeError):
    """A process of an actor has ended, or a generator's vLLM engine has failed for good.

    The actor cannot be used any more.
    """

    def __init__(self, text: str, actor: str) -> None:
        """actor: the name of the actor's client."""
        super().__init__(text)
        self.actor = actor


class ActorSilentError(TimeoutError):
    """An actor has not answered in time. Its processes may hang, or they may still run the call."""

    def __init__(self, text: str, actor: str) -> None:
        """actor: the name of the actor's client."""
        super().__init__(text)
        self.actor = actor


_open_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


class Client:
    """The client of one actor mesh. Either the caller passes the mesh, or the client spawns it."""

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
        """mesh: None if the client spawns the mesh. hosts: the hosts on which the client spawns processes; None: this host.

        A subclass sets its fields and then calls `_start`.
        """
        self.name, self.call_timeout, self.setup_timeout = name, call_timeout, setup_timeout
        self._mesh, self._hosts = mesh, hosts
        self._logs = default_log_route() if mesh is None and logs is None else logs
        # A caller that passed `logs` or a mesh knows where the actor's output is. So the client does not print the log
        # folder.
        self._is_quiet = logs is not None or mesh is not None
        if not self._is_quiet:
            route_client_logs(default_log_route().of_client())
        self._processes: ProcessMesh | None = None
        # A Probe is a second actor in a process. It answers even while the rank runs a call. `_probes` has the Probes
        # in processes that this client did not spawn. The Probes in its own processes are in `_processes.probe`.
        self._probes: Sequence[Probe] = ()
        self._spawning = asyncio.Lock()
        self._closed = False
        self._broken: str | None = None
        self._version: int | None = None  # the last policy_version that the actor reported
        self._lease: Lease | None = None  # None if the client is not attached to a service
        self._phases: list[str] = []  # names of the calls that the ranks are running
        self._heard: dict[int, float] = {}  # {rank: time of the last sign of life of its process, or of the start}
        self._started: Call[None]

    def _start(self) -> None:
        """Begin to set the actor up. If the client spawns processes and is never closed, the processes end with the program."""
        if self._mesh is None:
            _open_clients.add(self)
        self._started = in_background(self._set_up(), f"{self.name}: setup")

    async def _set_up(self) -> None:
        raise NotImplementedError

    def keep(self, lease: "Lease") -> None:
        """Keep the connection to the service that owns the actor open until `close`, or until this client is
        garbage-collected.
        """
        self._lease = lease
        weakref.finalize(self, lease.close)

    def __repr__(self) -> str:
        version = "" if self._version is None else f", policy_version {self._version}"
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
        return f"broken, {self._broken}" if self._broken else "ready"

    @property
    def policy_version(self) -> int | None:
        """The last policy_version that the actor reported to this client. None if the actor has reported none yet."""
        return self._version

    def ready(self) -> Call[None]:
        """A call that is done when the actor is set up. If the start fails, the call fails with the start's error."""
        return self._started

    def is_alive(self, timeout: float = 5.0) -> Call[bool]:
        """True if every process of the actor answers within `timeout` seconds. A process also answers while it runs a call.

        False before the processes have started, and after `close`. If the caller spawned the processes, also False before
        the setup has ended.
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
                continue  # Monarch may lose a message while it handles the death of another process. Ask the probes again.
            except Exception:
                return False
            return True
        return False

    def death(self, silent_after: float) -> Call[ActorDiedError | ActorSilentError | None]:
        """A call that is done when one of the processes that this client spawned has died. The result is an error that names the process.

        A process counts as dead if it has ended, or if it has not answered for silent_after seconds, as after a SIGSTOP. A process also
        answers while it runs a call. The result is None if the client is closed, if the client has not spawned the processes, or if
        their start has failed.
        """
        return in_background(self._death(silent_after), f"{self.name}: watch of its processes")

    async def _death(self, silent_after: float) -> ActorDiedError | ActorSilentError | None:
        while self._processes is None and not (self._closed or self._started.done()):
            await asyncio.sleep(POLL_SECONDS)
        processes = self._processes
        if processes is None:
            return None
        end = asyncio.ensure_future(processes.first_end())
        silence: asyncio.Task[list[Process]] | None = None
        silent: list[Process] = []
        try:
            # A process that imports its modules may answer late, so its silence counts only after the setup.
            # setup_timeout limits the setup.
            while not (end.done() or self._closed or self._started.done()):
                await asyncio.wait((end,), timeout=POLL_SECONDS)
            silence = asyncio.ensure_future(processes.first_silent(silent_after, self._note_sign))
            while not (end.done() or self._closed or silence.done()):
                await asyncio.wait((end, silence), timeout=LONGEST_PAUSE, return_when=asyncio.FIRST_COMPLETED)
            silent = [] if end.done() or self._closed else silence.result()
        finally:
            end.cancel()
            if silence is not None:
                silence.cancel()
        if self._closed:
            return None
        phase = f"during {self._phases[-1]}" if self._phases else "between two calls"
        if silent:
            names = ", ".join(map(str, silent))
            return ActorSilentError(f"{self.name}: {names} did not answer for {silent_after:g} s, {phase}", self.name)
        return self._died(end.result(), phase)

    def _died(self, process: Process, phase: str) -> ActorDiedError:
        return ActorDiedError(f"{self.name}: the process of {process} ended {phase}{self._output()}", self.name)

    def _lost(self, error: Exception, phase: str) -> ActorDiedError:
        """The ActorDiedError for an error of Monarch. The last line of Monarch's error is the reason."""
        reason = (str(error).splitlines() or [""])[-1].strip()
        return ActorDiedError(f"{self.name}: Monarch has lost a process during {phase}: {reason}", self.name)

    def seconds_silent(self) -> dict[str, float]:
        """Seconds since the last sign of life of each process that this client spawned, for example {"trainer-0": 1.2}.

        A running call of `death` asks the processes for a sign every few seconds. Without such a call the seconds count from
        the start of the process.
        """
        now = time.monotonic()
        return {f"{self.name}-{rank}": now - heard for rank, heard in list(self._heard.items())}

    def kill(self) -> Call[None]:
        """Kill the processes that this client spawned on this host, and close the client. Use `kill` for an actor that does not answer."""
        self._closed = True
        return in_background(self._kill(), f"{self.name}: kill")

    async def _kill(self) -> None:
        processes = [] if self._processes is None else self._processes.of_this_host()
        for process in processes:
            process.kill()
        # `close` asks every running process to stop, and waits for its answer. A killed process that has not ended yet gives no answer. So
        # `close` is called when all processes have ended, or after KILL_TIMEOUT.
        deadline = time.monotonic() + KILL_TIMEOUT
        while not all(process.has_ended() for process in processes) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await self.close()

    def close(self) -> Call[None]:
        """End the processes that this client spawned. A mesh that the caller spawned, and a service, keep running.

        A second call does nothing.
        """
        self._closed = True
        _open_clients.discard(self)
        return in_background(self._close(), f"{self.name}: close")

    async def _spawn(self, num_processes: int, env: dict[str, str] | None = None) -> "ProcMesh":
        # A `close` during the spawn waits for the end of the spawn, and then stops the processes.
        async with self._spawning:
            self._require_open("setup")
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
            # Python runs first the exit handler that was registered last. Our handler must run before Monarch's
            # handler. Monarch has registered its handler by now, because the spawn uses Monarch. So our handler is
            # registered here. If an earlier spawn has registered our handler, the next line removes that registration.
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        return self._processes.mesh

    async def _close(self) -> None:
        if self._lease is not None:
            self._lease.close()
        async with self._spawning:
            if self._processes is not None:
                processes, self._processes = self._processes, None
                await processes.stop()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close().result()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    def _show_start(self) -> None:
        """Print, once, that the actor is starting and where its output is.

        Prints nothing if the actor's start has ended, and nothing outside of a terminal or a REPL.
        """
        if self._is_quiet or self._started.done() or not (sys.stderr.isatty() or hasattr(sys, "ps1")):
            return
        self._is_quiet = True
        assert self._logs is not None
        print(f"{self.name} is starting; its output: {self._logs.directory}", file=sys.stderr)

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(f"{self.name}: {what} is not possible after close")

    async def _ask(
        self,
        endpoint: "Endpoint[..., T]",
        phase: str,
        timeout: float,
        *args: object,
        breaks: bool = True,
        **kwargs: object,
    ) -> list[T]:
        """Call all ranks and collect their answers. An error of a rank is raised here, with a note that names client, rank and call.

        phase: name of the call in error texts.
        breaks: True: a timeout breaks the client, because the ranks may still run the call. A broken ModelClient accepts only
        drop_tenant and discard_gradients. discard_gradients repairs the client.
        """
        self._require_open(phase)
        self._phases.append(phase)
        try:
            return await asyncio.wait_for(self._answers(endpoint, phase, *args, **kwargs), timeout)
        except TimeoutError:
            late = f"{phase} did not answer within {timeout:g} s"
            self._broken = late if breaks else self._broken
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
        """The error of a call in which a rank has waited too long for another rank. The error names the ranks that do not answer."""
        silent: list[Process] = []
        if self.watched is not None:
            silent = await self.watched.silent(SILENCE, self._note_sign)
        names = ", ".join(map(str, silent))
        reason = f"; {names} did not answer for {SILENCE:g} s" if silent else ""
        self._broken = f"{error}, during {phase}"
        return ActorSilentError(f"{self.name}: {self._broken}{reason}{self._output()}", self.name)

    async def _answers(self, endpoint: "Endpoint[..., T]", phase: str, *args: object, **kwargs: object) -> list[T]:
        """The answers of the ranks. Raises ActorDiedError as soon as one of the processes in `watched` has ended."""
        watched = self.watched
        if watched is None:
            return await collect(endpoint, *args, **kwargs)
        answers: asyncio.Task[list[T]] = asyncio.ensure_future(collect(endpoint, *args, **kwargs))
        end = asyncio.ensure_future(watched.first_end())
        try:
            await asyncio.wait((answers, end), return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                raise self._died(end.result(), f"during {phase}")
            return answers.result()
        finally:
            answers.cancel()
            end.cancel()

    @property
    def watched(self) -> ProcessMesh | None:
        """The processes of the ranks. None if this client has not spawned them."""
        return self._processes

    def _output(self) -> str:
        return "" if self._logs is None else f"; its last output is in {self._logs.directory}"


def _close_all() -> None:
    """End the processes of all clients, because a program or a REPL may end without calling `close`."""
    for closing in [client.close() for client in list(_open_clients)]:
        with contextlib.suppress(Exception):
            closing.result(timeout=10)
    # Monarch's own exit handler waits one second for the shutdown, and then prints a traceback. On a busy machine the
    # shutdown takes longer. So this function shuts Monarch down before that handler runs, and waits up to SHUTDOWN_TIMEOUT.
    with contextlib.suppress(Exception):
        shutdown_context().get(timeout=SHUTDOWN_TIMEOUT)
