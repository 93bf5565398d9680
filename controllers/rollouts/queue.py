"""The queue of rollouts that run ahead of the trainer. The queue chooses the groups on which the next step trains.

A group is one problem with its completions. The queue draws a group by taking the environment's next problem and letting the
generator complete it.

The queue draws groups at the start of every step, after the newest weights have reached the generator. A step trains on
`size` groups. `size` is the config's groups_per_step. At most (ahead + 1) * size groups are drawn and not yet trained on;
the next paragraph defines `ahead`. While a step trains on its groups, the generator works on the other groups.

No group becomes too old. A group that is drawn at step s is due at step s + ahead, which is the last step that may
train on the group. Until then at most `ahead` steps have changed the weights. Each optimizer step makes a new
version of the weights, and a step has at most `versions_per_step` optimizer steps. The config's max_staleness counts
versions, so ahead = max_staleness // versions_per_step. A skipped optimizer step makes no version, so a group may be
less than max_staleness versions old when it is due. Before each step the queue computes the age of every group on which
the step trains, and raises RuntimeError if an age is above max_staleness.

One long completion does not hold up a step. A step takes the first `size` finished groups in the order in which they were drawn. So
younger groups may overtake an unfinished group. But all groups that a step leaves in the queue must still be trained on
in time, and the k steps after step s can train on only k * size of them. So step s waits until a condition holds for
every k from 0 to `ahead`: of the groups that step s would leave, at most k * size are due at step s + k or earlier.

The queue cannot deadlock. All groups finish even if a step waits for them, because the generator needs no new weights to
go on. When all groups have finished, a step takes the first `size` of them, and the condition then holds for the groups
that it leaves. For k below `ahead` it holds because it held with k + 1 after the former step, and this step takes the
groups that are due first. For k = `ahead` it holds because the queue has at most (ahead + 1) * size groups. If `ahead` is 0, each step
trains on the groups that it drew. This is the synchronous loop.

Under every advantage rule except gae, a group whose rewards are all equal has only advantages of 0, so no step trains
on the group. When all groups of a draw have finished, the queue removes these groups, and new problems take their
places. It does so at most dynamic_sampling_rounds times for a draw. The queue never holds more groups than before.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Self, TypeVar

from controllers.observe.run_folder import Record
from controllers.rollouts.groups import GenerationError, Group, RolloutBatch, Rollouts

Found = TypeVar("Found")


@dataclass(slots=True, kw_only=True, eq=False)
class Place:
    """An entry of the queue: a problem that was drawn, and its group as soon as the group has finished."""

    index: int  # the problem's index in the environment
    step: int  # number of the last step that had begun when the problem was drawn; the first step is 1
    group: Group | None = None

    def is_trainable(self) -> bool:
        return self.group is not None and self.group.is_trainable()


def choose(places: Sequence[Place], *, size: int, step: int, ahead: int) -> list[Place] | None:
    """The places with the groups on which step number `step` trains, or None if the step must wait for more groups.

    places: the entries of the queue, in the order in which they were drawn.
    """
    chosen = [place for place in places if place.is_trainable()][:size]
    if len(chosen) < size:
        return None
    left = [place for place in places if place.group is None or place.is_trainable()]
    for place in chosen:
        left.remove(place)
    for later in range(ahead + 1):
        num_due = sum(place.step + ahead <= step + later for place in left)
        if num_due > later * size:
            return None
    return chosen


@dataclass(slots=True, kw_only=True)
class _Finished:
    """The filtered groups, refills and retries since the last batch. The next batch reports them."""

    filtered: list[Place] = field(default_factory=list)  # places whose groups cannot be trained on (Group.is_trainable)
    num_refills: int = 0
    num_retries: int = 0


class RolloutQueue:
    """Draws problems, completes and scores them through `rollouts`, and gives every step its batch. Use it in an `async with` block.

    cursor: index of the first problem that was never drawn. pending: indices of problems that the run had drawn before it was resumed, and
    that were in no batch. These problems are completed again, before new problems. A checkpoint does not keep their completions, because the
    resumed run samples newer ones with the checkpoint's weights. versions_per_step: largest number of optimizer steps in a step.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        *,
        versions_per_step: int = 1,
        cursor: int = 0,
        pending: Sequence[int] = (),
    ) -> None:
        config = rollouts.config
        self.rollouts = rollouts
        self.config = config
        self.ahead = config.max_staleness // versions_per_step
        self.cursor = cursor
        self.pending = list(pending)
        self.step = 0  # number of calls of next_batch
        self.places: list[Place] = []
        self.since = _Finished()
        self._draws: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the draws that are under way."""
        for draw in self._draws:
            draw.cancel()
        await asyncio.gather(*self._draws, return_exceptions=True)

    def state(self) -> Record:
        """The state of the queue for a checkpoint."""
        # The filtered groups are in no batch yet, so a resumed run completes their problems again, too.
        unused = [place.index for place in [*self.places, *self.since.filtered]]
        return {"cursor": self.cursor, "pending": sorted(unused) + self.pending}

    async def next_batch(self, version: int) -> RolloutBatch:
        """Draw new groups up to the limit, wait until `choose` finds the groups of this step, and return their batch.

        A group has a signal if it can be trained on. The batch has groups_per_step groups with a signal. If fewer groups
        have a signal after the last refill that dynamic_sampling_rounds allows, the batch has only these. If no group has a signal,
        the batch has no samples.
        version: the version of the weights that trainer and generator have now.
        Raises the error of a rollout that cannot be completed. Raises RuntimeError if a group is too old: its age in
        versions is above max_staleness.
        """
        self.step += 1
        room = (self.ahead + 1) * self.config.groups_per_step - len(self.places)
        self._start(self._draw(room))
        chosen = await self._wait_for_groups()
        finished = self.since
        self.since = _Finished()
        for place in chosen:
            self.places.remove(place)
        groups = [place.group for place in sorted([*chosen, *finished.filtered], key=lambda place: place.index)]
        batch = RolloutBatch.of(
            [group for group in groups if group is not None],
            self.config,
            num_refills=finished.num_refills,
            num_retries=finished.num_retries,
            version=version,
        )
        if max(batch.ages(), default=0) > self.config.max_staleness:
            raise RuntimeError(
                f"a group is {max(batch.ages())} versions old, but rollouts.max_staleness={self.config.max_staleness}"
            )
        return batch

    def update(self) -> AbstractAsyncContextManager[None]:
        """Context manager for an update of the generator's weights.

        If in_flight_updates is False, the update waits until no request is running, and new requests wait until the
        update has ended. If in_flight_updates is True, neither the update nor a request waits.
        """
        return self.rollouts.generating.paused(wait=not self.config.in_flight_updates)

    async def _wait_for_groups(self) -> list[Place]:
        size = self.config.groups_per_step

        def groups() -> list[Place] | None:
            chosen = choose(self.places, size=size, step=self.step, ahead=self.ahead)
            if chosen is None and not self._draws:
                return [place for place in self.places if place.is_trainable()][:size]
            return chosen

        return await self._until(groups)

    def _draw(self, count: int) -> list[Place]:
        """Take the next `count` problems, add them to the queue, and return their entries."""
        indices = self.pending[:count]
        del self.pending[:count]
        new, self.cursor = self.rollouts.take(self.cursor, count - len(indices))
        indices += new
        places = [Place(index=index, step=self.step) for index in indices]
        self.places += places
        return places

    def _start(self, places: list[Place]) -> None:
        """Start a task that completes the problems."""
        if places:
            draw = asyncio.create_task(self._complete_all(places))
            draw.add_done_callback(lambda _: self._changed.set())
            self._draws.add(draw)

    async def _complete_all(self, places: list[Place]) -> None:
        """Complete the problems of a draw.

        At most dynamic_sampling_rounds times, remove the groups that cannot be trained on, and complete new problems in their places.
        """
        for num_refills in range(self.config.dynamic_sampling_rounds + 1):
            await self._complete(places)
            filtered = [place for place in places if not place.is_trainable()]
            for place in filtered:
                self.places.remove(place)
            self.since.filtered += filtered
            if not filtered or num_refills == self.config.dynamic_sampling_rounds:
                return
            self.since.num_refills += 1
            places = self._draw(len(filtered))

    async def _complete(self, places: list[Place]) -> None:
        """Complete the problems. If the generator fails on some of them, request these again. Raises the generator's error if the last retry fails."""

        def deliver(position: int, group: Group) -> None:
            places[position].group = group
            self._changed.set()

        for num_retries in range(self.config.max_retries + 1):
            try:
                await self.rollouts.complete([place.index for place in places], deliver)
            except GenerationError as error:
                if num_retries == self.config.max_retries:
                    raise error.reason from None
            places = [place for place in places if place.group is None]
            if not places:
                return
            self.since.num_retries += len(places)

    async def _until(self, found: Callable[[], Found | None]) -> Found:
        """Call `found` at once and after every change of the queue, until its result is not None. Returns this result.

        Raises the error of a draw that failed.
        """
        while True:
            self._changed.clear()
            for draw in [draw for draw in self._draws if draw.done()]:
                self._draws.remove(draw)
                draw.result()
            answer = found()
            if answer is not None:
                return answer
            await self._changed.wait()
