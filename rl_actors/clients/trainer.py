"""The client of a trainer. Every method returns a Call: `await` it in a program, or use `.result()` in a REPL.

A method checks its arguments in the caller's thread, so that the traceback of an error shows the caller's line. It also copies arguments
that the caller may change. Only the send is queued.
"""

import asyncio
import contextlib
import os
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import cloudpickle

from rl_actors import metrics
from rl_actors.clients.base import Client
from rl_actors.clients.call import Call, in_background
from rl_actors.clients.conversion import as_tensors, merge_outputs
from rl_actors.clients.generator import GeneratorClient, check_config
from rl_actors.clients.limits import TrainerLimits
from rl_actors.config import GeneratorConfig, TrainerConfig
from rl_actors.losses import LogprobGradient, Loss, resolve
from rl_actors.losses.custom import CustomLoss, logprob_gradients
from rl_actors.parts import PARTS, HostMove, Part, of_all_ranks, require_parts
from rl_actors.policy_trainer import Order, PolicyTrainer
from rl_actors.processes.output import LogRoute
from rl_actors.transports.base import Transport, announce
from rl_actors.transports.default import default_transport
from rl_actors.types import (
    ForwardBackwardOutput,
    OptimParams,
    OptimResult,
    Sample,
    SampleList,
    TrainerInfo,
)
from rl_actors.validation import require_config, require_gpus, require_optimizer

if TYPE_CHECKING:
    from monarch.actor import ActorMesh

T = TypeVar("T")
Check = Callable[[TrainerLimits], None]
"""A function that raises ValueError or TypeError for a call that the trainer would refuse."""

CLOSE_SAVE_TIMEOUT = 60.0
"""Seconds that `close` waits for a checkpoint that is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint whose state is copied. The ranks may still be writing it."""

    path: str
    policy_version: int
    wait: Callable[[], Call[None]] = field(repr=False)
    """Returns a call that is done when the directory is complete on disk. It raises RuntimeError with path and rank if a rank could not write."""


class TrainerClient(Client):
    """The client of a trainer mesh, and its only sender. Calls run one at a time on all ranks, in the order in which they were made.

    >>> trainer = TrainerClient.spawn(config)                                  # doctest: +SKIP
    >>> trainer.forward_backward(samples, loss="cross_entropy").result()       # doctest: +SKIP
    >>> trainer.optim_step(OptimParams(learning_rate=1e-3)).result()           # doctest: +SKIP

    Bad input is refused by the method, in the caller's thread. Some checks need the limits of the trainer. A client that did not spawn it
    knows them after the setup; before that, these checks run when it is the call's turn.
    """

    def __init__(
        self,
        mesh: "ActorMesh[PolicyTrainer] | None",
        *,
        transport: Transport | Call[Transport] | None = None,
        call_timeout: float = TrainerConfig.call_timeout,
        setup_timeout: float = TrainerConfig.setup_timeout,
        name: str = "trainer",
        config: TrainerConfig | None = None,
        logs: LogRoute | None = None,
    ) -> None:
        """Make a client of a PolicyTrainer mesh that the caller spawned and will stop.

        config and logs are for `spawn`, which passes no mesh.
        """
        super().__init__(mesh, name=name, call_timeout=call_timeout, setup_timeout=setup_timeout, logs=logs)
        self.config = config
        self._limits = TrainerLimits.of_config(config) if config is not None else None
        self._transport = None if isinstance(transport, Call) else transport
        self._owns_transport = False
        self._session = uuid.uuid4().hex[:12]
        self._number = 0  # number of the last request that was sent
        self._turn: asyncio.Lock  # held by the call whose turn it is; made on the background loop
        self._writing: Call[None] | None = None  # the writing of the last save_checkpoint
        # The writing of the last save_checkpoint, until wait() is called. If it fails before, the next optim_step or save_checkpoint raises.
        self._unwaited: Call[None] | None = None
        self._gradient_calls: list[Call[ForwardBackwardOutput]] = []  # since the last optim_step or discard_gradients
        self._opened: Call[Transport | None] = in_background(
            self._open_transport(transport), f"{name}: opening the transport"
        )
        self._start()

    @classmethod
    def spawn(
        cls,
        config: TrainerConfig,
        *,
        transport: Transport | Call[Transport] | None = None,
        name: str = "trainer",
        logs: LogRoute | None = None,
    ) -> "TrainerClient":
        """Spawn processes on this host and build the model in them. Returns at once; the answer to the first call waits for the start.

        transport: an open transport, or the call that opens it; the caller closes it. None: a torchstore, or a small actor if torchstore is not
        installed, which this client opens and closes.
        Raises ValueError if no trainer can be built from the config, or if there are too few GPUs.
        """
        require_config("TrainerClient.spawn", config, TrainerConfig)
        config.validate()
        require_gpus(config)
        timeouts = {"call_timeout": config.call_timeout, "setup_timeout": config.setup_timeout}
        return cls(None, transport=transport, name=name, config=config, logs=logs, **timeouts)

    async def _open_transport(self, given: Transport | Call[Transport] | None) -> Transport | None:
        if isinstance(given, Call):
            self._transport = await given
        if self._mesh is not None or self._transport is not None:
            return self._transport
        async with self._spawning:  # a `close` during the opening waits for its end, and then closes the transport
            self._require_open("setup")
            self._transport, self._owns_transport = default_transport(), True
            await self._transport.open()
        return self._transport

    async def _set_up(self) -> None:
        self._turn = asyncio.Lock()
        if self._mesh is None:
            assert self.config is not None
            processes = await self._spawn(self.config.num_processes())
            self._mesh = processes.spawn(self.name, PolicyTrainer, self.config, await self._opened)
        await self._opened
        infos: list[TrainerInfo] = await self._ask(self._mesh.setup, "setup", self.setup_timeout, self._session)
        self._version = infos[0].policy_version
        self._limits = TrainerLimits.of_info(infos[0])
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
        """The TrainerInfo of every rank, in the order of the ranks."""
        return self._in_turn("info", self._infos)

    async def _infos(self) -> list[TrainerInfo]:
        assert self._mesh is not None
        infos: list[TrainerInfo] = await self._ask(self._mesh.info, "info", self.call_timeout)
        return sorted(infos, key=lambda info: info.rank)

    def forward(
        self, samples: Sequence[Sample], loss: str | Loss | None = None, *, entropy: bool = False
    ) -> Call[ForwardBackwardOutput]:
        """Logprobs of the targets, without gradients. Nothing changes.

        A loss adds the metrics that forward_backward would report. `entropy` adds the entropy of the whole distribution.
        """
        resolved = None if loss is None else resolve(loss)
        copies = as_tensors(samples)
        return self._in_turn(
            "forward",
            self._run,
            "forward",
            copies,
            _as_sent(loss, resolved),
            entropy,
            check=lambda limits: limits.check_samples(copies, resolved),
        )

    def forward_backward(
        self, samples: Sequence[Sample], loss: str | Loss, *, entropy: bool = False
    ) -> Call[ForwardBackwardOutput]:
        """Add the gradient of the summed loss. Gradients accumulate over any number of calls, until optim_step.

        loss: a name, an instance such as PPO(), or the "module:name" of your own loss, which client and ranks import.
        """
        resolved = resolve(loss)
        copies = as_tensors(samples)
        return self._with_gradients(
            "forward_backward",
            self._run,
            "forward_backward",
            copies,
            _as_sent(loss, resolved),
            entropy,
            check=lambda limits: limits.check_training("forward_backward", copies, resolved),
        )

    def forward_backward_custom(self, samples: Sequence[Sample], loss: CustomLoss) -> Call[ForwardBackwardOutput]:
        """Add the gradient of a loss that this process computes from the logprobs. It costs one more forward.

        loss(samples, logprobs) -> (scalar, metrics). logprobs has one differentiable Tensor [T] for each sample. Samples may have any
        columns, because columns are not sent. The output has the metrics of the loss, and loss:sum.

        >>> trainer.forward_backward_custom(samples, lambda samples, logprobs: (-torch.cat(logprobs).sum(), {}))  # doctest: +SKIP
        """
        if not callable(loss):
            raise TypeError(f"loss is {loss!r}; it must be a function of (samples, logprobs)")
        given = list(samples) if isinstance(samples, Sequence) else samples
        copies = as_tensors(samples)
        return self._with_gradients(
            "forward_backward_custom",
            self._run_custom,
            given,
            copies,
            loss,
            check=lambda limits: limits.check_training("forward_backward_custom", copies, None),
        )

    def _with_gradients(
        self, what: str, send: Callable[..., Awaitable[ForwardBackwardOutput]], *arguments: object, check: Check
    ) -> Call[ForwardBackwardOutput]:
        """_in_turn for a call that adds gradients. If the call fails and nobody asks for its answer, the next optim_step raises its error."""
        call = self._in_turn(what, send, *arguments, check=check)
        self._gradient_calls = [earlier for earlier in self._gradient_calls if earlier.may_fail_unasked()]
        self._gradient_calls.append(call)
        return call

    async def _run(
        self, endpoint: str, samples: Sequence[Sample], loss: str | Loss | None, entropy: bool
    ) -> ForwardBackwardOutput:
        outputs = await self._ordered(endpoint, SampleList(samples), loss, entropy)
        return merge_outputs(len(samples), outputs)

    async def _run_custom(self, given: list[Sample], copies: list[Sample], loss: CustomLoss) -> ForwardBackwardOutput:
        bare = [replace(sample, columns={}) for sample in copies]
        known = await self._run("forward", bare, None, False)
        # In another thread, because a user's function may take long and other clients share the loop.
        gradients, partials = await asyncio.to_thread(logprob_gradients, loss, given, known.logprobs)
        carriers = []
        for sample, gradient in zip(bare, gradients, strict=True):
            carriers.append(replace(sample, columns={"logprob_grads": gradient}))
        assert self._limits is not None
        self._limits.check_samples(carriers, LogprobGradient())
        output = await self._run("forward_backward", carriers, LogprobGradient(), False)
        return replace(output, metrics=metrics.finish(partials), partials=partials)

    def optim_step(self, params: OptimParams) -> Call[OptimResult]:
        """Divide the gradients by params.grad_divisor, clip them, step the optimizer, and clear the gradients.

        Raises the error of a forward_backward or save_checkpoint that failed and whose answer nobody asked for. The optimizer then does
        not step.
        """
        call = self._in_turn(
            "optim_step",
            self._optim_step,
            params,
            self._gradient_calls,
            check=lambda limits: limits.check_optim_params(params),
        )
        self._gradient_calls = []
        return call

    async def _optim_step(self, params: OptimParams, gradient_calls: list[Call[ForwardBackwardOutput]]) -> OptimResult:
        for call in gradient_calls:
            failure = await call.unasked_failure()
            if failure is not None:
                failure.add_note(
                    f"{call!r}: nobody asked for its answer, so optim_step raises its error and has not stepped"
                )
                raise failure
        self._raise_failed_save()
        return await self._first("optim_step", params)

    def discard_gradients(self) -> Call[None]:
        """Drop the accumulated gradients. If a timeout broke the client, this repairs it as soon as the ranks answer again."""
        call = self._in_turn("discard_gradients", self._discard_gradients, mends=True)
        self._gradient_calls = []
        return call

    async def _discard_gradients(self) -> None:
        await self._first("discard_gradients")
        self._broken = None

    def save_checkpoint(self, path: str, *, optimizer: bool = True) -> Call[SavedCheckpoint]:
        """Copy model, optimizer and policy_version, and write them to a directory. The directory never holds half a checkpoint.

        Answers when the state is copied. The `.wait()` of the answer is done when it is on disk. If the writing fails and nobody waits for
        it, the next optim_step or save_checkpoint raises the error and does nothing else.
        """
        return self._in_turn(
            "save_checkpoint",
            self._save_checkpoint,
            os.path.abspath(path),
            optimizer,
            check=lambda limits: limits.check_state("save_checkpoint", optimizer),
        )

    async def _save_checkpoint(self, path: str, optimizer: bool) -> SavedCheckpoint:
        # The ranks' wait_for_checkpoint waits for the newest checkpoint, so there is one at a time.
        if self._writing is not None:
            with contextlib.suppress(Exception):
                await self._writing
        self._raise_failed_save()
        version = await self._first("save_checkpoint", path, optimizer)
        writing = in_background(self._write(path), f"{self.name}: writing {path}")
        self._writing = self._unwaited = writing
        return SavedCheckpoint(path=path, policy_version=version, wait=lambda: self._wait_for(writing))

    async def _write(self, path: str) -> None:
        # This call is not in turn, because the ranks run other calls while they write.
        assert self._mesh is not None
        await self._ask(self._mesh.wait_for_checkpoint, f"writing {path}", self.call_timeout, breaks=False)

    def _wait_for(self, writing: Call[None]) -> Call[None]:
        if self._unwaited is writing:
            self._unwaited = None
        return writing

    def _raise_failed_save(self) -> None:
        if self._unwaited is not None and self._unwaited.done():
            ended, self._unwaited = self._unwaited, None
            ended.result()

    def load_checkpoint(self, path: str, *, optimizer: bool = True) -> Call[int]:
        """Read a directory that save_checkpoint wrote under any layout, and return its policy_version.

        optimizer=False: load only the weights, and reset the optimizer to the state that it has in a new trainer.
        """
        return self._in_turn(
            "load_checkpoint",
            self._first,
            "load_checkpoint",
            os.path.abspath(path),
            optimizer,
            check=lambda limits: limits.check_state("load_checkpoint", optimizer),
        )

    def export_hf(self, path: str, dtype: Literal["float32", "bfloat16"] = "float32") -> Call[None]:
        """Write a new directory that transformers and vLLM load: config.json, safetensors, and the trainer's tokenizer if it has one."""
        return self._in_turn("export_hf", self._first, "export_hf", os.path.abspath(path), dtype)

    def export_lora(self, path: str) -> Call[None]:
        """Write the adapters to a new directory. peft and vLLM load them for the model in hf_path."""
        return self._in_turn("export_lora", self._first, "export_lora", os.path.abspath(path))

    def profile(self, directory: str, *, steps: int = 1) -> Call[None]:
        """Trace the next `steps` steps with torch.profiler. The last optim_step answers after <directory>/rank-N.json is written."""
        return self._in_turn(
            "profile",
            self._first,
            "profile",
            os.path.abspath(directory),
            steps,
            check=lambda limits: require_optimizer("profile", limits.optimizer),
        )

    def offload(self, parts: Collection[Part] = PARTS) -> Call[HostMove]:
        """Move weights, gradients and optimizer state, or some of them, to the host, and free their memory on the devices.

        The host's memory is made at the first offload and kept; beside a GPU it is pinned. Every later call first brings back what it needs:
        forward, pushes and exports the weights; forward_backward the weights and gradients; optim_step everything; checkpoints the weights
        and the optimizer state. Refused, by RuntimeError, while a step is broken. On a CPU it saves no memory.
        """
        require_parts("offload", parts)
        return self._in_turn("offload", self._move, "offload", list(parts))

    def onload(self, parts: Collection[Part] = PARTS) -> Call[HostMove]:
        """Move the parts back to the devices, with the same bits. Does nothing for parts that are there."""
        require_parts("onload", parts)
        return self._in_turn("onload", self._move, "onload", list(parts))

    async def _move(self, endpoint: str, parts: list[Part]) -> HostMove:
        return of_all_ranks(await self._ordered(endpoint, parts))

    def push_model_state_dict(self) -> Call[int]:
        """Publish the weights under policy_version, so that generators can pull them, and return policy_version."""
        return self._in_turn("push_model_state_dict", self._first, "push_model_state_dict")

    def spawn_generator(
        self, config: GeneratorConfig | None = None, *, name: str = "generator", logs: LogRoute | None = None
    ) -> GeneratorClient:
        """Spawn a generator of the trainer's model, with its current weights. Returns at once; the answer to its first call waits for the start.

        Raises ValueError for a model that vLLM cannot run as the trainer does: one with values, or one with an expert bias.
        """
        if self.config is not None:
            self.config.require_hf("spawn_generator")
        if config is None:
            if self.config is None:
                raise ValueError("spawn_generator needs a GeneratorConfig: this client did not spawn its trainer")
            config = GeneratorConfig.of(self.config)
        check_config(config)  # before the push
        push = self._in_turn("push_model_state_dict", self._push_for, config.dtype)
        return GeneratorClient.spawn(config, transport=self._opened, name=name, logs=logs, first_version=push)

    async def _push_for(self, dtype: str) -> int:
        assert self._transport is not None
        await announce(self._transport, dtype)  # the generator cannot do so, because it is not up yet
        return await self._first("push_model_state_dict")

    def _in_turn(
        self,
        what: str,
        send: Callable[..., Awaitable[T]],
        *arguments: object,
        check: Check | None = None,
        mends: bool = False,
    ) -> Call[T]:
        """Check the call now, and send it when all earlier calls have been answered.

        mends: True for a call that is sent even if the client is broken.
        """
        self._require_open(what)
        self._show_start()
        if check is not None and self._limits is not None:
            check(self._limits)
            check = None
        return in_background(self._wait_and_send(what, send, arguments, check, mends), f"{self.name}: {what}")

    async def _wait_and_send(
        self,
        what: str,
        send: Callable[..., Awaitable[T]],
        arguments: tuple[object, ...],
        check: Check | None,
        mends: bool,
    ) -> T:
        await self._started
        async with self._turn:  # first come, first served
            if self._broken and not mends:
                raise RuntimeError(f"{self.name} is broken: {self._broken}; call discard_gradients, or spawn it again")
            if check is not None:
                assert self._limits is not None
                check(self._limits)
            return await send(*arguments)

    async def _first(self, endpoint: str, *args: object) -> Any:
        """The answer of rank 0."""
        return (await self._ordered(endpoint, *args))[0]

    async def _ordered(self, endpoint: str, *args: object) -> list[Any]:
        """The answers of all ranks to the next request of this client's session."""
        # Check that the arguments can be sent before a number is used. The ranks would refuse every number after one that never arrives.
        for arg in args:
            if callable(arg):
                cloudpickle.dumps(arg)
        self._number += 1
        order = Order(session=self._session, number=self._number)
        answers: list[Any] = await self._ask(
            getattr(self._mesh, endpoint), endpoint, self.call_timeout, *args, order=order
        )
        self._remember_version(answers[0])
        return answers

    def _remember_version(self, answer: object) -> None:
        version = getattr(answer, "policy_version", None)
        if version is not None:
            self._version = version


def _as_sent(given: str | Loss | None, resolved: Loss | None) -> str | Loss | None:
    """The loss in the form in which it is sent. A name is sent as a name, and the ranks look it up or import it."""
    return given if isinstance(given, str) else resolved
