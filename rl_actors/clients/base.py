"""`Client`, the base class of the handles that users hold, and the errors of dead and silent actors."""

import atexit
import contextlib
import sys
import weakref
from collections.abc import Coroutine
from typing import TYPE_CHECKING

from monarch.actor import shutdown_context

from rl_actors.clients.call import Call, in_background
from rl_actors.processes.output import LogRoute, default_log_route, route_client_logs

if TYPE_CHECKING:
    from rl_actors.clients.fleet import Fleet
    from rl_actors.clients.ranks import Ranks
    from rl_actors.clients.remote import Connection

SHUTDOWN_TIMEOUT = 15.0  # seconds until Monarch must have shut down at the end of the program
ATTACH_TIMEOUT = 30.0  # default seconds within which a service must answer a client that attaches to it
STEP_WAIT = 60.0  # default seconds that a call to a service waits for the end of another client's step


class ActorDiedError(RuntimeError):
    """A process of an actor has ended, or its vLLM engine has failed for good."""

    def __init__(self, text: str, actor: str) -> None:
        super().__init__(text)
        self.actor = actor  # the name of its client


class ActorSilentError(TimeoutError):
    """An actor has not answered in time. Its processes may hang, or still run the call."""

    def __init__(self, text: str, actor: str) -> None:
        super().__init__(text)
        self.actor = actor  # the name of its client


_open_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


class Client:
    """Starts, watches and closes actors. A subclass sets `_actors` and calls `_start`."""

    _actors: "Ranks | Fleet"
    _started: Call[None]

    def __init__(self, name: str, *, is_owner: bool, logs: LogRoute | None, connection: "Connection | None" = None):
        """is_owner: whether the client starts the actors, and so closes them."""
        self.name = name
        self._is_owner = is_owner
        self._logs = default_log_route() if is_owner and logs is None else logs
        # who passes logs or a mesh knows where the output is
        self._is_quiet = logs is not None or not is_owner
        if not self._is_quiet:
            route_client_logs(default_log_route().of_client())
        self._connection = connection
        if connection is not None:
            weakref.finalize(self, connection.close)

    def _start(self, started: Call[None]) -> None:
        """Processes of a client that is never closed end with the program."""
        self._started = started
        if self._is_owner:
            _open_clients.add(self)

    def __repr__(self) -> str:
        version = "" if self.policy_version is None else f", policy_version {self.policy_version}"
        return f"<{type(self).__name__} {self.name}: {self._state()}{version}>"

    def _state(self) -> str:
        if self._actors.is_closed:
            return "closed"
        if not self._started.done():
            return "starting"
        return "did not start" if self._started.failed() else self._actors.state()

    @property
    def policy_version(self) -> int | None:
        """The last policy_version that the actor reported. None before the first report."""
        raise NotImplementedError

    def ready(self) -> Call[None]:
        """A call that is done when the actor is set up, or fails with the error of the start."""
        return self._started

    def is_alive(self, timeout: float = 5.0) -> Call[bool]:
        """True if every process answers within `timeout` seconds, even while it runs a call. False
        before the start (before the setup, if the caller spawned them) and after `close`.
        """
        return in_background(self._actors.is_alive(timeout), f"{self.name}: is_alive")

    def death(self, silent_after: float) -> Call[ActorDiedError | ActorSilentError | None]:
        """A call that is done when a process that this client spawned is dead: ended, or silent for
        silent_after seconds, as after a SIGSTOP. Its result is an error that names the process.

        Generators: when all are dead and not started again; silent_after is at most
        config.restarts.silent_after. None if the client is closed, has spawned no processes, or
        they did not start.
        """
        return in_background(self._actors.death(silent_after), f"{self.name}: watch of its processes")

    def seconds_silent(self) -> dict[str, float]:
        """Seconds since the last sign of life of each process that this client spawned:
        {"trainer-0": 1.2}. A trainer is asked only while a `death` runs.
        """
        return self._actors.seconds_silent()

    def kill(self) -> Call[None]:
        """Kill this client's processes on this host, although they do not answer, and close it."""
        return self._end(self._actors.kill(), "kill")

    def close(self) -> Call[None]:
        """End the processes that this client spawned, but no mesh of the caller and no service."""
        return self._end(self._actors.close(), "close")

    def _end(self, end: Coroutine[object, None, None], what: str) -> Call[None]:
        self._actors.is_closed = True
        _open_clients.discard(self)
        if self._connection is not None:
            self._connection.close()
        return in_background(end, f"{self.name}: {what}")

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close().result()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    def _begin(self, what: str) -> None:
        """Refuse a call after `close`. In a terminal or a REPL, say once that the actor is starting."""
        self._actors.require_open(what)
        if self._is_quiet or self._started.done() or not (sys.stderr.isatty() or hasattr(sys, "ps1")):
            return
        self._is_quiet = True
        assert self._logs is not None
        print(f"{self.name} is starting; its output: {self._logs.directory}", file=sys.stderr)


def close_at_exit() -> None:
    """Let `_close_all` run at the exit, before Monarch's handler, which the first spawn registers:
    handlers run last in, first out.
    """
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    """End the processes of all clients that the program or the REPL has not closed."""
    for closing in [client.close() for client in list(_open_clients)]:
        with contextlib.suppress(Exception):
            closing.result(timeout=10)
    # Monarch's own handler waits only a second for the shutdown, and then prints a traceback.
    with contextlib.suppress(Exception):
        shutdown_context().get(timeout=SHUTDOWN_TIMEOUT)
