"""The queue of rollouts that run ahead of the trainer; it chooses the groups of the next step.

A step trains on size = groups_per_step groups and makes at most versions_per_step versions. At most
(ahead + 1) * size groups, ahead = max_staleness // versions_per_step, are drawn and not trained on;
one drawn at step s is due at step s + ahead. So step s waits until, for k from 0 to `ahead`, at most
k * size of the groups left are due at step s + k or earlier. That always comes true: groups finish
without new weights, and the groups that are due first are taken first.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Self

from controllers.observe.run_folder import Record
from controllers.rollouts.groups import GenerationError, Group, RolloutBatch, Rollouts


@dataclass(slots=True, kw_only=True, eq=False)
class Place:
    """A drawn problem, with its group once finished."""

    index: int  # of the problem in the environment
    step: int  # the last step that had begun at the draw; the first is 1
    group: Group | None = None

    def is_trainable(self) -> bool:
        return self.group is not None and self.group.is_trainable()


def choose(places: Sequence[Place], *, size: int, step: int, ahead: int) -> list[Place] | None:
    """The groups of this step, or None if it must wait. places: in the order of drawing."""
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
class _Since:
    """What the next batch reports beside its groups."""

    filtered: list[Place] = field(default_factory=list)
    num_refills: int = 0
    num_retries: int = 0


class RolloutQueue:
    """cursor: first problem never drawn. pending: problems drawn before a resume and in no batch;
    they come first, sampled again. versions_per_step: most optimizer steps in a step."""

    def __init__(
        self, rollouts: Rollouts, *, versions_per_step: int = 1, cursor: int = 0, pending: Sequence[int] = ()
    ) -> None:
        config = rollouts.config
        self.rollouts = rollouts
        self.config = config
        self.ahead = config.max_staleness // versions_per_step
        self.cursor = cursor
        self.pending = list(pending)
        self.step = 0  # calls of next_batch
        self.places: list[Place] = []
        self.since = _Since()  # the last batch
        self._draws: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the running draws."""
        for draw in self._draws:
            draw.cancel()
        await asyncio.gather(*self._draws, return_exceptions=True)

    def state(self) -> Record:
        """For a checkpoint."""
        # filtered groups are in no batch yet, so a resumed run completes them again
        unused = [place.index for place in [*self.places, *self.since.filtered]]
        return {"cursor": self.cursor, "pending": sorted(unused) + self.pending}

    async def next_batch(self, version: int) -> RolloutBatch:
        """With fewer than groups_per_step trainable groups only after the last refill. version: of the
        weights now. Raises a rollout's error, RuntimeError above max_staleness."""
        self.step += 1
        places = self._draw((self.ahead + 1) * self.config.groups_per_step - len(self.places))
        if places:
            draw = asyncio.create_task(self._complete_all(places))
            draw.add_done_callback(lambda _: self._changed.set())
            self._draws.add(draw)
        chosen = await self._wait_for_groups()
        since = self.since
        self.since = _Since()
        for place in chosen:
            self.places.remove(place)
        groups = [place.group for place in sorted([*chosen, *since.filtered], key=lambda place: place.index)]
        batch = RolloutBatch.of(
            [group for group in groups if group is not None],
            self.config,
            num_refills=since.num_refills,
            num_retries=since.num_retries,
            version=version,
        )
        if max(batch.ages(), default=0) > self.config.max_staleness:
            raise RuntimeError(
                f"a group is {max(batch.ages())} versions old, but rollouts.max_staleness={self.config.max_staleness}"
            )
        return batch

    def update(self) -> AbstractAsyncContextManager[None]:
        """Around a weight sync: without in_flight_updates, while no request runs."""
        return nullcontext() if self.config.in_flight_updates else self.rollouts.generating.paused()

    async def _wait_for_groups(self) -> list[Place]:
        """Raises a failed draw's error."""
        size = self.config.groups_per_step
        while True:
            self._changed.clear()
            for draw in [draw for draw in self._draws if draw.done()]:
                self._draws.remove(draw)
                draw.result()
            chosen = choose(self.places, size=size, step=self.step, ahead=self.ahead)
            if chosen is not None:
                return chosen
            if not self._draws:  # the last refill leaves fewer
                return [place for place in self.places if place.is_trainable()][:size]
            await self._changed.wait()

    def _draw(self, count: int) -> list[Place]:
        """Add the next `count` problems to the queue."""
        indices = self.pending[:count]
        del self.pending[:count]
        new, self.cursor = self.rollouts.take(self.cursor, count - len(indices))
        indices += new
        places = [Place(index=index, step=self.step) for index in indices]
        self.places += places
        return places

    async def _complete_all(self, places: list[Place]) -> None:
        """Complete the problems of a draw, with refills."""
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
        """Complete the problems, with retries. Raises the generator's error after the last."""

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
