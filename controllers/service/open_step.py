"""`OpenStep` lets only one client of a service at a time have an open training step.

forward_backward opens it, optim_step or discard_gradients closes it; save_checkpoint,
load_checkpoint and profile open one and close it when they succeed.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_actors.clients.completions import GenerateCall

CHANGING = frozenset(
    ("forward_backward", "optim_step", "discard_gradients", "save_checkpoint", "load_checkpoint", "profile")
)
"""Endpoints of a trainer that wait while another client has an open step."""


@dataclass(eq=False, slots=True, kw_only=True)
class AttachedClient:
    """A client that is connected to the service."""

    number: int
    name: str  # for logs: "trainer, pid 4242 on host-3"
    member: str  # the actor that it calls: "trainer", "generator", …
    since: float = field(default_factory=time.time)
    num_calls: int = 0
    has_left: bool = False
    # calls that wait for another client's step
    waiting: "set[asyncio.Task[bool]]" = field(default_factory=set)
    generations: "dict[int, GenerateCall]" = field(default_factory=dict)  # by the number that the client knows

    def __str__(self) -> str:
        return f"client {self.number} ({self.name})"


class OpenStep:
    """A lock on one trainer's open step, in the order of calls, for one event loop."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()
        self.holder: AttachedClient | None = None
        self._held_since = 0.0

    async def enter(self, client: AttachedClient, endpoint: str, step_wait: float) -> None:
        """Wait until no other client has an open step, and open one for this client, unless it has one.

        Raises RuntimeError, naming the other, after `step_wait` seconds, or if `client` leaves.
        """
        if self.holder is client:
            return
        acquiring = asyncio.ensure_future(self._free.acquire())
        client.waiting.add(acquiring)
        try:
            await asyncio.wait((acquiring,), timeout=step_wait)
            if not acquiring.done():
                raise RuntimeError(
                    f"{endpoint} waited {step_wait:g} s, and {self.holder} still has the step that it opened "
                    f"{time.monotonic() - self._held_since:.0f} s ago; "
                    "try again when it has called optim_step or discard_gradients, or has ended"
                )
        finally:
            client.waiting.discard(acquiring)
            acquiring.cancel()
        if client.has_left or acquiring.cancelled():
            if not acquiring.cancelled():
                self._free.release()
            raise RuntimeError(f"{endpoint} was not run: {client} has left")
        self.holder = client
        self._held_since = time.monotonic()

    def leave(self, client: AttachedClient) -> None:
        """Close this client's step, if it has one."""
        if self.holder is client:
            self.holder = None
            self._free.release()

    def seconds(self) -> float:
        """Since the step was opened; 0 without one."""
        return 0.0 if self.holder is None else time.monotonic() - self._held_since
