"""`Session`, the only way to the ranks of a model: one call at a time, in order, on all ranks.

>>> session.call(PolicyTrainer.export_lora, "/tmp/adapter")            # doctest: +SKIP
>>> session.of("a").call(PolicyTrainer.export_lora, "/tmp/adapter")    # for tenant "a"; doctest: +SKIP
"""

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import cloudpickle

from rl_actors.clients.base import ActorSilentError
from rl_actors.clients.call import Call, in_background
from rl_actors.clients.limits import TrainerLimits
from rl_actors.policy_trainer import CallHeader
from rl_actors.types import FIRST_TENANT, TrainerInfo

if TYPE_CHECKING:
    from rl_actors.clients.model import ModelClient
    from rl_actors.policy_trainer import Verb

P = ParamSpec("P")
T = TypeVar("T")
Check = Callable[[TrainerLimits], None]
"""Raises ValueError or TypeError for a call that the ranks would refuse."""


@dataclass(slots=True, kw_only=True)
class Shared:
    """What the sessions of all tenants of a client share. It refers to no client."""

    limits: TrainerLimits | None  # None before the setup of a mesh that the caller spawned
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    number: int = 0  # of the last request that was sent
    turn: asyncio.Lock = field(init=False)  # held by the running call; made on the background event loop
    versions: dict[str, int] = field(default_factory=dict)  # tenant -> its last reported policy_version
    # Tenant -> why its calls are refused until it discards its gradients, which a timeout left
    # unknown.
    unanswered: dict[str, str] = field(default_factory=dict)
    writing: Call[None] | None = None  # writes the newest checkpoint, whichever tenant saved it


@dataclass(frozen=True, slots=True)
class Session:
    """The calls of one tenant of a client."""

    client: "ModelClient"
    tenant: str = FIRST_TENANT
    is_closed: bool = False

    @property
    def shared(self) -> Shared:
        return self.client.shared

    @property
    def name(self) -> str:
        return self.client.name if self.tenant == FIRST_TENANT else f"{self.client.name}, tenant {self.tenant}"

    @property
    def version(self) -> int | None:
        return self.shared.versions.get(self.tenant)

    def of(self, tenant: str) -> "Session":
        return Session(self.client, tenant)

    def closed(self) -> "Session":
        """This session, refusing further calls."""
        return replace(self, is_closed=True)

    def call(self, verb: "Verb[P, T]", *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        """Queue a call. Its answer is rank 0's."""
        return self.queue(verb.__name__, lambda: self.first(verb, *args, **kwargs))

    def queue(
        self,
        what: str,
        work: Callable[[], Coroutine[object, None, T]],
        *,
        check: Check | None = None,
        when_broken: bool = False,
    ) -> Call[T]:
        """Queue `work`, which sends requests by `first` and `send` when its turn has come.

        check: runs now if the limits are known, else just before `work`. when_broken: run even
        after a timeout.
        """
        if self.is_closed:
            raise RuntimeError(f"{self.name}: {what} is not possible after close")
        self.client.require_open(what)
        self.client.show_start()
        if check is not None and self.shared.limits is not None:
            check(self.shared.limits)
            check = None
        return in_background(self._in_turn(work, check, when_broken), f"{self.name}: {what}")

    async def _in_turn(
        self, work: Callable[[], Coroutine[object, None, T]], check: Check | None, when_broken: bool
    ) -> T:
        await self.client.ready()
        async with self.shared.turn:  # first come, first served
            broken = self.client.broken or self.shared.unanswered.get(self.tenant)
            if broken and not when_broken:
                raise RuntimeError(f"{self.client.name} is broken: {broken}; call discard_gradients, or spawn it again")
            if check is not None:
                assert self.shared.limits is not None
                check(self.shared.limits)
            return await work()

    async def first(self, verb: "Verb[P, T]", *args: P.args, **kwargs: P.kwargs) -> T:
        """`send`, for the answer of rank 0."""
        return (await self.send(verb, *args, **kwargs))[0]

    async def send(self, verb: "Verb[P, T]", *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Send the next request, and return the answers of all ranks."""
        # If pickling failed after the request has its number, the ranks would refuse all later
        # numbers.
        for arg in args:
            if callable(arg):
                cloudpickle.dumps(arg)
        self.shared.number += 1
        header = CallHeader(session=self.shared.id, number=self.shared.number, tenant=self.tenant)
        try:
            answers: list[T] = await self.client.ask(verb.__name__, *args, named={**kwargs, "header": header})
        except ActorSilentError:
            self.shared.unanswered[self.tenant] = str(self.client.broken)
            raise
        version = getattr(answers[0], "policy_version", None)
        if version is not None:
            self.shared.versions[self.tenant] = version
        return answers

    def repair(self) -> None:
        """Record that the ranks answer again and that this tenant has no gradients."""
        self.client.broken = None
        self.shared.unanswered.pop(self.tenant, None)

    def forget(self) -> None:
        """Drop what is remembered of a tenant that is gone."""
        self.shared.unanswered.pop(self.tenant, None)
        self.shared.versions.pop(self.tenant, None)

    async def infos(self) -> list[TrainerInfo]:
        infos: list[TrainerInfo] = await self.client.ask("info", self.tenant)
        return sorted(infos, key=lambda info: info.rank)

    async def written(self, path: str) -> None:
        """Wait until the newest checkpoint is on disk, while the ranks run other calls."""
        await self.client.ask("wait_for_checkpoint", phase=f"writing {path}", breaks=False)
