"""The client of a trainer. Unless a method says otherwise, it returns a Call: `await` it in a program, or use `.result()` in a REPL.

A method checks its arguments in the caller's thread, so that the traceback of an error shows the caller's line. It also copies arguments
that the caller may change. Only the sending is queued.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from rl_actors import metrics
from rl_actors.clients.call import Call, in_background
from rl_actors.clients.conversion import as_tensors
from rl_actors.clients.generator import GeneratorClient, check_config
from rl_actors.clients.model import Check, ModelClient, as_sent
from rl_actors.config import GeneratorConfig, LoRAConfig, TrainerConfig
from rl_actors.losses import LogprobGradient, Loss, resolve
from rl_actors.losses.custom import CustomLoss, ValueGradient, output_gradients
from rl_actors.processes.output import LogRoute
from rl_actors.transports.base import announce
from rl_actors.types import ForwardBackwardOutput, OptimParams, OptimResult, Sample
from rl_actors.validation import require_optimizer

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

    from rl_actors.clients.reference import ReferenceClient
    from rl_actors.clients.value_trainer import ValueTrainerClient

CLOSE_SAVE_TIMEOUT = 60.0
"""Seconds that `close` waits for a checkpoint that is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint whose state is copied. The ranks may still be writing it."""

    path: str
    policy_version: int
    wait: Callable[[], Call[None]] = field(repr=False)
    """Returns a call that is done when the directory is complete on disk. The call raises RuntimeError with path and rank if a rank could
    not write."""


class TrainerClient(ModelClient):
    """The client of a trainer. Its base class, ModelClient, has `spawn`, `attach` and the calls that do not train. It sends calls in order.

    >>> trainer = TrainerClient.spawn(config)                                  # doctest: +SKIP
    >>> trainer.forward_backward(samples, loss="cross_entropy").result()       # doctest: +SKIP
    >>> trainer.optim_step(OptimParams(learning_rate=1e-3)).result()           # doctest: +SKIP
    """

    default_name: ClassVar[str] = "trainer"
    opens_transport: ClassVar[bool] = True

    # The writing of the last save_checkpoint.
    _writing: Call[None] | None = None
    # The same Call, until `wait` of its SavedCheckpoint is called. If the writing fails before that, the next optim_step or
    # save_checkpoint raises the error.
    _unwaited: Call[None] | None = None
    # The calls that added gradients since the last optim_step or discard_gradients.
    _gradient_calls: Sequence[Call[ForwardBackwardOutput]] = ()

    async def _close(self) -> None:
        if self._writing is not None and (self._processes is not None or self._stops_actor):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._writing, CLOSE_SAVE_TIMEOUT)
        await super()._close()

    def forward_backward(
        self, samples: Sequence[Sample], loss: str | Loss, *, entropy: bool = False
    ) -> Call[ForwardBackwardOutput]:
        """Add the gradient of the summed loss. Gradients accumulate over any number of calls, until optim_step or discard_gradients.

        loss: a name, an instance such as PPO(), or the "module:name" of your own loss, which client and ranks import.
        """
        resolved = resolve(loss)
        copies = as_tensors(samples)
        return self._with_gradients(
            "forward_backward",
            self._run,
            "forward_backward",
            copies,
            as_sent(loss, resolved),
            entropy,
            check=lambda limits: limits.check_training("forward_backward", copies, resolved),
        )

    def forward_backward_custom(self, samples: Sequence[Sample], loss: CustomLoss) -> Call[ForwardBackwardOutput]:
        """Add the gradient of a loss that this process computes from the logprobs. It costs one more forward pass.

        loss(samples, logprobs) -> (scalar, metrics). logprobs has one differentiable Tensor [T] for each sample; for a value model these
        are values. Samples may have any columns, because columns are not sent. The output has the metrics of the loss, and loss:sum.

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
        """`_in_turn` for a call that adds gradients. If it fails and nobody asks for its answer, the next optim_step raises its error."""
        call = self._in_turn(what, send, *arguments, check=check)
        unasked = [earlier for earlier in self._gradient_calls if earlier.may_fail_unasked()]
        self._gradient_calls = [*unasked, call]
        return call

    async def _run_custom(self, given: list[Sample], copies: list[Sample], loss: CustomLoss) -> ForwardBackwardOutput:
        bare = [replace(sample, columns={}) for sample in copies]
        known = await self._run("forward", bare, None, False)
        outputs = known.logprobs if known.values is None else known.values
        carrier = LogprobGradient() if known.values is None else ValueGradient()
        # The loss runs in another thread, because a user's function may take long and other clients share the loop.
        gradients, partials = await asyncio.to_thread(output_gradients, loss, given, outputs)
        carriers = []
        for sample, gradient in zip(bare, gradients, strict=True):
            carriers.append(replace(sample, columns={carrier.column: gradient}))
        assert self._limits is not None
        self._limits.check_samples(carriers, carrier)
        output = await self._run("forward_backward", carriers, carrier, False)
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
        self._gradient_calls = ()
        return call

    async def _optim_step(
        self, params: OptimParams, gradient_calls: Sequence[Call[ForwardBackwardOutput]]
    ) -> OptimResult:
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
        """Drop the accumulated gradients. If a timeout broke the client, this call repairs it as soon as the ranks answer again."""
        call = self._in_turn("discard_gradients", self._discard_gradients, mends=True)
        self._gradient_calls = ()
        return call

    async def _discard_gradients(self) -> None:
        await self._first("discard_gradients")
        self._broken = None

    def save_checkpoint(self, path: str, *, optimizer: bool = True) -> Call[SavedCheckpoint]:
        """Copy weights, optimizer state and policy_version, and write them. The directory appears only when the checkpoint is complete.

        The answer comes when the state is copied. The call that `.wait()` of the answer returns is done when the directory is complete on
        disk. If the writing fails and nobody waits for it, the next optim_step or save_checkpoint raises the error and does nothing else.
        """
        return self._in_turn(
            "save_checkpoint",
            self._save_checkpoint,
            os.path.abspath(path),
            optimizer,
            check=lambda limits: limits.check_state("save_checkpoint", optimizer),
        )

    async def _save_checkpoint(self, path: str, optimizer: bool) -> SavedCheckpoint:
        # The ranks' wait_for_checkpoint waits for the newest checkpoint, so only one is written at a time.
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
        return self._load_checkpoint(path, optimizer=optimizer)

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

    def push_model_state_dict(self) -> Call[int]:
        """Publish the weights under policy_version, so that generators can pull them, and return policy_version."""
        return self._in_turn("push_model_state_dict", self._first, "push_model_state_dict")

    def spawn_generator(
        self, config: GeneratorConfig | None = None, *, name: str = "generator", logs: LogRoute | None = None
    ) -> GeneratorClient:
        """Spawn a generator with the model and the current weights of the trainer. Returns at once; its first answer waits for the start.

        Raises ValueError for a model that vLLM cannot run as the trainer does: a value model, or a model with an expert bias. Also raises it
        for a client that is attached to a service, and if `config` is None although this client did not spawn its trainer.
        """
        if self._lease is not None:
            raise ValueError(
                f"{self.name} is attached to a service and cannot add a generator to it; "
                f"use GeneratorClient.attach({str(self._lease.address)!r})"
            )
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
        await announce(self._transport, dtype)  # the generator cannot do so, because it has not started yet
        return await self._first("push_model_state_dict")

    def spawn_value_trainer(
        self,
        config: TrainerConfig | None = None,
        processes: "ProcMesh | ModelClient | None" = None,
        *,
        checkpoint: str = "",
        name: str = "value_trainer",
        logs: LogRoute | None = None,
    ) -> "ValueTrainerClient":
        """Spawn a value model, which is trained like a policy. Returns its client at once; the first answer waits for the start.

        config: of the value model; its field `head` is replaced by "values". None: the config of this trainer, without adapters.
        processes, checkpoint: see `spawn`. With this client as `processes`, the value model is built beside the policy. The checkpoint may
        also be one of a policy with the same dimensions; the head of the value model then starts at zero.
        Raises ValueError as `spawn` does.
        """
        from rl_actors.clients.value_trainer import ValueTrainerClient

        own = config or replace(self._known_config("spawn_value_trainer"), lora=LoRAConfig())
        return ValueTrainerClient.spawn(own, processes=processes, checkpoint=checkpoint, name=name, logs=logs)

    def spawn_reference(
        self,
        config: TrainerConfig | None = None,
        processes: "ProcMesh | ModelClient | None" = None,
        *,
        checkpoint: str = "",
        name: str = "reference",
        logs: LogRoute | None = None,
    ) -> "ReferenceClient":
        """Spawn a model that only infers. Returns its client at once; the first answer waits for the start.

        config: of the model. None: the config of this trainer. The client's `refresh(version)` takes versions that this trainer has
        pushed. A program may have several such models, for example a teacher with another config.
        processes, checkpoint: see `spawn`. Raises ValueError as `spawn` does.
        """
        from rl_actors.clients.reference import ReferenceClient

        own = config or self._known_config("spawn_reference")
        return ReferenceClient.spawn(
            own, transport=self._opened, processes=processes, checkpoint=checkpoint, name=name, logs=logs
        )

    def _known_config(self, call: str) -> TrainerConfig:
        if self.config is None:
            raise ValueError(f"{call} needs a TrainerConfig: this client did not spawn its trainer")
        return self.config
