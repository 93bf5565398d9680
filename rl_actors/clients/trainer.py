"""The callers' side of a trainer: every answer comes by `await` in a program or by `.result()` in a REPL. Holds the actor mesh."""

import asyncio
import contextlib
import os
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import cloudpickle

from rl_actors import metrics, validation
from rl_actors.clients.base import Client
from rl_actors.clients.call import Call, in_background
from rl_actors.clients.conversion import merge_outputs, to_wire
from rl_actors.clients.generator import GeneratorClient
from rl_actors.config import GeneratorConfig, TrainerConfig
from rl_actors.losses import LogprobGradient, Loss, resolve
from rl_actors.losses.custom import CustomLoss, logprob_gradients
from rl_actors.policy_trainer import Order, PolicyTrainer
from rl_actors.processes.spawn import LogRoute
from rl_actors.transports.base import Transport, announce
from rl_actors.types import (
    ForwardBackwardOutput,
    OptimParams,
    OptimResult,
    Sample,
    SampleList,
    TrainerInfo,
)
from rl_actors.validation import require_optimizer, validate_optim_params, validate_samples

T = TypeVar("T")

CLOSE_SAVE_TIMEOUT = 60.0
"""Seconds that close waits for a checkpoint that is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that is copied and may still be on its way to the disk."""

    path: str
    policy_version: int
    wait: Callable[[], Call[None]] = field(repr=False)
    """Done when the directory is whole on disk; raises RuntimeError with path and rank when it could not be written."""


class TrainerClient(Client):
    """The one sender of a trainer mesh. Calls run in the order in which they were made, one at a time, on all ranks.

    >>> trainer = TrainerClient.spawn(config)                                  # doctest: +SKIP
    >>> trainer.forward_backward(samples, loss="cross_entropy").result()       # doctest: +SKIP
    >>> trainer.optim_step(OptimParams(learning_rate=1e-3)).result()           # doctest: +SKIP
    """

    def __init__(
        self,
        mesh: Any,
        *,
        transport: Transport | None = None,
        call_timeout: float = 600.0,
        setup_timeout: float = 300.0,
        name: str = "trainer",
    ) -> None:
        """Drive a PolicyTrainer mesh that the caller spawned and will stop."""
        super().__init__(mesh, transport)
        self.name, self.call_timeout, self.setup_timeout = name, call_timeout, setup_timeout
        self._start()

    @classmethod
    def spawn(
        cls,
        config: TrainerConfig,
        *,
        transport: Transport | None = None,
        name: str = "trainer",
        logs: LogRoute | None = None,
    ) -> "TrainerClient":
        """Spawn processes on this host and build the model in them; returns at once, the first answer waits for it.

        transport: opened by whoever made it. None: a torchstore of the client's own, opened here and closed with it.
        Raises ValueError for a config that no trainer can be built from, and for fewer GPUs than it takes.
        """
        config.validate()
        validation.require_gpus(config)
        client = cls.__new__(cls)
        Client.__init__(client, transport=transport)
        client.name, client.call_timeout, client.setup_timeout = name, config.call_timeout, config.setup_timeout
        client.config = config
        client._start(logs)
        client._remember()
        return client

    config: TrainerConfig | None = None  # None: the caller spawned the mesh
    _turn: asyncio.Lock  # made on the background loop
    _writing: Call[None] | None = None  # of the last save_checkpoint
    # The same, until its wait() was called: its failure has no other way to the caller.
    _unasked: Call[None] | None = None
    _info: TrainerInfo

    def _start(self, logs: LogRoute | None = None) -> None:
        self._session = uuid.uuid4().hex[:12]
        self._number = 0
        self._owns_transport = False
        self._started = in_background(self._set_up(logs), f"{self.name}: setup")

    async def _set_up(self, logs: LogRoute | None) -> None:
        self._turn = asyncio.Lock()
        if self._mesh is None:
            if self._transport is None:
                from rl_actors.transports.torchstore import TorchStoreTransport

                async with self._spawning:  # as in _spawn
                    if self._closed:
                        raise RuntimeError(f"{self.name}: closed before it was up")
                    self._transport, self._owns_transport = TorchStoreTransport(), True
                    await self._transport.open()
            assert self.config is not None
            processes = await self._spawn(self.config.num_processes(), logs)
            self._mesh = processes.spawn(self.name, PolicyTrainer, self.config, self._transport)
        answers = await self._ask(self._mesh.setup, "setup", self.setup_timeout, self._session)
        self._info = answers[0]
        if self._processes is None:
            self._probes = await self._ask(self._mesh.probe, "setup", self.setup_timeout)

    async def _close(self) -> None:
        if self._writing is not None and self._processes is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._writing, CLOSE_SAVE_TIMEOUT)
        await super()._close()
        if self._owns_transport and self._transport is not None:
            await self._transport.close()

    def info(self) -> Call[list[TrainerInfo]]:
        """What every rank says about itself, by rank."""
        return self._in_turn("info", self._collect("info"))

    def forward(
        self, samples: Sequence[Sample], loss: str | Loss | None = None, *, entropy: bool = False
    ) -> Call[ForwardBackwardOutput]:
        """Logprobs of the targets without gradients; nothing changes. A loss adds the metrics that forward_backward would report,
        `entropy` that of the whole distribution.
        """
        return self._in_turn("forward", self._run_samples("forward", samples, loss, entropy))

    def forward_backward(
        self, samples: Sequence[Sample], loss: str | Loss, *, entropy: bool = False
    ) -> Call[ForwardBackwardOutput]:
        """Add the gradient of the summed loss; any number of calls accumulate until optim_step.

        loss: a name, an instance such as PPO(), or "module:name" of your own, which client and ranks import.
        """
        return self._in_turn("forward_backward", self._run_samples("forward_backward", samples, loss, entropy))

    def forward_backward_custom(self, samples: Sequence[Sample], loss: CustomLoss) -> Call[ForwardBackwardOutput]:
        """Add the gradient of a loss that this process computes from the logprobs, at the price of one more forward.

        loss(samples, logprobs) -> (scalar, metrics) with one differentiable Tensor [T] a sample. Samples may hold any columns; none
        is sent. The metrics are those of the loss, and loss:sum.

        >>> trainer.forward_backward_custom(samples, lambda samples, logprobs: (-torch.cat(logprobs).sum(), {}))  # doctest: +SKIP
        """
        samples = list(samples) if isinstance(samples, Sequence) else samples

        async def call() -> ForwardBackwardOutput:
            require_optimizer("forward_backward_custom", self._info.optimizer)
            self._validate(samples, None)
            bare = [replace(sample, columns={}) for sample in samples]
            known = await self._run_samples("forward", bare, None)()
            # Not on the loop: a user's function may take its time, and other clients share the loop.
            gradients, partials = await asyncio.to_thread(logprob_gradients, loss, samples, known.logprobs)
            carriers = [replace(s, columns={"logprob_grads": g}) for s, g in zip(bare, gradients, strict=True)]
            output = await self._run_samples("forward_backward", carriers, LogprobGradient())()
            return replace(output, metrics=metrics.finish(partials), partials=partials)

        return self._in_turn("forward_backward_custom", call)

    def optim_step(self, params: OptimParams) -> Call[OptimResult]:
        """Divide by params.grad_divisor, clip, step, clear."""

        async def call() -> OptimResult:
            require_optimizer("optim_step", self._info.optimizer)
            validate_optim_params(params, self._info.optimizer, self._info.optimizer_fields)
            self._raise_failed_save()
            return await self._first("optim_step", params)

        return self._in_turn("optim_step", call)

    def discard_gradients(self) -> Call[None]:
        """Drop the accumulated gradients; mends a client that a timeout broke, once the ranks answer again."""

        async def call() -> None:
            await self._first("discard_gradients")
            self._broken = None

        return self._in_turn("discard_gradients", call, mends=True)

    def save_checkpoint(self, path: str, *, optimizer: bool = True) -> Call[SavedCheckpoint]:
        """Copy model, optimizer and policy_version, and write them to a directory that is whole or is not there.

        Answers when they are copied; `.wait()` of the answer is done when they are on disk. A failure that nobody waited for
        is raised by the next optim_step or save_checkpoint, which then has done nothing.
        """
        absolute = os.path.abspath(path)

        async def call() -> SavedCheckpoint:
            if optimizer:
                require_optimizer("save_checkpoint(optimizer=True)", self._info.optimizer)
            if self._writing is not None:  # so that the ranks' wait_for_checkpoint always means the last one
                with contextlib.suppress(Exception):
                    await self._writing
            self._raise_failed_save()
            version = await self._first("save_checkpoint", absolute, optimizer)
            writing = in_background(self._durable(absolute), f"{self.name}: writing {absolute}")
            self._writing = self._unasked = writing

            def wait() -> Call[None]:
                if self._unasked is writing:
                    self._unasked = None
                return writing

            return SavedCheckpoint(path=absolute, policy_version=version, wait=wait)

        return self._in_turn("save_checkpoint", call)

    async def _durable(self, path: str) -> None:
        # Not in turn: the ranks take other calls meanwhile.
        await self._ask(self._mesh.wait_for_checkpoint, f"writing {path}", self.call_timeout, breaks=False)

    def _raise_failed_save(self) -> None:
        if self._unasked is not None and self._unasked.done():
            failed, self._unasked = self._unasked, None
            failed.result()

    def load_checkpoint(self, path: str, *, optimizer: bool = True) -> Call[int]:
        """Read a directory that save_checkpoint wrote, under any layout; returns its policy_version.

        optimizer=False: the weights alone; the optimizer then starts as that of a new trainer.
        """
        absolute = os.path.abspath(path)

        async def call() -> int:
            if optimizer:
                require_optimizer("load_checkpoint(optimizer=True)", self._info.optimizer)
            return await self._first("load_checkpoint", absolute, optimizer)

        return self._in_turn("load_checkpoint", call)

    def export_hf(self, path: str, dtype: Literal["float32", "bfloat16"] = "float32") -> Call[None]:
        """Write a new directory that transformers and vLLM load: config.json, safetensors and the tokenizer of hf_path, when it has one."""
        absolute = os.path.abspath(path)
        return self._in_turn("export_hf", lambda: self._first("export_hf", absolute, dtype))

    def export_lora(self, path: str) -> Call[None]:
        """Write the adapters to a new directory that peft and vLLM load over the weights of hf_path."""
        absolute = os.path.abspath(path)
        return self._in_turn("export_lora", lambda: self._first("export_lora", absolute))

    def profile(self, directory: str, *, steps: int = 1) -> Call[None]:
        """Trace the next `steps` steps with torch.profiler; <directory>/rank-N.json is there when the last optim_step answers."""
        absolute = os.path.abspath(directory)

        async def call() -> None:
            require_optimizer("profile", self._info.optimizer)
            await self._first("profile", absolute, steps)

        return self._in_turn("profile", call)

    def push_model_state_dict(self) -> Call[int]:
        """Publish the weights for generators under policy_version, and return it."""
        return self._in_turn("push_model_state_dict", lambda: self._first("push_model_state_dict"))

    def spawn_generator(
        self, config: GeneratorConfig | None = None, *, name: str = "generator", logs: LogRoute | None = None
    ) -> GeneratorClient:
        """A generator of the trainer's model, with its current weights. Returns at once; the first answer waits for it.

        Raises ValueError for weights that vLLM cannot route as the trainer does.
        """
        if self.config is not None:
            self.config.require_hf("spawn_generator")
        if config is None:
            if self.config is None:
                raise ValueError("spawn_generator needs a GeneratorConfig: this client did not spawn its trainer")
            config = GeneratorConfig.of(self.config)
        generator = GeneratorClient.spawn(config, transport=lambda: self._transport, name=name, logs=logs)

        async def push() -> int:
            assert self._transport is not None
            await announce(self._transport, config.dtype)  # the generator is not up yet to do so itself
            return await self._first("push_model_state_dict")

        generator._pull_first(self._in_turn("push_model_state_dict", push))
        return generator

    def _in_turn(self, what: str, call: Callable[[], Awaitable[T]], *, mends: bool = False) -> Call[T]:
        if self._closed:
            raise RuntimeError(f"{self.name}: {what} after close")

        async def run() -> T:
            await self._started
            async with self._turn:  # first come, first served
                if self._broken and not mends:
                    raise RuntimeError(
                        f"{self.name} is broken: {self._broken}; call discard_gradients, or spawn it again"
                    )
                return await call()

        return in_background(run(), f"{self.name}: {what}")

    def _validate(self, samples: Any, loss: Loss | None) -> list[Sample]:
        """The samples as they travel. Raises ValueError for what the ranks would refuse."""
        wire = [to_wire(sample) for sample in samples] if isinstance(samples, Sequence) else samples
        info = self._info
        validate_samples(
            wire,
            loss,
            vocab_size=info.vocab_size,
            max_sequence_length=info.max_sequence_length,
            max_call_bytes=info.max_call_bytes,
        )
        return wire

    def _run_samples(self, endpoint: str, samples: Sequence[Sample], loss: str | Loss | None, entropy: bool = False):
        # The caller may change its list before the call's turn comes.
        samples = list(samples) if isinstance(samples, Sequence) else samples

        async def call() -> ForwardBackwardOutput:
            if endpoint == "forward_backward":
                require_optimizer(endpoint, self._info.optimizer)
            resolved = resolve(loss) if loss is not None else None
            if endpoint == "forward_backward" and resolved is None:
                raise ValueError("unknown loss None; give a loss such as 'cross_entropy' or PPO()")
            wire = self._validate(samples, resolved)
            # A name travels as a name: the ranks import what it stands for.
            named = loss if isinstance(loss, str) else resolved
            return merge_outputs(len(wire), await self._ordered(endpoint, SampleList(wire), named, entropy))

        return call

    def _collect(self, endpoint: str):
        async def call() -> list[Any]:
            answers = await self._ask(getattr(self._mesh, endpoint), endpoint, self.call_timeout)
            return sorted(answers, key=lambda answer: answer.rank)

        return call

    async def _first(self, endpoint: str, *args: Any) -> Any:
        return (await self._ordered(endpoint, *args))[0]

    async def _ordered(self, endpoint: str, *args: Any) -> list[Any]:
        # A number is spent only once its request can be sent: the ranks would wait for one that never comes.
        for arg in args:
            cloudpickle.dumps(arg) if callable(arg) else None
        self._number += 1
        order = Order(session=self._session, number=self._number)
        return await self._ask(getattr(self._mesh, endpoint), endpoint, self.call_timeout, *args, order=order)
