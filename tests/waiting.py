"""How tests wait for what has no event of its own."""

import time

GUARD = 900.0
"""Seconds that only a hang takes, however busy the machine is; less than pytest's own limit for a test."""


def wait_until(condition, what: str = ""):
    """Poll `condition`, and return its first true value. Raises AssertionError after GUARD seconds."""
    deadline = time.monotonic() + GUARD
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what or condition} did not come within {GUARD:g} s"
        time.sleep(0.02)
    return value
