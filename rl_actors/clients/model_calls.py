"""Two base classes of clients. `ModelCalls` has the calls of a model. `TrainingCalls` adds the calls that train
and save.

The clients of a trainer and of a tenant inherit both. A tenant is one of several training runs that share a trainer.
Each tenant has adapters of its own.

A method checks its arguments in the caller's thread, so that the traceback of an error shows the caller's line. The method also copies
lists, because the caller may change them before they are sent. A tensor or an array is copied only if its dtype or device must change. Then
the method puts the call into a queue, which sends the calls in order. The subclasses implement the queue.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from rl_actors import metrics
from rl_actors.clients.call import Call, in_background
from rl_actors.clients.conversion import as_tensors, merge_outputs
from rl_actors.clients.limits import TrainerLimits
from rl_actors.losses import LogprobGradient, Loss, resolve
from rl_actors.losses.custom import CustomLoss, ValueGradient, output_gradients
from rl_actors.types import ForwardBackwardOutput, OptimParams, OptimResult, Sample, SampleList

T = TypeVar("T")
Check = Callable[[TrainerLimits], None]
"""A function of the trainer's limits. It raises ValueError or TypeError if the trainer would refuse the call."""


def as_sent(given: str | Loss | None, resolved: Loss | None) -> str | Loss | None:
    """The loss as it is sent to the ranks. A name is sent as a name, and the ranks look up the name or import the loss.

    given: the caller's argument. resolved: the result of resolve(given).
    """
    return given if isinstance(given, str) else resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint whose state has been copied. The ranks may still be writing the copy to disk."""

    path: str
    policy_version: int
    wait: Callable[[], Call[None]] = field(repr=False)
    """Returns a call that is done when the directory is complete on disk. If a rank could not write, the call raises RuntimeError, naming
    path and rank."""


class ModelCalls:
    """The calls that every model has, even a model that is not trained."""

    name: str  # name of the client
    _limits: TrainerLimits | None
    _version: int | None  # the last policy_version that the ranks reported

    def _in_turn(
        self,
        what: str,
        send: Callable[..., Awaitable[T]],
        *arguments: object,
        check: Check | None = None,
        mends: bool = False,
    ) -> Call[T]:
        """Check a call and queue it. The call is sent when all earlier calls have been answered.

        what: name of the call, for error texts.
        send: function that sends the call and returns the answer. It is called with `arguments`.
        check: runs at once if the client knows the limits of the model, otherwise just before the call is sent.
        mends: True for a call that is sent even if the client is broken. A timeout breaks the client. A broken client refuses all calls without
        `mends`. discard_gradients has mends=True, and repairs the client.
        """
        raise NotImplementedError

    def _mend(self) -> None:
        """Record that the ranks answer again and that this client's tenant has no gradients, so that the client is no longer broken. The
        tenant of a TrainerClient is the first tenant.
        """
        raise NotImplementedError

    async def _ordered(self, endpoint: str, *args: object) -> list[Any]:
        """Send a numbered request to all ranks, and return their answers. Every rank runs the client's requests in the order of their numbers."""
        raise NotImplementedError

    def forward(
        self, samples: Sequence[Sample], loss: str | Loss | None = None, *, entropy: bool = False
    ) -> Call[ForwardBackwardOutput]:
        """Logprobs of the targets, or values of a value model, without gradients. The call changes nothing in the model.

        With a loss, the output also has the metrics that forward_backward would report. With entropy=True it also has the entropy of the
        whole distribution at each position.
        """
        resolved = None if loss is None else resolve(loss)
        copies = as_tensors(samples)
        return self._in_turn(
            "forward",
            self._run,
            "forward",
            copies,
            as_sent(loss, resolved),
            entropy,
            check=lambda limits: limits.check_samples(copies, resolved),
        )

    async def _run(
        self, endpoint: str, samples: Sequence[Sample], loss: str | Loss | None, entropy: bool
    ) -> ForwardBackwardOutput:
        outputs = await self._ordered(endpoint, SampleList(samples), loss, entropy)
        return merge_outputs(len(samples), outputs)

    def _load_checkpoint(self, path: str, *, optimizer: bool) -> Call[int]:
        return self._in_turn(
            "load_checkpoint",
            self._first,
            "load_checkpoint",
            os.path.abspath(path),
            optimizer,
            check=lambda limits: limits.check_state("load_checkpoint", optimizer),
        )

    async def _first(self, endpoint: str, *args: object) -> Any:
        """The answer of rank 0."""
        return (await self._ordered(endpoint, *args))[0]

    def _remember_version(self, answer: object) -> None:
        version = getattr(answer, "policy_version", None)
        if version is not None:
            self._version = version


class TrainingCalls(ModelCalls):
    """The calls by which a trainer trains, saves and exports."""

    _writing: Call[None] | None  # the call that writes the trainer's last checkpoint, whichever tenant saved it
    # The call that writes this tenant's last checkpoint, until the caller calls `wait` of the SavedCheckpoint. If the writing fails before
    # that, the next optim_step or save_checkpoint raises the error.
    _unwaited: Call[None] | None = None
    # The calls that added gradients since the last optim_step or discard_gradients.
    _gradient_calls: Sequence[Call[ForwardBackwardOutput]] = ()

    async def _write(self, path: str) -> None:
        """Wait until the newest checkpoint is on disk."""
        raise NotImplementedError

    def forward_backward(
        self, samples: Sequence[Sample], loss: str | Loss, *, entropy: bool = False
    ) -> Call[ForwardBackwardOutput]:
        """Add the gradient of the summed loss. Gradients accumulate over any number of calls, until optim_step or discard_gradients.

        loss: a name, an instance such as PPO(), or the "module:name" of your own loss, which client and ranks import.
        entropy: see `forward`.
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
        """Add the gradient of a loss that this process computes from the logprobs. The call needs one forward pass more than forward_backward.

        loss: function of (samples, logprobs) that returns (scalar, metrics). logprobs has one differentiable tensor for each sample, with
        one logprob for each position. For a value model these tensors hold values instead. Samples may have any columns, because columns
        are not sent. The output has the metrics of the loss, and loss:sum.

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
        """`_in_turn` for a call that adds gradients. If the call fails and nobody asks for its answer, the next optim_step raises the error."""
        call = self._in_turn(what, send, *arguments, check=check)
        unasked = [earlier for earlier in self._gradient_calls if earlier.may_fail_unasked()]
        self._gradient_calls = [*unasked, call]
        return call

    async def _run_custom(self, given: list[Sample], copies: list[Sample], loss: CustomLoss) -> ForwardBackwardOutput:
        bare = [replace(sample, columns={}) for sample in copies]
        known = await self._run("forward", bare, None, False)
        outputs = known.logprobs if known.values is None else known.values
        carrier = LogprobGradient() if known.values is None else ValueGradient()
        # The loss runs in another thread, because a user's function may take long and all clients of the process share this event loop.
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

        If an earlier forward_backward failed and the caller has not asked for the answer of that call, optim_step raises the error. If a
        checkpoint could not be written and `.wait()` of its SavedCheckpoint was not called, optim_step raises that error. In both cases the
        optimizer does not step.
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
                    f"{call!r}: nobody asked for the answer of this call, so optim_step raises its error; the optimizer has not stepped"
                )
                raise failure
        self._raise_failed_save()
        return await self._first("optim_step", params)

    def discard_gradients(self) -> Call[None]:
        """Drop the accumulated gradients. If a timeout broke the client, this call repairs the client as soon as the ranks answer again."""
        call = self._in_turn("discard_gradients", self._discard_gradients, mends=True)
        self._gradient_calls = ()
        return call

    async def _discard_gradients(self) -> None:
        await self._first("discard_gradients")
        self._mend()

    def save_checkpoint(self, path: str, *, optimizer: bool = True) -> Call[SavedCheckpoint]:
        """Copy weights, optimizer state and policy_version, and write them. The directory appears only when the checkpoint is complete.

        The answer comes when the state is copied. `.wait()` of the answer returns a call that is done when the directory is complete on
        disk. If the writing fails and `.wait()` was not called, the next optim_step or save_checkpoint raises the error and does nothing else.
        optimizer=False: the checkpoint has no optimizer state.
        """
        return self._in_turn(
            "save_checkpoint",
            self._save_checkpoint,
            os.path.abspath(path),
            optimizer,
            check=lambda limits: limits.check_state("save_checkpoint", optimizer),
        )

    async def _save_checkpoint(self, path: str, optimizer: bool) -> SavedCheckpoint:
        # The ranks' wait_for_checkpoint waits only for the newest checkpoint. So a save begins only when the last
        # checkpoint has been written or its writing has failed.
        if self._writing is not None:
            with contextlib.suppress(Exception):
                await self._writing
        self._raise_failed_save()
        version = await self._first("save_checkpoint", path, optimizer)
        writing = in_background(self._write(path), f"{self.name}: writing {path}")
        self._writing = self._unwaited = writing
        return SavedCheckpoint(path=path, policy_version=version, wait=lambda: self._wait_for(writing))

    def _wait_for(self, writing: Call[None]) -> Call[None]:
        if self._unwaited is writing:
            self._unwaited = None
        return writing

    def _raise_failed_save(self) -> None:
        if self._unwaited is not None and self._unwaited.done():
            ended, self._unwaited = self._unwaited, None
            ended.result()

    def load_checkpoint(self, path: str, *, optimizer: bool = True) -> Call[int]:
        """Load a checkpoint that save_checkpoint wrote, even under another parallel layout. Returns the policy_version of the checkpoint.

        optimizer=False: load only the weights, and reset the optimizer to the state that it has in a new trainer.
        """
        return self._load_checkpoint(path, optimizer=optimizer)

    def export_hf(self, path: str, dtype: Literal["float32", "bfloat16"] = "float32") -> Call[None]:
        """Write a new directory that transformers and vLLM can load: config.json, safetensors, and the trainer's tokenizer if it has one."""
        return self._in_turn("export_hf", self._first, "export_hf", os.path.abspath(path), dtype)

    def export_lora(self, path: str) -> Call[None]:
        """Write the adapters to a new directory. peft and vLLM load them for the model in hf_path."""
        return self._in_turn("export_lora", self._first, "export_lora", os.path.abspath(path))
