"""`PolicyTrainer`, the Monarch actor of one rank of a trainer. It passes its calls on to the rank's TrainEngine.

Every rank must get the same calls in the same order, so only one client may send them. The client sends an Order with
each call. A rank refuses a call whose Order has a wrong number, and a call of a client that another client has replaced.

A tenant is one of several training runs that share the trainer's base model. Each tenant trains its own adapters. Every
trainer has the tenant FIRST_TENANT. A trainer without adapters has no other tenant.
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
"""Seconds that pull_model_state_dict waits until the version is published. The `timeout` of
GeneratorClient.pull_model_state_dict has the same default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The number of a call in the session of a client, and the tenant whose call it is.

    A session begins with the client's `setup` call, and ends when another client calls `setup`. The calls of a session
    have the numbers 1, 2, 3, …  A call that repeats the last number gets the last answer again. A call whose number is
    neither the last nor the next raises an error. All tenants share the numbers, because every rank runs one call at a
    time.
    """

    session: str
    number: int
    tenant: str = FIRST_TENANT


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Generic[T]):
    """The answer or the error of a call. The actor keeps it, because the client may repeat the call."""

    value: T | None = None
    error: Exception | None = None

    def give(self) -> T:
        if self.error is not None:
            raise self.error
        return cast(T, self.value)


class PolicyTrainer(Actor):
    """One rank of a trainer. All its endpoints but setup, info, probe and wait_for_checkpoint take an Order.

    If the Order of a call is left out, the call runs for the first tenant as soon as it arrives. A program that leaves
    out the Order must be the only caller.
    """

    # The next three attributes exist after setup.
    engine: "TrainEngine"
    compiler_context: contextvars.Context
    rank: int

    def __init__(self, config: TrainerConfig, transport: Transport | None = None) -> None:
        self.config = config
        self.transport = transport
        self.session: str | None = None
        self.last_number = 0
        self.last_reply: Reply[object] | None = None
        self.publisher: Publisher | None = None  # None before setup, and without a transport
        self.last_push: Transfer | None = None
        self.written: Future[None] | None = None  # done when the checkpoint of the last save_checkpoint is on disk

    def __repr__(self) -> str:
        return f"PolicyTrainer({self.rank if hasattr(self, 'rank') else 'not set up'})"

    @endpoint
    @sends_errors
    async def setup(self, session: str | None = None) -> TrainerInfo:
        """Build the model on the first call, and accept only orders of `session` from now on."""
        if not hasattr(self, "engine"):
            self.build()
        self.session, self.last_number, self.last_reply = session, 0, None
        return self.engine.info(FIRST_TENANT)

    def build(self) -> None:
        route_library_logs("trainer")
        # Imported here, so that only the process of a rank imports torchtitan. If the import fails, the caller gets the ImportError.
        with collector.importing():
            from rl_actors.engine.collectives import by_rank
            from rl_actors.engine.train_engine import TrainEngine

        self.engine = TrainEngine(self.config)
        # torch keeps the settings of its compiler in context variables, and Monarch runs each message in a context of its own. So every
        # call runs in this copy of the context in which the engine was built.
        self.compiler_context = contextvars.copy_context()
        self.rank = dist.get_rank()
        if self.transport is not None:
            self.transport.training_bytes = memory_estimate.memory(self.config).total
            self.publisher = Publisher(self.transport, rank=self.rank, gather=by_rank)
        # Garbage collections run when samples arrive. Each of them would look through all objects of the setup. This
        # call excludes these objects from later collections.
        collector.keep(collect=True)

    @endpoint
    @sends_errors
    async def info(self, tenant: str = FIRST_TENANT) -> TrainerInfo:
        return replace(self.engine.info(tenant), last_push=self.last_push)

    @endpoint
    async def probe(self) -> Probe:
        """A Probe, which is another actor in the process of this actor. The Probe also answers while this actor runs a call."""
        return await probe_here()

    @endpoint
    async def forward(
        self,
        samples: Sequence[Sample],
        loss: str | Loss | None = None,
        entropy: bool = False,
        order: Order | None = None,
    ) -> RankOutput:
        """Compute the logprobs of the targets, or the values of a value model. Changes nothing.

        If a loss is given, also compute its metrics. If `entropy` is True, also compute the entropies.
        """
        return await self.in_order(order, lambda: self.engine.forward(samples, loss, entropy=entropy))

    @endpoint
    async def forward_backward(
        self, samples: Sequence[Sample], loss: str | Loss, entropy: bool = False, order: Order | None = None
    ) -> RankOutput:
        """Add the gradient of the summed loss to the accumulated gradients."""
        return await self.in_order(order, lambda: self.engine.forward_backward(samples, loss, entropy=entropy))

    @endpoint
    async def optim_step(self, params: OptimParams, order: Order | None = None) -> OptimResult:
        """Divide and clip the gradients, step the optimizer, clear the gradients.

        If the gradient norm is finite, policy_version grows by one. If not, the optimizer does not step.
        """
        return await self.in_order(order, lambda: self.engine.optim_step(params))

    @endpoint
    async def discard_gradients(self, order: Order | None = None) -> None:
        """Drop the accumulated gradients."""
        return await self.in_order(order, lambda: self.engine.discard_gradients())

    @endpoint
    async def save_checkpoint(self, path: str, optimizer: bool = True, order: Order | None = None) -> int:
        """Copy weights, policy_version and, if `optimizer` is True, the optimizer state, and begin to write the copies.

        Returns policy_version.
        """
        return await self.in_order(order, lambda: self.begin_checkpoint(path, optimizer))

    def begin_checkpoint(self, path: str, optimizer: bool) -> int:
        self.written = self.engine.save_checkpoint(path, optimizer=optimizer)
        return self.engine.policy_version

    @concurrent_endpoint
    @sends_errors
    async def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint of the last save_checkpoint call is complete on disk. Other calls run meanwhile.

        Raises the error of the write, if the write has failed.
        """
        if self.written is not None:
            await asyncio.wrap_future(self.written)

    @endpoint
    async def load_checkpoint(self, path: str, optimizer: bool = True, order: Order | None = None) -> int:
        """Read weights, policy_version and, if `optimizer` is True, the optimizer state. Returns policy_version.

        Later pushes publish a new stream of versions, because the numbers of these versions may have been used already
        (see Manifest).
        """
        return await self.in_order(order, lambda: self.read_checkpoint(path, optimizer))

    def read_checkpoint(self, path: str, optimizer: bool) -> int:
        version = self.engine.load_checkpoint(path, optimizer=optimizer)
        if self.publisher is not None:
            self.publisher.start_stream()
        return version

    @endpoint
    async def export_hf(self, path: str, dtype: str = "float32", order: Order | None = None) -> None:
        """Write a Hugging Face directory of the weights, with adapters merged."""
        return await self.in_order(order, lambda: self.engine.export_hf(path, dtype))

    @endpoint
    async def export_lora(self, path: str, order: Order | None = None) -> None:
        """Write a directory of the adapters, in peft's format."""
        return await self.in_order(order, lambda: self.engine.export_lora(path))

    @endpoint
    async def new_tenant(self, name: str, seed: int = 0, order: Order | None = None) -> None:
        """Add a tenant. Its adapters are initialized with this seed. Calls for the tenant name it in Order.tenant."""
        return await self.in_order(order, lambda: self.engine.new_tenant(name, seed))

    @endpoint
    async def drop_tenant(self, name: str, order: Order | None = None) -> None:
        """Forget a tenant."""
        return await self.in_order(order, lambda: self.engine.drop_tenant(name))

    @endpoint
    async def profile(self, directory: str, steps: int, order: Order | None = None) -> None:
        """Trace the next `steps` optimizer steps with torch.profiler, and write the trace to `directory`."""
        return await self.in_order(order, lambda: self.engine.profile(directory, steps))

    @endpoint
    async def offload(self, parts: Collection[Part] = PARTS, order: Order | None = None) -> HostMove:
        """Move parts of this rank's memory to the host. A later call brings back the parts that it needs."""
        return await self.in_order(order, lambda: self.engine.offload(parts))

    @endpoint
    async def onload(self, parts: Collection[Part] = PARTS, order: Order | None = None) -> HostMove:
        """Move parts of this rank's memory back to the device."""
        return await self.in_order(order, lambda: self.engine.onload(parts))

    @endpoint
    async def push_model_state_dict(self, order: Order | None = None) -> int:
        """Publish the weights of the first tenant through the transport, as the version policy_version. Each rank
        publishes its own shards. Returns policy_version.

        Each generator announces its dtype to the transport. The published tensors have the widest announced dtype, or
        float32 if no generator has announced a dtype. If the current stream (see Manifest) still has this version in
        this dtype, nothing is published.
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
        """Load the weights of a version that another trainer has published. Only a language model without an optimizer
        and without adapters can load them.
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
        """Rank 0 looks for the manifest of the version. Every rank returns the manifest that rank 0 found, or raises rank 0's error.

        A manifest lists the tensors of a version. If every rank looked for itself, the ranks could find different
        manifests, because the pushing trainer may begin a new stream meanwhile.
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
        """Run `call` if `order` has the next number, and keep the answer or the error. If `order` has the last number,
        return the kept answer or raise the kept error again.

        Without an order, run `call` and keep nothing.
        Raises RuntimeError if the session of the order was replaced, or if the number of the order is neither the last
        nor the next.
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
        """The result of `call` for a tenant. Raises CollectiveTimeoutError if this rank has waited too long for another
        rank.
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
