"""The client of one tenant. A tenant is one of several training runs that share a trainer and its base model. Each tenant has LoRA adapters of its own.

This client sends nothing itself. The trainer's client sends the calls of all tenants, in the order in which they were queued.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rl_actors.clients.call import Call, in_background
from rl_actors.clients.limits import TrainerLimits
from rl_actors.clients.model_calls import Check, TrainingCalls
from rl_actors.types import TrainerInfo

if TYPE_CHECKING:
    from rl_actors.clients.trainer import TrainerClient

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The functions of a trainer's client through which the client of a tenant works."""

    in_turn: Callable[..., Call[Any]]
    """`in_turn(what, send, *arguments, check=, mends=, tenant=)` queues a call of `tenant`. ModelCalls._in_turn explains the arguments before `tenant`."""
    send: Callable[..., Awaitable[list[Any]]]
    """`send(tenant, endpoint, *arguments)` sends a call to all ranks and returns their answers."""
    infos: Callable[..., Awaitable[list[TrainerInfo]]]
    """`infos(tenant)` returns the TrainerInfo of every rank."""
    mend: Callable[[str], None]
    """After a timeout the trainer's client refuses the calls of all tenants. `mend(tenant)` lets it send calls again. If another
    tenant's call got no answer either, the calls of that tenant stay refused until `mend` is called for that tenant."""
    write: Callable[[str], Awaitable[None]]
    """`write(path)` waits until the ranks have written the checkpoint `path` to disk."""
    limits: Callable[[], TrainerLimits | None]
    """Returns the limits of the trainer, or None until the trainer has started."""
    writing: Callable[[], Call[None] | None]
    """Returns the call that writes the trainer's last checkpoint, or None if no checkpoint was saved."""
    set_writing: Callable[[Call[None] | None], None]
    """Stores the call that writes the trainer's last checkpoint."""


class TenantClient(TrainingCalls):
    """The client of one tenant of a trainer. A tenant has its own adapters, gradients, optimizer, order of calls and policy_version.

    >>> one, other = trainer.new_tenant("one", seed=1), trainer.new_tenant("other", seed=2)   # doctest: +SKIP
    >>> one.forward_backward(samples, loss="cross_entropy")                                   # doctest: +SKIP
    >>> other.forward_backward(samples, loss="cross_entropy")                                 # doctest: +SKIP
    >>> one.optim_step(OptimParams(learning_rate=1e-3)).result()                              # doctest: +SKIP

    Only the trainer's own client can push weights, record a profile, and offload and onload memory.
    """

    _version: int | None = None

    def __init__(self, trainer: "TrainerClient", tenant: str, made: Call[None], access: Access) -> None:
        """made: the call that adds the tenant to the trainer. Use TrainerClient.new_tenant, which calls this constructor."""
        self.trainer, self.tenant = trainer, tenant
        self._access = access
        self.name = f"{trainer.name}, tenant {tenant}"
        self._made = made
        self._dropped: Call[None] | None = None

    def __repr__(self) -> str:
        version = "" if self._version is None else f", policy_version {self._version}"
        return f"<TenantClient {self.name}: {'closed' if self._dropped is not None else 'open'}{version}>"

    @property
    def policy_version(self) -> int | None:
        """The last policy_version that the trainer reported for this tenant. None before the first answer."""
        return self._version

    def ready(self) -> Call[None]:
        """A call that is done when the trainer has added the tenant. If adding the tenant fails, the call raises the error."""
        return self._made

    def info(self) -> Call[list[TrainerInfo]]:
        """The TrainerInfo of every rank. Its fields state, policy_version and steps_skipped are those of this tenant."""
        return self._in_turn("info", self._access.infos, self.tenant)

    def close(self) -> Call[None]:
        """Make the trainer forget the tenant, with its adapters, gradients and optimizer state. A second call does nothing."""
        if self._dropped is None:
            closed = self.trainer.is_closed
            self._dropped = in_background(_nothing(), self.name) if closed else self.trainer.drop_tenant(self.tenant)
        return self._dropped

    def _in_turn(
        self,
        what: str,
        send: Callable[..., Awaitable[T]],
        *arguments: object,
        check: Check | None = None,
        mends: bool = False,
    ) -> Call[T]:
        if self._dropped is not None:
            raise RuntimeError(f"{self.name}: {what} is not possible after close")
        return self._access.in_turn(what, send, *arguments, check=check, mends=mends, tenant=self.tenant)

    async def _ordered(self, endpoint: str, *args: object) -> list[Any]:
        answers = await self._access.send(self.tenant, endpoint, *args)
        self._remember_version(answers[0])
        return answers

    def _mend(self) -> None:
        self._access.mend(self.tenant)

    async def _write(self, path: str) -> None:
        await self._access.write(path)

    @property
    def _limits(self) -> TrainerLimits | None:  # type: ignore[override]
        return self._access.limits()

    @property
    def _writing(self) -> Call[None] | None:  # type: ignore[override]
        return self._access.writing()

    @_writing.setter
    def _writing(self, writing: Call[None] | None) -> None:
        self._access.set_writing(writing)


async def _nothing() -> None:
    """Does nothing. `TenantClient.close` calls this function if the trainer's client is closed, because the tenant has then ended already."""
