"""Waiting in tests, for conditions that have no event."""

import time

GUARD = 900.0
"""A limit in seconds that only a hang exceeds, however busy the machine is. It is less than pytest's own limit for a test."""


def wait_until(condition, what: str = ""):
    """Poll `condition`, and return its first true value. Raises AssertionError after GUARD seconds."""
    deadline = time.monotonic() + GUARD
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what or condition} did not come within {GUARD:g} s"
        time.sleep(0.02)
    return value
