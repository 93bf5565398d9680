"""What the clients of trainer and generator share: starting once, closing once, errors that say where they come from. Computes nothing."""

import asyncio
import atexit
import contextlib
import weakref
from typing import Any

from monarch.actor import ActorError

from rl_actors.clients.call import Call, in_background
from rl_actors.processes.spawn import LogRoute, ProcessMesh, collect, spawn_processes
from rl_actors.transports.base import Transport

_open_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


class Client:
    """Over a mesh that the caller spawned, or over processes of its own."""

    name: str
    setup_timeout: float
    call_timeout: float
    _started: Call[None]

    def __init__(self, mesh: Any = None, transport: Transport | None = None) -> None:
        self._mesh = mesh
        self._transport = transport
        self._processes: ProcessMesh | None = None
        self._probes: list[Any] = []  # on processes of the caller's
        self._spawning = asyncio.Lock()
        self._closed = False
        self._broken: str | None = None

    def ready(self) -> Call[None]:
        """Done when the actor is up; raises what kept it from it."""
        return self._started

    def is_alive(self, timeout: float = 5.0) -> Call[bool]:
        """Whether every process of the actor answers within `timeout` seconds, also while a call runs in it.

        False before it is up and once the client is closed.
        """
        return in_background(self._is_alive(timeout), f"{self.name}: is_alive")

    async def _is_alive(self, timeout: float) -> bool:
        probes = self._probes if self._processes is None else [self._processes.probe]
        if self._closed or not probes:
            return False
        asked = asyncio.gather(*(self._answers(probe.who, "is_alive") for probe in probes))
        try:
            await asyncio.wait_for(asked, timeout)
        except Exception:
            return False
        return True

    def close(self) -> Call[None]:
        """End the processes that this client spawned, and nothing else. A second call does nothing."""
        self._closed = True
        _open_clients.discard(self)
        return in_background(self._close(), f"{self.name}: close")

    def _remember(self) -> None:
        """End the processes when the program ends without close."""
        _open_clients.add(self)

    async def _spawn(self, num_processes: int, logs: LogRoute | None, env: dict[str, str] | None = None) -> Any:
        async with self._spawning:  # a close that comes meanwhile finds what it must stop
            if self._closed:
                raise RuntimeError(f"{self.name}: closed before it was up")
            self._processes = await spawn_processes(self.name, num_processes, env=env, logs=logs)
            # The last handler that was registered runs first, and Monarch registers its own when it is first used.
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        return self._processes.mesh

    async def _close(self) -> None:
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

    async def _ask(
        self, endpoint: Any, phase: str, timeout: float, *args: Any, breaks: bool = True, **kwargs: Any
    ) -> list[Any]:
        """Call all ranks and collect their answers. What a rank raised is raised here, with a note of where it was.

        breaks: a timeout leaves the ranks at it, so that none but a mending call may follow.
        """
        if self._closed:
            raise RuntimeError(f"{self.name}: {phase} after close")
        try:
            return await asyncio.wait_for(self._answers(endpoint, phase, *args, **kwargs), timeout)
        except TimeoutError:
            late = f"{phase} did not answer within {timeout:g} s"
            self._broken = late if breaks else self._broken
            raise TimeoutError(f"{self.name}: {late}; its ranks may still be at it") from None
        except ActorError as error:
            cause = error.exception
            cause.add_note(f"raised in {self.name}, rank {getattr(cause, 'rank', 'unknown')}, {phase}: {error}")
            raise cause from None
        except Exception as error:
            error.add_note(f"raised by {self.name} in {phase}")
            raise

    async def _answers(self, endpoint: Any, phase: str, *args: Any, **kwargs: Any) -> list[Any]:
        """What the ranks answer. Raises RuntimeError as soon as a process that this client spawned has ended."""
        if self._processes is None:
            return await collect(endpoint, *args, **kwargs)
        answers = asyncio.ensure_future(collect(endpoint, *args, **kwargs))
        end = asyncio.ensure_future(self._processes.first_end())
        try:
            await asyncio.wait((answers, end), return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                raise RuntimeError(f"{self.name}: the process of {end.result()} ended during {phase}")
            return answers.result()
        finally:
            answers.cancel()
            end.cancel()


def _close_all() -> None:
    """Leaving a REPL without close ends the processes, too."""
    for closing in [client.close() for client in list(_open_clients)]:
        with contextlib.suppress(Exception):
            closing.result(timeout=10)
