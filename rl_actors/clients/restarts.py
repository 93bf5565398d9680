"""`Restarts` counts and limits the restarts of one actor, or of all actors of a run."""

import time
from collections import deque
from collections.abc import Callable

from rl_actors.config import RestartPolicy

HOUR = 3600.0  # seconds
LONGEST_RESTART_PAUSE = 60.0
"""Seconds between a death and the restart after it, at most."""
FIRST_RESTARTS = 2
"""Largest number of restarts of an actor that has never been ready."""


class Restarts:
    """Counts restarts, and refuses a restart above the limit of the policy."""

    def __init__(
        self,
        policy: RestartPolicy,
        clock: Callable[[], float] = time.monotonic,
        *,
        note: str = "this is the first of {num_deaths} deaths in the last hour, and at most {limit} restarts are allowed in that time; "
        "the last death: {last}",
    ) -> None:
        """note: added to the error of `pause_after` after several deaths; with {num_deaths},
        {limit} and {last}.
        """
        self.policy = policy
        self.clock = clock
        self.note = note
        self.total = 0
        self._deaths: deque[tuple[float, Exception]] = deque()  # in the last hour: (time on `clock`, error)

    def pause_after(self, death: Exception, *, was_ready: bool = True) -> float:
        """Count this death. Returns the seconds until the restart, or raises the first error of an
        hour of too many.

        was_ready: whether the actor has ever been ready.
        """
        now = self.clock()
        while self._deaths and self._deaths[0][0] <= now - HOUR:
            self._deaths.popleft()
        self._deaths.append((now, death))
        num_deaths = len(self._deaths)
        limit = self.policy.max_per_hour
        if not was_ready:
            limit = min(limit, FIRST_RESTARTS)
        if num_deaths > limit:
            first = self._deaths[0][1]
            if num_deaths > 1:
                first.add_note(self.note.format(num_deaths=num_deaths, limit=limit, last=death))
            raise first
        self.total += 1
        return 0.0 if num_deaths == 1 else min(self.policy.backoff * 2 ** (num_deaths - 2), LONGEST_RESTART_PAUSE)
