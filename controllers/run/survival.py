"""The limits within which a run survives the death of an actor, and the batches on which a recovered run trains again.

recovery.py replaces the actors and calls the training function again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Self

from controllers.observe.run_folder import Record
from controllers.rollouts.groups import RolloutBatch
from controllers.rollouts.queue import RolloutQueue
from controllers.run.checkpoints import State, random_states, restore_random_states
from rl_actors.config import RestartPolicy
from rl_actors.types import GeneratorReturn

if TYPE_CHECKING:
    from controllers.run.supervision import Supervision

BYTES_PER_TOKEN = 200
"""Estimated bytes of a recorded token. A batch holds a trained token twice: as id, logprob, version and text in a group, and as numbers in the
tensors of a sample."""


@dataclass(kw_only=True)
class SurvivalConfig:
    max_restarts_per_hour: int = 10
    """Largest number of restarts in an hour. One more death in that hour ends the run with the error of the hour's first death. 0: the first
    death ends the run."""
    backoff: float = 1.0
    """Pause in seconds between the second death of an hour and the restart after it. The pause doubles with every further death, up to a minute.
    After the first death there is no pause."""
    silent_after: float = 30.0
    """Seconds in which every process of an actor must answer a probe, also while the process runs a call. A process that does not answer is
    killed. While a call runs, Monarch itself counts a process as dead after about thirty seconds of silence, even if this value is larger. A
    generator is also killed if a single step or command of its engine takes longer than this value."""
    recorded_gigabytes: float = 4.0
    """Largest memory, in GB, of the rollouts since the last checkpoint. The rollouts are kept, because a recovered run repeats the steps since
    that checkpoint and trains on the same rollouts again. If the rollouts take more memory, the oldest are dropped. Until the next
    checkpoint a recovered run then generates new completions for every repeated step."""

    def policy(self) -> RestartPolicy:
        """The limits of the run's restarts. The restarts of a generator are not restarts of the run. They are counted for each
        generator, with the same limits.
        """
        return RestartPolicy(
            max_per_hour=self.max_restarts_per_hour, backoff=self.backoff, silent_after=self.silent_after
        )

    def validate(self) -> None:
        """Raises ValueError naming the field, its value and the limit."""
        for name in ("max_restarts_per_hour", "backoff", "recorded_gigabytes"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"survival.{name}={getattr(self, name)}; it must be finite and at least 0")
        if not 1 <= self.silent_after < float("inf"):
            raise ValueError(f"survival.silent_after={self.silent_after}; it must be finite and at least 1 second")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """The batch of a step, and the controller's state at the moment when the step got the batch."""

    batch: RolloutBatch
    state: State  # the queue's state
    random: State  # the global random states, because a reward may have drawn from them

    @property
    def num_bytes(self) -> int:
        return BYTES_PER_TOKEN * sum(len(sample) for sample in self.batch.samples)


class Recording:
    """The batches of the steps since the newest complete checkpoint, by step."""

    def __init__(self, max_bytes: float = SurvivalConfig.recorded_gigabytes * 1e9) -> None:
        self.max_bytes = max_bytes
        self.steps: dict[int, RecordedStep] = {}

    def keep(self, step: int, recorded: RecordedStep) -> None:
        self.steps[step] = recorded
        while sum(each.num_bytes for each in self.steps.values()) > self.max_bytes:
            del self.steps[min(self.steps)]

    def forget(self, step: int) -> None:
        """Drop the batches up to this step. Call this when a complete checkpoint of the step exists."""
        self.steps = {number: recorded for number, recorded in self.steps.items() if number > step}

    def after(self, step: int) -> dict[int, RecordedStep]:
        """The batches of the steps step + 1, step + 2 and so on, until a step has no batch. All other batches are dropped."""
        found: dict[int, RecordedStep] = {}
        while step + 1 in self.steps:
            step += 1
            found[step] = self.steps[step]
        self.steps = dict(found)
        return found


class RecordedQueue:
    """Gives the recorded batches first, and then new batches of a RolloutQueue. Records every new batch."""

    def __init__(self, queue: RolloutQueue, supervision: "Supervision", *, steps_done: int) -> None:
        """queue: a queue in the state that the newest checkpoint holds. steps_done: the step of this checkpoint."""
        recording = supervision.recording
        self.queue = queue
        self.recording = recording
        self.checkpoints = supervision.checkpoints
        self.interruption = supervision.interruption
        self.step = steps_done
        self.left = recording.after(steps_done)
        self.repeated: RecordedStep | None = None  # the step that is being repeated
        if self.left:
            last = self.left[max(self.left)]
            queue.cursor, queue.pending = last.state["cursor"], list(last.state["pending"])

    async def __aenter__(self) -> Self:
        await self.queue.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.queue.__aexit__(*error)

    async def next_batch(self, version: int) -> RolloutBatch:
        """The recorded batch of the next step. If this step has no recorded batch, a new batch of the queue.

        Raises Interrupted if a signal has asked for the end of the run.
        """
        return await self.interruption.drop_if_asked(self._next_batch(version))

    async def _next_batch(self, version: int) -> RolloutBatch:
        self.step += 1
        self.recording.forget(self.checkpoints.saved_step)
        self.repeated = self.left.pop(self.step, None)
        if self.repeated is not None:
            restore_random_states(self.repeated.random)
            return self.repeated.batch
        batch = await self.queue.next_batch(version)
        self.recording.keep(self.step, RecordedStep(batch=batch, state=self.queue.state(), random=random_states()))
        return batch

    def state(self) -> State:
        """The state of the queue for a checkpoint."""
        return self.queue.state() if self.repeated is None else self.repeated.state

    def update(self):
        """See RolloutQueue.update."""
        return self.queue.update()


def restart_line(
    restart: int | str,
    when: float,
    cause: object,
    *,
    after_step: int,
    first_step: int | None = None,
    seconds: float | None = None,
) -> Record:
    """One line of restarts.jsonl.

    restart: the number of the restart, the name of the generator that was replaced, or "program" if a new program continues the run. when:
    the time at which the death was noticed, as time.time() gives it. after_step: the last step before the restart. first_step, seconds: the
    first step after the restart, and the seconds from `when` to the end of this step. They are None if no step has ended since the restart.
    """
    time_text = datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds")
    return {
        "restart": restart,
        "time": time_text,
        "after_step": after_step,
        "cause": str(cause),
        "first_step": first_step,
        "seconds": seconds,
    }


class Recoveries:
    """Counts the restarts of a run for its metrics, and makes the lines of restarts.jsonl."""

    def __init__(self) -> None:
        self.num_restarts = 0
        self.num_returns = 0  # how often a generator that had died was replaced
        self._returns: Sequence[GeneratorReturn] = ()  # the replacements that have a line in restarts.jsonl
        self._line: Record | None = None  # line of a restart after which no step has ended yet
        self._began = 0.0

    def begin(self, write: Callable[[Record], None], *, death: Exception, step: int) -> None:
        """Note that a restart begins. If no step has ended since the former restart, also writes the line of the former
        restart.

        step: the last step in metrics.jsonl.
        """
        if self._line is not None:
            write(self._line)
        self.num_restarts += 1
        self._began = time.monotonic()
        self._line = restart_line(self.num_restarts, time.time(), death, after_step=step)

    def end(self, write: Callable[[Record], None], step: int) -> dict[str, float]:
        """Metrics of a step. If this is the first step after a restart, also writes the line of the restart."""
        found: dict[str, float] = {"restarts": self.num_restarts} if self.num_restarts else {}
        if self._line is not None:
            found["time/recovery"] = time.monotonic() - self._began
            write(self._line | {"first_step": step, "seconds": found["time/recovery"]})
            self._line = None
        return found

    def of_generators(
        self, write: Callable[[Record], None], returns: Sequence[GeneratorReturn], step: int
    ) -> dict[str, float]:
        """Metrics of a step. Also writes a line for each replacement that has no line yet.

        returns: all replacements of generators, in the order in which the client of the generators has made them.
        """
        # If `returns` does not begin with the known replacements, a recovery has made a new client of the generators.
        # This client lists only its own replacements, and none of them has a line yet.
        known = len(self._returns) if tuple(returns[: len(self._returns)]) == tuple(self._returns) else 0
        self._returns = returns
        for each in returns[known:]:
            self.num_returns += 1
            seconds = time.time() - each.noticed
            write(
                restart_line(each.name, each.noticed, each.cause, after_step=step - 1, first_step=step, seconds=seconds)
            )
        return {"restarts/generator": self.num_returns} if self.num_returns else {}
