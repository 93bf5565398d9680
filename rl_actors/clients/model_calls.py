"""The calls of a model and of a training run, for every client that has a `Session`.

A method checks its arguments in the caller's thread, so that the traceback shows the caller's line,
and copies lists, because the caller may change them before they are sent.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rl_actors import metrics
from rl_actors.clients.call import Call, in_background
from rl_actors.clients.conversion import as_tensors, merge_outputs
from rl_actors.clients.session import Session
from rl_actors.losses import LogprobGradient, Loss, resolve
from rl_actors.losses.custom import CustomLoss, ValueGradient, output_gradients
from rl_actors.policy_trainer import PolicyTrainer
from rl_actors.types import ForwardBackwardOutput, OptimParams, OptimResult, Sample, SampleList, TrainerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint whose state is copied. The ranks may still be writing the copy."""

    path: str
    policy_version: int
    wait: Callable[[], Call[None]] = field(repr=False)
    """Returns a call that is done when the directory is complete on disk. It raises RuntimeError,
    naming path and rank, if a rank could not write."""


class ModelCalls:
    """The calls that every model has, even one that is not trained."""

    @property
    def session(self) -> Session:
        raise NotImplementedError

    def info(self) -> Call[list[TrainerInfo]]:
        """The TrainerInfo of every rank, in the order of the ranks.

        For a tenant, its fields state, policy_version and steps_skipped are those of the tenant.
        """
        return self.session.queue("info", self.session.infos)

    def forward(
        self, samples: Sequence[Sample], loss: str | Loss | None = None, *, entropy: bool = False
    ) -> Call[ForwardBackwardOutput]:
        """Logprobs of the targets, or values of a value model, without gradients. Changes nothing
        in the model.

        With a loss, also the metrics that forward_backward would report. With entropy=True, also
        the entropy of the whole distribution at each position.
        """
        resolved = None if loss is None else resolve(loss)
        copies = as_tensors(samples)
        sent = loss if isinstance(loss, str) else resolved  # the ranks look a name up, or import it
        return self.session.queue(
            "forward",
            lambda: self._forward(copies, sent, entropy),
            check=lambda limits: limits.check_samples(copies, resolved),
        )

    async def _forward(
        self, samples: Sequence[Sample], loss: str | Loss | None = None, entropy: bool = False
    ) -> ForwardBackwardOutput:
        outputs = await self.session.send(PolicyTrainer.forward, SampleList(samples), loss, entropy)
        return merge_outputs(len(samples), outputs)

    def _load_checkpoint(self, path: str, *, optimizer: bool) -> Call[int]:
        where = os.path.abspath(path)
        return self.session.queue(
            "load_checkpoint",
            lambda: self.session.first(PolicyTrainer.load_checkpoint, where, optimizer),
            check=lambda limits: limits.check_state("load_checkpoint", optimizer),
        )


class TrainingCalls(ModelCalls):
    """The calls by which a training run trains, saves and exports."""

    # Writes this run's last checkpoint, until the caller calls `wait` of the SavedCheckpoint.
    _unwaited: Call[None] | None = None
    # The calls that added gradients since the last optim_step or discard_gradients.
    _gradient_calls: Sequence[Call[ForwardBackwardOutput]] = ()

    def forward_backward(
        self, samples: Sequence[Sample], loss: str | Loss, *, entropy: bool = False
    ) -> Call[ForwardBackwardOutput]:
        """Add the gradient of the summed loss. Gradients accumulate until optim_step or
        discard_gradients.

        loss: a name, an instance such as PPO(), or the "module:name" of your own loss, which client
        and ranks import.
        entropy: see `forward`.
        """
        resolved = resolve(loss)
        copies = as_tensors(samples)
        sent = loss if isinstance(loss, str) else resolved
        return self._adding_gradients(
            self.session.queue(
                "forward_backward",
                lambda: self._forward_backward(copies, sent, entropy),
                check=lambda limits: limits.check_training("forward_backward", copies, resolved),
            )
        )

    async def _forward_backward(
        self, samples: Sequence[Sample], loss: str | Loss, entropy: bool = False
    ) -> ForwardBackwardOutput:
        outputs = await self.session.send(PolicyTrainer.forward_backward, SampleList(samples), loss, entropy)
        return merge_outputs(len(samples), outputs)

    def forward_backward_custom(self, samples: Sequence[Sample], loss: CustomLoss) -> Call[ForwardBackwardOutput]:
        """Add the gradient of a loss that this process computes. Needs one forward pass more than
        forward_backward.

        loss: function of (samples, logprobs) that returns (scalar, metrics). logprobs has one
        differentiable tensor [T] for each sample; for a value model these are values. Samples may
        have any columns, because columns are not sent. The output has the metrics of the loss, and
        loss:sum.

        >>> trainer.forward_backward_custom(samples, lambda samples, logprobs: (-torch.cat(logprobs).sum(), {}))  # doctest: +SKIP
        """
        if not callable(loss):
            raise TypeError(f"loss is {loss!r}; it must be a function of (samples, logprobs)")
        given = list(samples) if isinstance(samples, Sequence) else samples
        copies = as_tensors(samples)
        return self._adding_gradients(
            self.session.queue(
                "forward_backward_custom",
                lambda: self._custom(given, copies, loss),
                check=lambda limits: limits.check_training("forward_backward_custom", copies, None),
            )
        )

    async def _custom(self, given: list[Sample], copies: list[Sample], loss: CustomLoss) -> ForwardBackwardOutput:
        bare = [replace(sample, columns={}) for sample in copies]
        known = await self._forward(bare)
        outputs = known.logprobs if known.values is None else known.values
        carrier = LogprobGradient() if known.values is None else ValueGradient()
        # In a thread: a user's function may take long, and all clients of the process share this
        # event loop.
        gradients, partials = await asyncio.to_thread(output_gradients, loss, given, outputs)
        carriers = []
        for sample, gradient in zip(bare, gradients, strict=True):
            carriers.append(replace(sample, columns={carrier.column: gradient}))
        limits = self.session.shared.limits
        assert limits is not None
        limits.check_samples(carriers, carrier)
        output = await self._forward_backward(carriers, carrier)
        return replace(output, metrics=metrics.finish(partials), partials=partials)

    def _adding_gradients(self, call: Call[ForwardBackwardOutput]) -> Call[ForwardBackwardOutput]:
        """Note a call whose error the next optim_step raises if nobody asks for its answer."""
        unasked = [earlier for earlier in self._gradient_calls if earlier.may_fail_unasked()]
        self._gradient_calls = [*unasked, call]
        return call

    def optim_step(self, params: OptimParams) -> Call[OptimResult]:
        """Divide the gradients by params.grad_divisor, clip them, step the optimizer, and clear the
        gradients.

        Raises, instead of stepping, the error of an earlier forward_backward whose answer nobody
        asked for, and of a checkpoint that could not be written and whose `.wait()` nobody called.
        """
        added = self._gradient_calls
        call = self.session.queue(
            "optim_step",
            lambda: self._optim_step(params, added),
            check=lambda limits: limits.check_optim_params(params),
        )
        self._gradient_calls = ()
        return call

    async def _optim_step(self, params: OptimParams, added: Sequence[Call[ForwardBackwardOutput]]) -> OptimResult:
        for call in added:
            failure = await call.unasked_failure()
            if failure is not None:
                failure.add_note(
                    f"{call!r}: nobody asked for the answer of this call, so optim_step raises its error; the optimizer has not stepped"
                )
                raise failure
        self._raise_failed_save()
        return await self.session.first(PolicyTrainer.optim_step, params)

    def discard_gradients(self) -> Call[None]:
        """Drop the gradients. Repairs a client that a timeout broke, once the ranks answer."""
        call = self.session.queue("discard_gradients", self._discard_gradients, when_broken=True)
        self._gradient_calls = ()
        return call

    async def _discard_gradients(self) -> None:
        await self.session.first(PolicyTrainer.discard_gradients)
        self.session.repair()

    def save_checkpoint(self, path: str, *, optimizer: bool = True) -> Call[SavedCheckpoint]:
        """Copy weights, optimizer state and policy_version, and write them. The directory appears
        when it is complete.

        The answer comes when the state is copied; call `.wait()` of the answer to wait for the
        disk. If the writing fails and `.wait()` was not called, the next optim_step or
        save_checkpoint raises the error and does nothing else.
        optimizer=False: the checkpoint has no optimizer state.
        """
        where = os.path.abspath(path)
        return self.session.queue(
            "save_checkpoint",
            lambda: self._save_checkpoint(where, optimizer),
            check=lambda limits: limits.check_state("save_checkpoint", optimizer),
        )

    async def _save_checkpoint(self, path: str, optimizer: bool) -> SavedCheckpoint:
        session = self.session
        # The ranks' wait_for_checkpoint waits only for the newest checkpoint, so one is written at
        # a time.
        if session.shared.writing is not None:
            with contextlib.suppress(Exception):
                await session.shared.writing
        self._raise_failed_save()
        version = await session.first(PolicyTrainer.save_checkpoint, path, optimizer)
        writing = in_background(session.written(path), f"{session.name}: writing {path}")
        session.shared.writing = self._unwaited = writing
        return SavedCheckpoint(path=path, policy_version=version, wait=lambda: self._wait_for(writing))

    def _wait_for(self, writing: Call[None]) -> Call[None]:
        if self._unwaited is writing:
            self._unwaited = None
        return writing

    def _raise_failed_save(self) -> None:
        if self._unwaited is not None and self._unwaited.done():
            ended = self._unwaited
            self._unwaited = None
            ended.result()

    def load_checkpoint(self, path: str, *, optimizer: bool = True) -> Call[int]:
        """Load a checkpoint of save_checkpoint, even of another parallel layout. Returns its
        policy_version.

        optimizer=False: load only the weights, and reset the optimizer to the state that it has in
        a new trainer.
        """
        return self._load_checkpoint(path, optimizer=optimizer)

    def export_hf(self, path: str, dtype: Literal["float32", "bfloat16"] = "float32") -> Call[None]:
        """Write a new directory that transformers and vLLM load: config.json, safetensors, and the
        trainer's tokenizer.
        """
        return self.session.call(PolicyTrainer.export_hf, os.path.abspath(path), dtype)

    def export_lora(self, path: str) -> Call[None]:
        """Write the adapters to a new directory, in peft's format, for the model in hf_path."""
        return self.session.call(PolicyTrainer.export_lora, os.path.abspath(path))
