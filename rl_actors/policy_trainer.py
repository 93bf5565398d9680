"""`PolicyTrainer`, the Monarch actor of one rank of a trainer. It passes its calls on to the rank's
TrainEngine.

Every rank must get the same calls in the same order, so one client sends them, each with an Order.
"""

import asyncio
import contextvars
import inspect
import traceback
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import torch.distributed as dist
from monarch.actor import Actor, concurrent_endpoint, endpoint

from rl_actors import memory_estimate
from rl_actors.config import TrainerConfig
from rl_actors.losses import Loss
from rl_actors.parts import PARTS, HostMove, Part
from rl_actors.processes import collector
from rl_actors.processes.errors import sends_errors
from rl_actors.processes.output import route_library_logs
from rl_actors.processes.spawn import Probe, probe_here
from rl_actors.transports.base import Manifest, Transport, find
from rl_actors.transports.publisher import Publisher
from rl_actors.types import (
    FIRST_TENANT,
    CollectiveTimeoutError,
    OptimParams,
    OptimResult,
    RankOutput,
    Sample,
    TrainerInfo,
    Transfer,
)

if TYPE_CHECKING:
    from rl_actors.engine.train_engine import TrainEngine

T = TypeVar("T")
PULL_TIMEOUT = 60.0
"""Seconds for a version to be published, as the default of GeneratorClient.pull_model_state_dict.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Number of a call in a client's session, and its tenant.

    A session lasts from the client's `setup` to that of another client. Calls count from 1 over all
    tenants. The last number again gives the last answer again; any other but the next is an error.
    """

    session: str
    number: int
    tenant: str = FIRST_TENANT


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Generic[T]):
    """Answer or error of a call, kept for a repeated call."""

    value: T | None = None
    error: Exception | None = None

    def give(self) -> T:
        if self.error is not None:
            raise self.error
        return cast(T, self.value)


class PolicyTrainer(Actor):
    """One rank of a trainer.

    A call without an Order runs for the first tenant as it arrives, for programs that are the only
    caller.
    """

    # set by setup
    engine: "TrainEngine"
    compiler_context: contextvars.Context
    rank: int

    def __init__(self, config: TrainerConfig, transport: Transport | None = None) -> None:
        self.config = config
        self.transport = transport
        self.session: str | None = None
        self.last_number = 0
        self.last_reply: Reply[object] | None = None
        self.publisher: Publisher | None = None  # None before setup, or without a transport
        self.last_push: Transfer | None = None
        self.written: Future[None] | None = None  # of the last save_checkpoint

    def __repr__(self) -> str:
        return f"PolicyTrainer({self.rank if hasattr(self, 'rank') else 'not set up'})"

    @endpoint
    @sends_errors
    async def setup(self, session: str | None = None) -> TrainerInfo:
        """Build the model once, and from now on accept only orders of `session`."""
        if not hasattr(self, "engine"):
            self.build()
        self.session, self.last_number, self.last_reply = session, 0, None
        return self.engine.info(FIRST_TENANT)

    def build(self) -> None:
        route_library_logs("trainer")
        # only a rank's process imports torchtitan, and an ImportError reaches the caller
        with collector.importing():
            from rl_actors.engine.collectives import by_rank
            from rl_actors.engine.train_engine import TrainEngine

        self.engine = TrainEngine(self.config)
        # torch's compiler settings are context variables, and Monarch runs each message in its own
        # context
        self.compiler_context = contextvars.copy_context()
        self.rank = dist.get_rank()
        if self.transport is not None:
            self.transport.training_bytes = memory_estimate.memory(self.config).total
            self.publisher = Publisher(self.transport, rank=self.rank, gather=by_rank)
        # keeps collections, which run when samples arrive, off the objects of the setup
        collector.keep(collect=True)

    @endpoint
    @sends_errors
    async def info(self, tenant: str = FIRST_TENANT) -> TrainerInfo:
        return replace(self.engine.info(tenant), last_push=self.last_push)

    @endpoint
    async def probe(self) -> Probe:
        """A Probe in this process, which answers even while this actor runs a call."""
        return await probe_here()

    @endpoint
    async def forward(
        self,
        samples: Sequence[Sample],
        loss: str | Loss | None = None,
        entropy: bool = False,
        order: Order | None = None,
    ) -> RankOutput:
        """Logprobs of the targets, or values; with a loss also its metrics, with `entropy` the
        entropies. Changes nothing.
        """
        return await self.in_order(order, lambda: self.engine.forward(samples, loss, entropy=entropy))

    @endpoint
    async def forward_backward(
        self, samples: Sequence[Sample], loss: str | Loss, entropy: bool = False, order: Order | None = None
    ) -> RankOutput:
        return await self.in_order(order, lambda: self.engine.forward_backward(samples, loss, entropy=entropy))

    @endpoint
    async def optim_step(self, params: OptimParams, order: Order | None = None) -> OptimResult:
        """Divide and clip the gradients, step, clear. A gradient norm that is not finite skips the
        step, else policy_version grows by one.
        """
        return await self.in_order(order, lambda: self.engine.optim_step(params))

    @endpoint
    async def discard_gradients(self, order: Order | None = None) -> None:
        return await self.in_order(order, lambda: self.engine.discard_gradients())

    @endpoint
    async def save_checkpoint(self, path: str, optimizer: bool = True, order: Order | None = None) -> int:
        """Copy weights, policy_version and optionally the optimizer state, and begin to write.
        Returns policy_version.
        """
        return await self.in_order(order, lambda: self.begin_checkpoint(path, optimizer))

    def begin_checkpoint(self, path: str, optimizer: bool) -> int:
        self.written = self.engine.save_checkpoint(path, optimizer=optimizer)
        return self.engine.policy_version

    @concurrent_endpoint
    @sends_errors
    async def wait_for_checkpoint(self) -> None:
        """Wait until the last save_checkpoint is on disk, while other calls run. Raises the error
        of the write.
        """
        if self.written is not None:
            await asyncio.wrap_future(self.written)

    @endpoint
    async def load_checkpoint(self, path: str, optimizer: bool = True, order: Order | None = None) -> int:
        """Read weights, policy_version and optionally the optimizer state. Returns policy_version.

        Later pushes begin a new stream, because their numbers may be used already.
        """
        return await self.in_order(order, lambda: self.read_checkpoint(path, optimizer))

    def read_checkpoint(self, path: str, optimizer: bool) -> int:
        version = self.engine.load_checkpoint(path, optimizer=optimizer)
        if self.publisher is not None:
            self.publisher.start_stream()
        return version

    @endpoint
    async def export_hf(self, path: str, dtype: str = "float32", order: Order | None = None) -> None:
        """With adapters merged."""
        return await self.in_order(order, lambda: self.engine.export_hf(path, dtype))

    @endpoint
    async def export_lora(self, path: str, order: Order | None = None) -> None:
        """In peft's format."""
        return await self.in_order(order, lambda: self.engine.export_lora(path))

    @endpoint
    async def new_tenant(self, name: str, seed: int = 0, order: Order | None = None) -> None:
        """Add a tenant, with adapters initialized by this seed."""
        return await self.in_order(order, lambda: self.engine.new_tenant(name, seed))

    @endpoint
    async def drop_tenant(self, name: str, order: Order | None = None) -> None:
        """Forget a tenant."""
        return await self.in_order(order, lambda: self.engine.drop_tenant(name))

    @endpoint
    async def profile(self, directory: str, steps: int, order: Order | None = None) -> None:
        """With torch.profiler, over the next `steps` optimizer steps."""
        return await self.in_order(order, lambda: self.engine.profile(directory, steps))

    @endpoint
    async def offload(self, parts: Collection[Part] = PARTS, order: Order | None = None) -> HostMove:
        """Move parts of this rank's memory to the host. Later calls bring back what they need."""
        return await self.in_order(order, lambda: self.engine.offload(parts))

    @endpoint
    async def onload(self, parts: Collection[Part] = PARTS, order: Order | None = None) -> HostMove:
        return await self.in_order(order, lambda: self.engine.onload(parts))

    @endpoint
    async def push_model_state_dict(self, order: Order | None = None) -> int:
        """Publish this rank's shards of the first tenant's weights as version policy_version, and
        return it.

        In the widest dtype that generators have announced, float32 if none. Does nothing if the
        stream has this version already.
        """
        return await self.in_order(order, self.publish_weights)

    async def publish_weights(self) -> int:
        self.engine.step.require("push_model_state_dict")
        self.config.require_hf("push_model_state_dict")
        tenant = self.engine.tenants.name_in_use
        if tenant != FIRST_TENANT:
            raise ValueError(
                f"push_model_state_dict is not possible for tenant {tenant!r}: a trainer publishes only the versions of its first "
                "tenant; call export_lora or export_hf"
            )
        if self.publisher is None:
            raise RuntimeError("push_model_state_dict: this trainer was made without a transport")
        pushed = await self.publisher.publish(self.engine.policy_version, self.engine.hf_state_dict)
        self.last_push = pushed or self.last_push
        return self.engine.policy_version

    @endpoint
    async def pull_model_state_dict(self, version: int, order: Order | None = None) -> int:
        """Load a version that another trainer has published, into a language model without
        optimizer and adapters.
        """
        return await self.in_order(order, lambda: self.load_version(version))

    async def load_version(self, version: int) -> int:
        self.engine.step.require("pull_model_state_dict")
        if self.publisher is None:
            raise RuntimeError("pull_model_state_dict: this trainer was made without a transport")
        manifest = await self.find_together(version, self.publisher)
        source = await self.publisher.transport.source(manifest)
        with source.open() as opened:
            return self.engine.load_published(opened, version)

    async def find_together(self, version: int, publisher: Publisher) -> Manifest:
        """The manifest that rank 0 finds, on every rank, or rank 0's error. Separate searches might
        find different streams.
        """
        found: Manifest | Exception | None = None
        if self.rank == 0:
            try:
                found = await find(publisher.transport, version, PULL_TIMEOUT)
            except Exception as error:
                found = error
        of_first = publisher.gather(found)[0]
        if isinstance(of_first, Manifest):
            return of_first
        assert of_first is not None
        raise of_first

    @sends_errors
    async def in_order(self, order: Order | None, call: Callable[[], T | Awaitable[T]]) -> T:
        """Run `call` if its number is next and keep the reply; give the kept reply if it is the
        last. Without an order just run.

        Raises RuntimeError for a replaced session, or any other number.
        """
        if order is None:
            return await self.run(FIRST_TENANT, call)
        if order.session != self.session:
            raise RuntimeError(
                f"session {order.session} was replaced by {self.session}: two clients drive this trainer"
            )
        if order.number == self.last_number and self.last_reply is not None:
            return cast(T, self.last_reply.give())
        if order.number != self.last_number + 1:
            raise RuntimeError(f"call number {order.number} does not follow {self.last_number}; it was not run")
        self.last_number = order.number
        try:
            self.last_reply = Reply(value=await self.run(order.tenant, call))
        except Exception as error:
            self.last_reply = Reply(error=error)
        return cast(T, self.last_reply.give())

    async def run(self, tenant: str, call: Callable[[], T | Awaitable[T]]) -> T:
        """Run `call` for a tenant. Raises CollectiveTimeoutError if this rank has waited too long
        for another.
        """
        from rl_actors.engine import deadlines

        def call_of_tenant() -> T | Awaitable[T]:
            self.engine.use(tenant)
            return call()

        try:
            return await _settle(self.compiler_context.run(call_of_tenant))
        except Exception as error:
            if not deadlines.late(error):
                raise
            limit = f"collective_timeout={self.config.collective_timeout:g} s"
            late = CollectiveTimeoutError(f"rank {self.rank} waited longer than {limit} for another rank")
            late.add_note("".join(traceback.format_exception(error)))
            raise late from None


async def _settle(value: T | Awaitable[T]) -> T:
    return await value if inspect.isawaitable(value) else value
