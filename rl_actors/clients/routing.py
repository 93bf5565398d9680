"""Chooses the replica of a generator for a prompt: the one with its prefix in the KV cache, or the
least loaded.
"""

from collections import OrderedDict
from collections.abc import Sequence

MAX_KNOWN = 16_384  # prompts whose replica is remembered
SLACK = 4  # the replica with the prefix may have SLACK * n requests more than the least loaded; n: completions

# constants of a rolling hash
MULTIPLIER = 6_364_136_223_846_793_005
MASK = (1 << 64) - 1


class Router:
    """The load of every replica, n for a prompt with n completions, and who got which prompt."""

    def __init__(self, num_replicas: int) -> None:
        self.loads = [0] * num_replicas
        self._known: OrderedDict[int, int] = OrderedDict()  # hash of a prompt -> the replica that got it

    def assign(self, prompt: Sequence[int], n: int, among: Sequence[int]) -> int:
        """Choose the replica for a prompt, and add n to its load. among: the healthy replicas."""
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
        self.loads[replica] -= num_requests

    def forget(self) -> None:
        """Forget all prompts: after a pull the caches are useless, after a death one is lost."""
        self._known.clear()

    def _find(self, prompt: Sequence[int]) -> tuple[int, int | None]:
        """The hash of a prompt, and the replica of its longest prefix that was a prompt itself."""
        hashed = 0
        replica = None
        for token in prompt:
            hashed = (hashed * MULTIPLIER + token + 1) & MASK
            replica = self._known.get(hashed, replica)
        return hashed, replica
