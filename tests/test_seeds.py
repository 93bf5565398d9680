"""Tests of the seeds of samples."""

import subprocess
import sys
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rl_actors import SamplingParams
from rl_actors.seeds import MAX_SEED, hashed_seed
from rl_actors.vllm.requests import vllm_params

NUMBERS = st.integers(0, MAX_SEED)


def seeds_of_call(seed: int | None, *, num_prompts: int, n: int) -> list[int | None]:
    params = SamplingParams(n=n, seed=seed)
    return [request.seed for prompt in range(num_prompts) for request in vllm_params(params, prompt)]


def test_calls_whose_seeds_are_neighbours_share_no_seed_of_a_completion():
    seeds = [seed for step in range(25) for seed in seeds_of_call(step, num_prompts=4, n=8)]
    assert len(set(seeds)) == len(seeds) == 25 * 4 * 8


def test_no_seed_repeats_over_10000_triples_of_seed_prompt_and_sample():
    near = [(seed, prompt, sample) for seed in range(25) for prompt in range(20) for sample in range(20)]
    far = [
        (MAX_SEED - seed, prompt << 40, sample) for seed in range(10) for prompt in range(10) for sample in range(10)
    ]
    triples = {*near, *far}
    assert len(triples) >= 10_000
    assert len({hashed_seed(*triple) for triple in triples}) == len(triples)


@given(st.sets(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=2, max_size=50))
def test_different_triples_have_different_seeds_that_vllm_takes(triples):
    seeds = {hashed_seed(*triple) for triple in triples}
    assert len(seeds) == len(triples) and all(0 <= seed <= MAX_SEED for seed in seeds)


def test_a_seed_is_the_same_in_every_process():
    program = "from rl_actors.seeds import hashed_seed; print(hashed_seed(7, 'rollouts', 3))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(other.stdout) == hashed_seed(7, "rollouts", 3) == 2381670386203289893


def test_the_seed_of_a_completion_depends_on_no_other_option_of_the_call():
    params = SamplingParams(n=2, seed=5)
    wider = vllm_params(replace(params, n=8, max_tokens=3), prompt=6)
    assert [one.seed for one in vllm_params(params, prompt=6)] == [one.seed for one in wider[:2]]


def test_without_a_seed_the_requests_have_none():
    assert seeds_of_call(None, num_prompts=2, n=2) == [None] * 4
