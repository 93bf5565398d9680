"""The client of one tenant: a training run that shares a trainer's base model and has LoRA adapters
of its own.
"""

from typing import TYPE_CHECKING

from rl_actors.clients.call import Call, in_background
from rl_actors.clients.model_calls import TrainingCalls
from rl_actors.clients.session import Session

if TYPE_CHECKING:
    from rl_actors.clients.trainer import TrainerClient


class TenantClient(TrainingCalls):
    """A tenant's own adapters, gradients, optimizer, order of calls and policy_version.
    `TrainerClient.new_tenant` makes it.

    >>> one, other = trainer.new_tenant("one", seed=1), trainer.new_tenant("other", seed=2)   # doctest: +SKIP
    >>> one.forward_backward(samples, loss="cross_entropy")                                   # doctest: +SKIP
    >>> other.forward_backward(samples, loss="cross_entropy")                                 # doctest: +SKIP
    >>> one.optim_step(OptimParams(learning_rate=1e-3)).result()                              # doctest: +SKIP

    Only the trainer's own client can push weights, record a profile, and offload and onload memory.
    """

    def __init__(self, trainer: "TrainerClient", tenant: str, added: Call[None]) -> None:
        """added: the call that adds the tenant to the trainer."""
        self.trainer = trainer
        self.tenant = tenant
        self._session = trainer.session.of(tenant)
        self._added = added
        self._dropped: Call[None] | None = None

    def __repr__(self) -> str:
        version = "" if self.policy_version is None else f", policy_version {self.policy_version}"
        return f"<TenantClient {self.name}: {'closed' if self._session.is_closed else 'open'}{version}>"

    @property
    def session(self) -> Session:
        return self._session

    @property
    def name(self) -> str:
        return self._session.name

    @property
    def policy_version(self) -> int | None:
        """The tenant's last reported policy_version. None before the first report."""
        return self._session.version

    def ready(self) -> Call[None]:
        """A call that is done when the trainer has added the tenant, or fails with the error."""
        return self._added

    def close(self) -> Call[None]:
        """Make the trainer forget the tenant, with its adapters, gradients and optimizer state."""
        if self._dropped is None:
            self._session = self._session.closed()
            closed = self.trainer.is_closed
            self._dropped = in_background(_nothing(), self.name) if closed else self.trainer.drop_tenant(self.tenant)
        return self._dropped


async def _nothing() -> None:
    """Closes a tenant whose trainer's client is closed: it has ended already."""
