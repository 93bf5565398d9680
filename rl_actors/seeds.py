"""Seeds as hashes, so that no two samples of a run, and no two runs, share one."""

from hashlib import blake2b

MAX_SEED = 2**62 - 1
"""Largest seed of SamplingParams, and largest hash."""


def hashed_seed(*parts: int | str) -> int:
    """A hash in [0, 2**62), the same on every machine. Sample i of prompt p is drawn with
    hashed_seed(seed, p, i).
    """
    text = "/".join(map(str, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") & MAX_SEED
