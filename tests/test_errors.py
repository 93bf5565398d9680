"""Tests the errors that an endpoint sends to its caller."""

import asyncio
import threading

import pytest

from rl_actors.processes.errors import sends_errors


@pytest.mark.parametrize("pickles", [True, False])
def test_an_error_that_has_a_rank_reaches_the_caller_with_the_rank(pickles):
    failure = ValueError("too long", "text" if pickles else threading.Lock())
    failure.rank = 3

    @sends_errors
    async def fails():
        raise failure

    with pytest.raises(ValueError if pickles else RuntimeError, match="too long") as caught:
        asyncio.run(fails())
    assert caught.value.rank == 3
