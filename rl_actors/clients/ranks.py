"""`Ranks`, the processes of one actor mesh: their start, calls, death and end."""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from rl_actors.clients.base import ActorDiedError, ActorSilentError, close_at_exit
from rl_actors.clients.call import Call, in_background
from rl_actors.processes.output import LogRoute
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
from rl_actors.transports.base import Transport
from rl_actors.types import CollectiveTimeoutError

if TYPE_CHECKING:
    from monarch.actor import Actor, ActorMesh, ProcMesh

    from rl_actors.processes.hosts import Hosts

AnyTransport = Transport | Call[Transport] | Call[Transport | None] | None  # open, or the call that opens it
ASK_AGAIN = 10.0  # seconds after which is_alive asks the processes again
KILL_TIMEOUT = 5.0  # seconds that a killed process may take to end
POLL_SECONDS = 0.1  # between two checks of the start or the setup
SILENCE = 2.0  # seconds after which a collective's timeout names a process that gives no sign of life


class Ranks:
    """One actor mesh, which the caller passes or `_set_up` spawns."""

    IF_DEAD: ClassVar[str] = ""  # what the user can do after a death; a note of ActorDiedError

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
        """mesh: None if `_set_up` spawns it, on `hosts` or this host. A subclass then calls
        `_start`.
        """
        self.name = name
        self.call_timeout = call_timeout
        self.setup_timeout = setup_timeout
        self.is_closed = False
        self.broken: str | None = None  # why calls are refused until the ranks are repaired
        self.started: Call[None]
        self._mesh = mesh
        self._logs = logs
        self._hosts = hosts
        self._processes: ProcessMesh | None = None
        # Of processes that the caller spawned; _processes.probe is that of the others.
        self._probes: Sequence[Probe] = ()
        self._spawning = asyncio.Lock()
        self._phases: list[str] = []  # names of the running calls
        self._heard: dict[int, float] = {}  # rank -> time of its last sign of life, or of its start

    def _start(self) -> None:
        self.started = in_background(self._set_up(), f"{self.name}: setup")

    async def _set_up(self) -> None:
        raise NotImplementedError

    @property
    def watched(self) -> ProcessMesh | None:
        """The processes of the ranks. None if the caller spawned them."""
        return self._processes

    def state(self) -> str:
        if self._processes is not None:
            ended = [str(process) for process in self._processes.processes if process.has_ended()]
            if ended:
                return f"dead, {', '.join(ended)} ended; {self.IF_DEAD}"
        return f"broken, {self.broken}" if self.broken else "ready"

    async def is_alive(self, timeout: float) -> bool:
        probes = self._probes if self._processes is None else [self._processes.probe]
        if self.is_closed or not probes:
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

    async def death(self, silent_after: float) -> ActorDiedError | ActorSilentError | None:
        while self._processes is None and not (self.is_closed or self.started.done()):
            await asyncio.sleep(POLL_SECONDS)
        processes = self._processes
        if processes is None:
            return None
        end = asyncio.ensure_future(processes.wait_any_exit())
        silence = asyncio.ensure_future(self._silence(processes, silent_after))
        try:
            while not (end.done() or silence.done() or self.is_closed):
                pause = LONGEST_CHECK_PAUSE if self.started.done() else POLL_SECONDS
                await asyncio.wait((end, silence), timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            if self.is_closed:
                return None
            return self._died(end.result(), self._phase()) if end.done() else silence.result()
        finally:
            end.cancel()
            silence.cancel()

    async def _silence(self, processes: ProcessMesh, seconds: float) -> ActorDiedError | ActorSilentError | None:
        """Wait until a process has been silent for so long, and return the error."""
        while not self.started.done():  # a process that imports its modules answers late
            await asyncio.sleep(POLL_SECONDS)
        names = ", ".join(map(str, await processes.first_silent(seconds, self._note_sign)))
        return ActorSilentError(f"{self.name}: {names} did not answer for {seconds:g} s, {self._phase()}", self.name)

    def _phase(self) -> str:
        return f"during {self._phases[-1]}" if self._phases else "between two calls"

    def _died(self, process: Process, phase: str) -> ActorDiedError:
        return ActorDiedError(f"{self.name}: the process of {process} ended {phase}{self._output()}", self.name)

    def _lost(self, error: Exception, phase: str) -> ActorDiedError:
        """The ActorDiedError for an error of Monarch, whose last line is the reason."""
        reason = (str(error).splitlines() or [""])[-1].strip()
        return ActorDiedError(f"{self.name}: Monarch has lost a process during {phase}: {reason}", self.name)

    def seconds_silent(self) -> dict[str, float]:
        now = time.monotonic()
        return {f"{self.name}-{rank}": now - heard for rank, heard in list(self._heard.items())}

    async def kill(self) -> None:
        self.is_closed = True
        everywhere = [] if self._processes is None else self._processes.processes
        processes = [process for process in everywhere if process.handle is not None]
        for process in processes:
            process.kill()
        # `close` would wait for an answer of a killed process that has not ended yet.
        deadline = time.monotonic() + KILL_TIMEOUT
        while not all(process.has_ended() for process in processes) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await self.close()

    async def close(self) -> None:
        self.is_closed = True
        async with self._spawning:
            if self._processes is not None:
                processes = self._processes
                self._processes = None
                await processes.stop()

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
            close_at_exit()
        return self._processes.mesh

    def require_open(self, what: str) -> None:
        if self.is_closed:
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
        """The answers of all ranks. A rank's error is raised with a note that names it.

        phase: the call's name in errors; "": the endpoint's. timeout: None: call_timeout.
        breaks: whether a timeout breaks the ranks, which may still run the call.
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

    def _output(self) -> str:
        return "" if self._logs is None else f"; its last output is in {self._logs.directory}"
