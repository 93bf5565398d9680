"""Tests that neither the packing nor the order of the samples changes gradients and logprobs.

The expected values come from calls with one sample each. hypothesis draws new lengths, orders and limits in every run. If a case fails,
hypothesis prints how to repeat the case.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from references import ppo_samples
from torch.testing import assert_close

from rl_actors import PPO

LONGEST = 64
LOSS = PPO(ratio_low=0.8, ratio_high=1.28)


@st.composite
def calls(draw):
    """Draws sample lengths, the seed of the samples' content, the order of the samples, and the limits for packing."""
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=10))
    limits = {
        "packing": draw(st.sampled_from(["packed", "token_budget", "fixed"])),
        "tokens_per_row": draw(st.integers(LONGEST, 5 * LONGEST)),
        "rows_per_microbatch": draw(st.integers(1, 4)),
        "logprob_chunk_tokens": draw(st.integers(16, 600)),
    }
    return lengths, draw(st.integers(0, 1000)), draw(st.permutations(range(len(lengths)))), limits


@pytest.mark.slow
def test_packing_and_the_order_of_samples_change_neither_gradients_nor_logprobs(make_engine):
    engine = make_engine()
    usual = engine.config

    def gradients() -> dict[str, torch.Tensor]:
        found = {name: p.grad.clone() for name, p in engine.built.model.named_parameters()}
        engine.discard_gradients()
        return found

    @settings(max_examples=40, deadline=None)
    @given(call=calls())
    def check(call):
        lengths, seed, order, limits = call
        samples = ppo_samples(lengths, seed=seed)
        engine.config, engine.head.chunk_tokens = usual, usual.logprob_chunk_tokens
        alone = [engine.forward_backward([sample], LOSS).logprobs for sample in samples]
        expected = gradients()

        engine.config, engine.head.chunk_tokens = replace(usual, **limits), limits["logprob_chunk_tokens"]
        output = engine.forward_backward([samples[index] for index in order], LOSS)
        for index, logprobs in zip(output.indices, output.logprobs.split(output.lengths), strict=True):
            assert_close(logprobs, alone[order[index]], rtol=1e-5, atol=1e-5)
        assert sorted(output.indices) == list(range(len(samples)))

        norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
        for name, grad in gradients().items():
            difference, allowed = (grad - expected[name]).norm(), 1e-5 * expected[name].norm() + 1e-7 * norm
            assert difference <= allowed, (
                f"{name}: the difference has norm {difference}, the gradient {expected[name].norm()}"
            )

    check()
