"""The output projection is applied to at most `logprob_chunk_tokens` positions at a time."""

import pytest
from references import ppo_samples

from rl_actors.losses import GSPO, PPO


def record_chunks(engine) -> list[int]:
    """A list that gets, at every later use of the output projection, the number of positions of this use."""
    sizes: list[int] = []

    def record(head, args, logits_BLV) -> None:
        sizes.append(logits_BLV.shape[:-1].numel())

    engine.built.model.lm_head.register_forward_hook(record)
    return sizes


@pytest.mark.parametrize(
    ("limit", "expected"),  # for a microbatch of 2 rows of 64 positions
    [
        (1024, [128]),
        (128, [128]),
        (127, [64, 64]),
        # A chunk holds the same positions of both rows. Three chunks would be small enough, but a row's 64 positions are not divisible by 3.
        (50, [32, 32, 32, 32]),
    ],
)
def test_no_chunk_of_logits_has_more_positions_than_the_config_says(make_engine, limit, expected):
    engine = make_engine(logprob_chunk_tokens=limit)
    samples = ppo_samples([64, 64])
    sizes = record_chunks(engine)
    engine.forward(samples)
    assert sizes == expected
    sizes.clear()
    engine.forward_backward(samples, PPO())
    assert sizes == expected
    sizes.clear()
    engine.forward_backward(samples, GSPO())
    # GSPO needs whole samples: a first pass computes all logprobs, and a second pass computes each chunk again.
    assert sizes == 2 * expected
