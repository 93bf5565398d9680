"""How a step's batch is divided among optimizer steps."""

import asyncio
from types import SimpleNamespace

import pytest

from configs.tiny import tiny
from controllers.grpo import train_step


@pytest.mark.parametrize(
    ("updates", "epochs", "expected"),
    [
        (1, 1, ["abcde"]),
        (2, 1, ["abc", "de"]),
        (2, 2, ["abc", "de", "abc", "de"]),
        (9, 1, ["a", "b", "c", "d", "e"]),  # never more steps than samples
    ],
)
def test_all_samples_are_taken_in_up_to_so_many_parts_in_every_epoch(updates, epochs, expected):
    config = tiny()
    config.updates_per_step, config.epochs_per_step = updates, epochs
    calls = []

    async def update(part, loss, learning_rate):
        calls.append((part, loss, learning_rate))
        return len(calls)

    run = SimpleNamespace(config=config, update=update)
    assert asyncio.run(train_step(run, "abcde", 0.5)) == list(range(1, len(expected) + 1))
    assert calls == [(part, config.loss(), 0.5) for part in expected]
