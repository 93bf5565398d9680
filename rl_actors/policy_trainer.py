"""`PolicyTrainer`, the Monarch actor of one rank of a trainer, around its TrainEngine.

Every rank must get the same calls in the same order, so one client sends them, each with a CallHeader.
"""

import asyncio
import contextvars
import functools
import inspect
import traceback
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import torch
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
from rl_actors.transports.base import Manifest, Transport, wait_for_manifest
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

P = ParamSpec("P")
T = TypeVar("T")

if TYPE_CHECKING:
    from monarch.actor import Endpoint

    from rl_actors.engine.train_engine import TrainEngine

    class Verb(Endpoint[P, T], Generic[P, T]):
        """What `numbered` returns: an endpoint with arguments P and, on each rank, the answer T."""

        __name__: str


VERBS: set[str] = set()
"""Names of the endpoints that `numbered` has made."""
PULL_TIMEOUT = 60.0
"""Seconds that pull_model_state_dict waits for the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHeader:
    """The number of a call in the session of a client, and its tenant.

    A session lasts from the client's `setup` until another client's. Its calls are numbered from 1,
    over all tenants. A rank answers a repeated last number with the last answer.
    """

    session: str
    number: int
    tenant: str = FIRST_TENANT


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Generic[T]):
    """The answer or the error of the last call, in case the client repeats it."""

    value: T | None = None
    error: Exception | None = None

    def give(self) -> T:
        if self.error is not None:
            raise self.error
        return cast(T, self.value)


@overload
def numbered(method: Callable[Concatenate[Any, P], Awaitable[T]]) -> "Verb[P, T]": ...
@overload
def numbered(method: Callable[Concatenate[Any, P], T]) -> "Verb[P, T]": ...
def numbered(method: Callable[..., Any]) -> Any:
    """Make a method an endpoint that also takes `header`; see `PolicyTrainer.in_order`."""

    @functools.wraps(method)
    async def call(self: "PolicyTrainer", *args: Any, header: CallHeader | None = None, **kwargs: Any) -> Any:
        return await self.in_order(header, functools.partial(method, self, *args, **kwargs))

    # Monarch binds the arguments to this signature before it sends them.
    signature = inspect.signature(method)
    header = inspect.Parameter("header", inspect.Parameter.KEYWORD_ONLY, default=None)
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), header])  # type: ignore[attr-defined]
    verb = endpoint(call)
    verb.__name__ = method.__name__
    VERBS.add(method.__name__)
    return verb


class PolicyTrainer(Actor):
    """One rank of a trainer. A call without a header runs for the first tenant as soon as it arrives;
    a program that leaves headers out must be the only caller.
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
        """Build the model on the first call, and accept only calls of `session` from now on."""
        if not hasattr(self, "engine"):
            self.build()
        self.session = session
        self.last_number = 0
        self.last_reply = None
        return self.engine.info(FIRST_TENANT)

    def build(self) -> None:
        route_library_logs("trainer")
        # here, so that only a rank imports torchtitan, and the caller gets its ImportError
        with collector.importing():
            from rl_actors.engine.collectives import by_rank
            from rl_actors.engine.train_engine import TrainEngine

        self.engine = TrainEngine(self.config)
        # torch's compiler has settings in context variables, and Monarch's messages contexts of their own
        self.compiler_context = contextvars.copy_context()
        if torch.cuda.is_available():
            self.compiler_context.run(self.engine.warm_up)
        self.rank = dist.get_rank()
        if self.transport is not None:
            self.transport.training_bytes = memory_estimate.memory(self.config).total
            self.publisher = Publisher(self.transport, rank=self.rank, gather=by_rank)
        collector.keep(collect=True)  # else each garbage collection would look through all objects of the setup

    @endpoint
    @sends_errors
    async def info(self, tenant: str = FIRST_TENANT) -> TrainerInfo:
        return replace(self.engine.info(tenant), last_push=self.last_push)

    @endpoint
    async def probe(self) -> Probe:
        """An actor in this process that answers even while this actor runs a call."""
        return await probe_here()

    @numbered
    def forward(self, samples: Sequence[Sample], loss: str | Loss | None = None, entropy: bool = False) -> RankOutput:
        """Logprobs of the targets, or values, and the metrics of a loss. Changes nothing."""
        return self.engine.forward(samples, loss, entropy=entropy)

    @numbered
    def forward_backward(self, samples: Sequence[Sample], loss: str | Loss, entropy: bool = False) -> RankOutput:
        """Add the gradient of the summed loss."""
        return self.engine.forward_backward(samples, loss, entropy=entropy)

    @numbered
    def optim_step(self, params: OptimParams) -> OptimResult:
        """Divide, clip, step, clear. policy_version grows by one if the gradient is finite."""
        return self.engine.optim_step(params)

    @numbered
    def discard_gradients(self) -> None:
        """Drop the accumulated gradients."""
        self.engine.discard_gradients()

    @numbered
    def save_checkpoint(self, path: str, optimizer: bool = True) -> int:
        """Copy the state, and begin to write the copy. Returns policy_version."""
        self.written = self.engine.save_checkpoint(path, optimizer=optimizer)
        return self.engine.policy_version

    @concurrent_endpoint
    @sends_errors
    async def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is on disk. Other calls run meanwhile."""
        if self.written is not None:
            await asyncio.wrap_future(self.written)

    @numbered
    def load_checkpoint(self, path: str, optimizer: bool = True) -> int:
        """Read the state, and begin a new stream of versions. Returns policy_version."""
        version = self.engine.load_checkpoint(path, optimizer=optimizer)
        if self.publisher is not None:
            self.publisher.start_stream()
        return version

    @numbered
    def export_hf(self, path: str, dtype: str = "float32") -> None:
        """Write a Hugging Face directory of the weights, with adapters merged."""
        self.engine.export_hf(path, dtype)

    @numbered
    def export_lora(self, path: str) -> None:
        """Write a directory of the adapters, in peft's format."""
        self.engine.export_lora(path)

    @numbered
    def new_tenant(self, name: str, seed: int = 0) -> None:
        """Add a tenant, whose calls name it in their header."""
        self.engine.new_tenant(name, seed)

    @numbered
    def drop_tenant(self, name: str) -> None:
        """Forget a tenant."""
        self.engine.drop_tenant(name)

    @numbered
    def profile(self, directory: str, steps: int) -> None:
        """Trace the next `steps` optimizer steps with torch.profiler."""
        self.engine.profile(directory, steps)

    @numbered
    def offload(self, parts: Collection[Part] = PARTS) -> HostMove:
        """Move parts of this rank's memory to the host, until a call needs them."""
        return self.engine.offload(parts)

    @numbered
    def onload(self, parts: Collection[Part] = PARTS) -> HostMove:
        """Move parts of this rank's memory back to the device."""
        return self.engine.onload(parts)

    @numbered
    async def push_model_state_dict(self) -> int:
        """Publish this rank's shards of the first tenant's weights as the version policy_version,
        and return it; nothing if the stream has it. dtype: the widest that a generator has
        announced, or float32.
        """
        self.engine.step.require("push_model_state_dict")
        self.config.require_hf("push_model_state_dict")
        tenant = self.engine.tenants.name_in_use
        if tenant != FIRST_TENANT:
            raise ValueError(
                f"push_model_state_dict is not possible for tenant {tenant!r}: a trainer publishes only the versions of its first "
                "tenant; call export_lora or export_hf"
            )
        publisher = self.require_publisher("push_model_state_dict")
        pushed = await publisher.publish(self.engine.policy_version, self.engine.hf_state_dict)
        self.last_push = pushed or self.last_push
        return self.engine.policy_version

    @numbered
    async def pull_model_state_dict(self, version: int) -> int:
        """Load a published version into a language model without optimizer and adapters."""
        self.engine.step.require("pull_model_state_dict")
        publisher = self.require_publisher("pull_model_state_dict")
        source = await publisher.transport.source(await self.find_together(version, publisher))
        with source.open() as opened:
            return self.engine.load_published(opened, version)

    def require_publisher(self, call: str) -> Publisher:
        if self.publisher is None:
            raise RuntimeError(f"{call}: this trainer was made without a transport")
        return self.publisher

    async def find_together(self, version: int, publisher: Publisher) -> Manifest:
        """Rank 0's manifest or error, because a new stream may begin between two searches."""
        found: Manifest | Exception | None = None
        if self.rank == 0:
            try:
                found = await wait_for_manifest(publisher.transport, version, PULL_TIMEOUT)
            except Exception as error:
                found = error
        found = publisher.gather(found)[0]
        if isinstance(found, Exception):
            raise found
        return cast(Manifest, found)

    @sends_errors
    async def in_order(self, header: CallHeader | None, call: Callable[[], T | Awaitable[T]]) -> T:
        """Run `call` if its number is the next, and keep its answer or error for a repetition."""
        if header is None:
            return await self.run(FIRST_TENANT, call)
        if header.session != self.session:
            raise RuntimeError(
                f"session {header.session} was replaced by {self.session}: two clients drive this trainer"
            )
        if header.number == self.last_number and self.last_reply is not None:
            return cast(T, self.last_reply.give())
        if header.number != self.last_number + 1:
            raise RuntimeError(f"call number {header.number} does not follow {self.last_number}; it was not run")
        self.last_number = header.number
        try:
            self.last_reply = Reply(value=await self.run(header.tenant, call))
        except Exception as error:
            self.last_reply = Reply(error=error)
        return cast(T, self.last_reply.give())

    async def run(self, tenant: str, call: Callable[[], T | Awaitable[T]]) -> T:
        """The result for a tenant. Raises CollectiveTimeoutError after a too long wait for a rank."""
        from rl_actors.engine import deadlines

        def call_of_tenant() -> T | Awaitable[T]:
            self.engine.use(tenant)
            return call()

        try:
            result = self.compiler_context.run(call_of_tenant)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            if not deadlines.late(error):
                raise
            limit = f"collective_timeout={self.config.collective_timeout:g} s"
            late = CollectiveTimeoutError(f"rank {self.rank} waited longer than {limit} for another rank")
            late.add_note("".join(traceback.format_exception(error)))
            raise late from None
