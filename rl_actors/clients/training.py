"""`TrainingClient`, the calls of a training run, and `TenantClient`, for one tenant of a trainer.

A method checks its arguments in the caller's thread, and copies lists, which the caller may change.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from rl_actors import metrics
from rl_actors.clients.base import Client
from rl_actors.clients.call import Call, in_background
from rl_actors.clients.conversion import as_tensors, merge_outputs
from rl_actors.clients.limits import TrainerLimits
from rl_actors.clients.model import ModelRanks, Session
from rl_actors.losses import LogprobGradient, Loss, resolve
from rl_actors.losses.custom import CustomLoss, ValueGradient, output_gradients
from rl_actors.policy_trainer import PolicyTrainer
from rl_actors.processes.races import awaited
from rl_actors.types import (
    FIRST_TENANT,
    ForwardBackwardOutput,
    OptimParams,
    OptimResult,
    Sample,
    SampleList,
    TrainerInfo,
)
from rl_actors.validation import require_optimizer, validate_optim_params

if TYPE_CHECKING:
    from rl_actors.clients.trainer import TrainerClient
    from rl_actors.policy_trainer import Verb


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint whose state is copied. The ranks may still be writing the copy."""

    path: str
    policy_version: int
    wait: Callable[[], Call[None]] = field(repr=False)
    """Its call is done when the directory is complete, or raises RuntimeError with path and rank."""


class TrainingClient(Client):
    """The calls of one run. A model without an optimizer refuses those that train."""

    tenant: str = FIRST_TENANT
    ranks: ModelRanks
    # Writes this run's last checkpoint, until the caller calls `wait` of the SavedCheckpoint.
    _unwaited: Call[None] | None = None
    # The calls that added gradients since the last optim_step or discard_gradients.
    _gradient_calls: Sequence[Call[ForwardBackwardOutput]] = ()

    def _drive(self, ranks: ModelRanks, started: Call[None]) -> None:
        self.ranks = ranks
        self._actors = ranks
        self._start(started)

    @property
    def session(self) -> Session:
        return Session(self.ranks, self.name, self._begin, self.tenant)

    @property
    def policy_version(self) -> int | None:
        """The run's last reported policy_version. None before the first report."""
        return self.ranks.versions.get(self.tenant)

    def info(self) -> Call[list[TrainerInfo]]:
        """The TrainerInfo of every rank, in order; state, policy_version and steps_skipped are the run's."""
        return self.session.queue("info", self.session.infos)

    def forward(
        self, samples: Sequence[Sample], loss: str | Loss | None = None, *, entropy: bool = False
    ) -> Call[ForwardBackwardOutput]:
        """Logprobs of the targets, or values of a value model, without gradients.

        With a loss, also its metrics; with entropy=True, also the entropy of the whole distribution
        at each position.
        """
        resolved = None if loss is None else resolve(loss)
        copies = as_tensors(samples)
        sent = loss if isinstance(loss, str) else resolved  # the ranks look a name up, or import it
        return self.session.queue(
            "forward",
            lambda: self._outputs(PolicyTrainer.forward, copies, sent, entropy),
            check=lambda limits: limits.check_samples(copies, resolved),
        )

    async def _outputs(
        self, verb: "Verb[..., Any]", samples: Sequence[Sample], loss: str | Loss | None, entropy: bool = False
    ) -> ForwardBackwardOutput:
        return merge_outputs(len(samples), await self.session.send(verb, SampleList(samples), loss, entropy))

    def forward_backward(
        self, samples: Sequence[Sample], loss: str | Loss, *, entropy: bool = False
    ) -> Call[ForwardBackwardOutput]:
        """Add the gradient of the summed loss, until optim_step or discard_gradients.

        loss: a name, an instance such as PPO(), or the "module:name" of your own loss, which client
        and ranks import. entropy: see `forward`.
        """
        resolved = resolve(loss)
        copies = as_tensors(samples)
        sent = loss if isinstance(loss, str) else resolved
        return self._adding_gradients(
            self.session.queue(
                "forward_backward",
                lambda: self._outputs(PolicyTrainer.forward_backward, copies, sent, entropy),
                check=lambda limits: limits.check_training("forward_backward", copies, resolved),
            )
        )

    def forward_backward_custom(self, samples: Sequence[Sample], loss: CustomLoss) -> Call[ForwardBackwardOutput]:
        """Add the gradient of a loss that this process computes, with one forward pass more.

        loss: function of (samples, logprobs) that returns (scalar, metrics). logprobs has one
        differentiable tensor [T] for each sample; for a value model these are values. Columns are
        not sent, and may be any. The output has the metrics of the loss, and loss:sum.

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
        known = await self._outputs(PolicyTrainer.forward, bare, None)
        outputs = known.logprobs if known.values is None else known.values
        carrier = LogprobGradient() if known.values is None else ValueGradient()
        # in a thread: a user's function may take long, and all clients share this event loop
        gradients, partials = await asyncio.to_thread(output_gradients, loss, given, outputs)
        carriers = []
        for sample, gradient in zip(bare, gradients, strict=True):
            carriers.append(replace(sample, columns={carrier.column: gradient}))
        limits = self.ranks.limits
        assert limits is not None
        limits.check_samples(carriers, carrier)
        output = await self._outputs(PolicyTrainer.forward_backward, carriers, carrier)
        return replace(output, metrics=metrics.finish(partials), partials=partials)

    def _adding_gradients(self, call: Call[ForwardBackwardOutput]) -> Call[ForwardBackwardOutput]:
        """Note a call whose error the next optim_step raises if nobody asks for its answer."""
        unasked = [earlier for earlier in self._gradient_calls if earlier.may_fail_unasked()]
        self._gradient_calls = [*unasked, call]
        return call

    def optim_step(self, params: OptimParams) -> Call[OptimResult]:
        """Divide the gradients by params.grad_divisor, clip them, step, and clear them.

        Raises, instead of stepping, the error of an earlier forward_backward whose answer nobody
        asked for, and of a checkpoint that could not be written and whose `.wait()` nobody called.
        """
        added = self._gradient_calls

        def check(limits: TrainerLimits) -> None:
            require_optimizer("optim_step", limits.optimizer)
            validate_optim_params(params, limits.optimizer, limits.optimizer_fields)

        call = self.session.queue("optim_step", lambda: self._optim_step(params, added), check=check)
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
        """Copy weights, policy_version and (optimizer=True) the optimizer's state, and write them.

        The answer comes when the state is copied; its `.wait()` waits until the directory appears,
        complete. If the writing fails and `.wait()` was not called, the next optim_step or
        save_checkpoint raises the error and does nothing else.
        """
        where = os.path.abspath(path)
        return self.session.queue(
            "save_checkpoint",
            lambda: self._save_checkpoint(where, optimizer),
            check=lambda limits: limits.check_state("save_checkpoint", optimizer),
        )

    async def _save_checkpoint(self, path: str, optimizer: bool) -> SavedCheckpoint:
        session = self.session
        # one at a time: the ranks' wait_for_checkpoint waits only for the newest
        if session.ranks.writing is not None:
            with contextlib.suppress(Exception):
                await session.ranks.writing
        self._raise_failed_save()
        version = await session.first(PolicyTrainer.save_checkpoint, path, optimizer)
        written = asyncio.ensure_future(session.written(path))
        await asyncio.sleep(0)  # it begins before the answer, after which a `close` would refuse it
        writing = in_background(awaited(written), f"{session.name}: writing {path}")
        session.ranks.writing = self._unwaited = writing
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
        """Load a checkpoint, even of another parallel layout. Returns its policy_version.

        optimizer=False: load only the weights, and reset the optimizer.
        """
        where = os.path.abspath(path)
        return self.session.queue(
            "load_checkpoint",
            lambda: self.session.first(PolicyTrainer.load_checkpoint, where, optimizer),
            check=lambda limits: limits.check_state("load_checkpoint", optimizer),
        )

    def export_hf(self, path: str, dtype: Literal["float32", "bfloat16"] = "float32") -> Call[None]:
        """Write a new directory for transformers and vLLM: config.json, safetensors, tokenizer."""
        return self.session.call(PolicyTrainer.export_hf, os.path.abspath(path), dtype)

    def export_lora(self, path: str) -> Call[None]:
        """Write the adapters to a new directory, in peft's format, for the model in hf_path."""
        return self.session.call(PolicyTrainer.export_lora, os.path.abspath(path))


class TenantClient(TrainingClient):
    """A run of `TrainerClient.new_tenant`, with its own adapters, gradients, optimizer, order of
    calls and policy_version. `is_alive`, `death` and `kill` are those of the trainer.

    >>> one, other = trainer.new_tenant("one", seed=1), trainer.new_tenant("other", seed=2)   # doctest: +SKIP
    >>> one.forward_backward(samples, loss="cross_entropy")                                   # doctest: +SKIP
    >>> other.forward_backward(samples, loss="cross_entropy")                                 # doctest: +SKIP
    >>> one.optim_step(OptimParams(learning_rate=1e-3)).result()                              # doctest: +SKIP
    """

    def __init__(self, trainer: "TrainerClient", tenant: str, added: Call[None]) -> None:
        """added: the call that adds the tenant to the trainer."""
        super().__init__(f"{trainer.name}, tenant {tenant}", is_owner=False, logs=None)
        self.trainer = trainer
        self.tenant = tenant
        self._dropped: Call[None] | None = None
        self._drive(trainer.ranks, added)

    def _state(self) -> str:
        return "closed" if self._dropped is not None else super()._state()

    def _begin(self, what: str) -> None:
        if self._dropped is not None:
            raise RuntimeError(f"{self.name}: {what} is not possible after close")
        super()._begin(what)

    def close(self) -> Call[None]:
        """Make the trainer forget the tenant, with its adapters, gradients and optimizer state."""
        if self._dropped is None:
            # the tenant of a closed trainer has ended already
            is_over = self.ranks.is_closed
            self._dropped = (
                in_background(asyncio.sleep(0), self.name) if is_over else self.trainer.drop_tenant(self.tenant)
            )
        return self._dropped
