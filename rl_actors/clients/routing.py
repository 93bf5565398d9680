"""Chooses which replica of a generator gets a prompt. This module sends nothing.

If an earlier prompt was the start of this prompt, the replica that got the earlier prompt probably has the start in its
cache. This replica is chosen if its load is not much larger than the smallest load. Otherwise the replica with the
smallest load is chosen.
"""

from collections import OrderedDict
from collections.abc import Sequence

MAX_KNOWN = 16_384
"""Largest number of prompts whose replica is remembered."""

SLACK = 4
"""A replica that has the start of a prompt in its cache gets the prompt if the replica's load exceeds the smallest load
by at most SLACK * n requests. n is the number of completions of the prompt."""

MULTIPLIER, MASK = 6_364_136_223_846_793_005, (1 << 64) - 1  # constants of a rolling hash


class Router:
    """Keeps the load of every replica, and remembers which replica got which prompt. It remembers at most the newest
    MAX_KNOWN prompts. `forget` clears this memory.

    The load of a replica is its number of unfinished requests. A prompt with n completions is n requests.
    """

    def __init__(self, num_replicas: int) -> None:
        self.loads = [0] * num_replicas
        self._known: OrderedDict[int, int] = OrderedDict()  # hash of a prompt -> the replica that got it

    def assign(self, prompt: Sequence[int], n: int, among: Sequence[int]) -> int:
        """Choose the replica for all n completions of a prompt, and add n requests to its load.

        Call `finish` when completions have finished. among: the replicas that take requests now.
        """
        if len(self.loads) == 1:
            self.loads[0] += n
            return 0
        hashed, known = self._find(prompt)
        replica = min(among, key=self.loads.__getitem__)
        if known is not None and known in among and self.loads[known] - self.loads[replica] <= SLACK * n:
            replica = known
        self._known[hashed] = replica
        self._known.move_to_end(hashed)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        self.loads[replica] += n
        return replica

    def finish(self, replica: int, num_requests: int) -> None:
        """Subtract finished requests from the load of a replica."""
        self.loads[replica] -= num_requests

    def forget(self) -> None:
        """Forget all prompts. Call this after a pull, because the caches hold nothing for the new weights, and after a
        replica has died, because its cache is lost.
        """
        self._known.clear()

    def _find(self, prompt: Sequence[int]) -> tuple[int, int | None]:
        """The hash of a prompt, and the replica of its longest known prefix, or None if no prefix is known.

        A known prefix is a whole earlier prompt, for example the prompt of an earlier turn of the same conversation.
        """
        hashed, replica = 0, None
        for token in prompt:
            hashed = (hashed * MULTIPLIER + token + 1) & MASK
            replica = self._known.get(hashed, replica)
        return hashed, replica
