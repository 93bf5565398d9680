"""The limits of a run's restarts, and the batches on which a recovered run trains again."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import tyro
from annotated_types import Interval

from controllers.observe.run_folder import Record
from controllers.rollouts.groups import RolloutBatch, Rollouts
from controllers.rollouts.queue import RolloutQueue
from controllers.run.checkpoints import State, random_states, restore_random_states
from rl_actors.config import RestartPolicy
from rl_actors.field_types import NaturalInt, NonNegativeFloat
from rl_actors.types import GeneratorReturn

if TYPE_CHECKING:
    from controllers.run.run import Supervision

BYTES_PER_TOKEN = 200  # about: a batch holds a token in a group and in the tensors of a sample


@dataclass(kw_only=True)
class SurvivalConfig:
    max_restarts_per_hour: NaturalInt = 10
    """One more death in an hour ends the run with the hour's first error. 0: the first does."""
    backoff: NonNegativeFloat = 1.0
    """Seconds before the restart after an hour's second death; doubles with each, up to 60."""
    silent_after: Annotated[float, Interval(ge=1), tyro.conf.arg(metavar="FLOAT>=1")] = 30.0
    """A process that answers no probe for this many seconds is killed, also during a call, and a
    generator if one step of its engine takes longer."""
    recorded_gigabytes: NonNegativeFloat = 4.0
    """GB of rollouts kept since the last checkpoint, for a recovery. Beyond it the oldest go."""

    def policy(self) -> RestartPolicy:
        """Of the run's restarts, and of each generator's."""
        return RestartPolicy(
            max_per_hour=self.max_restarts_per_hour, backoff=self.backoff, silent_after=self.silent_after
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """A batch, and the states when the step got it."""

    batch: RolloutBatch
    state: State  # the queue's state
    random: State  # the global random states, because a reward may have drawn from them

    @property
    def num_bytes(self) -> int:
        """Of all groups, also the filtered ones."""
        groups = self.batch.groups
        return BYTES_PER_TOKEN * sum(
            len(one.tokens) + len(group.prompt) for group in groups for one in group.completions
        )


class ReplayBuffer:
    """The batches of the steps since the newest complete checkpoint, by step."""

    def __init__(self, max_bytes: float = SurvivalConfig.recorded_gigabytes * 1e9) -> None:
        self.max_bytes = max_bytes
        self.steps: dict[int, ReplayedStep] = {}

    def keep(self, step: int, recorded: ReplayedStep) -> None:
        self.steps[step] = recorded
        while sum(kept.num_bytes for kept in self.steps.values()) > self.max_bytes:
            del self.steps[min(self.steps)]

    def forget(self, step: int) -> None:
        """Drop the batches up to this step, which a complete checkpoint has."""
        self.steps = {number: recorded for number, recorded in self.steps.items() if number > step}

    def after(self, step: int) -> dict[int, ReplayedStep]:
        """The batches of step + 1, step + 2, … without a gap. All others are dropped."""
        following: dict[int, ReplayedStep] = {}
        while step + 1 in self.steps:
            step += 1
            following[step] = self.steps[step]
        self.steps = dict(following)
        return following


class ReplayingQueue(RolloutQueue):
    """Gives recorded batches first, then those of a RolloutQueue, which it records."""

    def __init__(
        self,
        rollouts: Rollouts,
        supervision: "Supervision",
        *,
        steps_done: int,
        versions_per_step: int,
        cursor: int,
        pending: Sequence[int],
    ) -> None:
        """steps_done, cursor, pending: of the newest checkpoint."""
        super().__init__(rollouts, versions_per_step=versions_per_step, cursor=cursor, pending=pending)
        self.supervision = supervision
        self.steps_done = steps_done
        self.left = supervision.replay_buffer.after(steps_done)
        self.repeated: ReplayedStep | None = None  # the step that is being repeated
        if self.left:
            last = self.left[max(self.left)]
            self.cursor = last.state["cursor"]
            self.pending = list(last.state["pending"])

    async def next_batch(self, version: int) -> RolloutBatch:
        """The batch of the next step. Raises Interrupted after a signal."""
        return await self.supervision.interruption.drop_if_asked(self._next_batch(version))

    async def _next_batch(self, version: int) -> RolloutBatch:
        buffer = self.supervision.replay_buffer
        self.steps_done += 1
        buffer.forget(self.supervision.checkpoints.saved_step)
        self.repeated = self.left.pop(self.steps_done, None)
        if self.repeated is not None:
            restore_random_states(self.repeated.random)
            return self.repeated.batch
        batch = await super().next_batch(version)
        buffer.keep(self.steps_done, ReplayedStep(batch=batch, state=super().state(), random=random_states()))
        return batch

    def state(self) -> State:
        return super().state() if self.repeated is None else self.repeated.state


def restart_line(restart: int | str, when: float, cause: object, *, after_step: int) -> Record:
    """One line of restarts.jsonl, before a step has ended after the restart.

    restart: its number, the replaced generator's name, or "program". when: time.time() of the death.
    """
    return {
        "restart": restart,
        "time": datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds"),
        "after_step": after_step,
        "cause": str(cause),
        "first_step": None,
        "seconds": None,
    }


class Recoveries:
    """Counts restarts for the metrics, and makes the lines of restarts.jsonl."""

    def __init__(self) -> None:
        self.num_restarts = 0
        self.num_returns = 0  # how often a generator that had died was replaced
        self._returns: Sequence[GeneratorReturn] = ()  # replacements that have a line in restarts.jsonl
        self._line: Record | None = None  # of a restart after which no step has ended yet
        self._began = 0.0

    def begin(self, write: Callable[[Record], None], *, death: Exception, step: int) -> None:
        """A restart begins after this step. Writes the former's line if no step has ended since."""
        if self._line is not None:
            write(self._line)
        self.num_restarts += 1
        self._began = time.monotonic()
        self._line = restart_line(self.num_restarts, time.time(), death, after_step=step)

    def end(self, write: Callable[[Record], None], step: int, returns: Sequence[GeneratorReturn]) -> dict[str, float]:
        """Metrics of a step; writes the lines of the restart and the replacements before it."""
        values: dict[str, float] = {"restarts": self.num_restarts} if self.num_restarts else {}
        if self._line is not None:
            values["time/recovery"] = time.monotonic() - self._began
            write(self._line | {"first_step": step, "seconds": values["time/recovery"]})
            self._line = None
        # After a recovery a new client lists only its own replacements.
        num_written = len(self._returns) if tuple(returns[: len(self._returns)]) == tuple(self._returns) else 0
        self._returns = returns
        for back in returns[num_written:]:
            self.num_returns += 1
            line = restart_line(back.name, back.noticed, back.cause, after_step=step - 1)
            write(line | {"first_step": step, "seconds": time.time() - back.noticed})
        if self.num_returns:
            values["restarts/generator"] = self.num_returns
        return values
