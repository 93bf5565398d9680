"""`wait_until`, with which tests wait for a condition that no event announces, and GUARD, the time limit for waits in tests."""

import time

GUARD = 900.0
"""A time limit in seconds. Even on a busy machine only a hang takes longer. The limit is below pytest's own limit for a
test, so a hang ends with the error of the wait, not with pytest's."""


def wait_until(condition, what: str = ""):
    """Call `condition` until it returns a true value, and return this value. Raises AssertionError after GUARD seconds.

    what: a noun for the error, such as "the end of the run".
    """
    deadline = time.monotonic() + GUARD
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what or condition} did not come within {GUARD:g} s"
        time.sleep(0.02)
    return value
