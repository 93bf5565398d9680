"""How tests wait for what has no event of its own."""

import time


def wait_until(condition, seconds: float = 15.0, what: str = ""):
    """Poll `condition`, and return its first true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what or condition} did not come within {seconds:g} s"
        time.sleep(0.02)
    return value
