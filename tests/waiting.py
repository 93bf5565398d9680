"""A function with which tests wait for a condition that no event announces, and a time limit for waits in tests."""

import time

GUARD = 900.0
"""A limit in seconds. Even on a busy machine only a hang exceeds it. It is less than pytest's own limit for a test, so
a hang ends with the error of the wait itself."""


def wait_until(condition, what: str = ""):
    """Call `condition` until it returns a true value, and return this value. Raises AssertionError after GUARD seconds.

    what: name of the condition, for the error.
    """
    deadline = time.monotonic() + GUARD
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what or condition} did not come within {GUARD:g} s"
        time.sleep(0.02)
    return value
