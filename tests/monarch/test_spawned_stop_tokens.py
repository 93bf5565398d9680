"""A generator that a trainer's client spawns ends completions at the end tokens of the trainer's model."""

from itertools import chain

import pytest
from own_models import save_model

from rl_actors import GeneratorClient, GeneratorConfig, SamplingParams, TrainerClient, TrainerConfig
from rl_actors.texts import stop_token_ids

PROMPTS = [[5, 6, 7], [9, 8, 7, 6], [11]]
ENDLESS = SamplingParams(max_tokens=128, n=8, seed=3, ignore_stop=True)


def tokens_of(generator: GeneratorClient, params: SamplingParams) -> list[list[int]]:
    return [one.tokens for one in chain.from_iterable(generator.generate(PROMPTS, params).result())]


def cut(tokens: list[int], stops: tuple[int, ...]) -> list[int]:
    ends = [place for place, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.slow
def test_a_generator_of_a_trainer_stops_at_the_end_tokens_of_its_model_and_ignores_them_if_it_is_asked(tmp_path):
    model = save_model(tmp_path / "model")
    stops = stop_token_ids(tmp_path / "model")
    trainer = TrainerConfig(model=model, hf_path=str(tmp_path / "model"), max_sequence_length=511, tokens_per_row=512)
    with (
        TrainerClient.spawn(trainer) as client,
        client.spawn_generator(GeneratorConfig(model=model, max_model_len=512)) as generator,
    ):
        endless = tokens_of(generator, ENDLESS)
        stopped = tokens_of(generator, SamplingParams(max_tokens=128, n=8, seed=3))
        other = tokens_of(generator, SamplingParams(max_tokens=128, n=8, seed=3, ignore_stop=True, stop_token_ids=(7,)))
    assert all(len(tokens) == 128 for tokens in endless)
    assert stopped == [cut(tokens, stops) for tokens in endless] != endless
    assert other == [cut(tokens, (7,)) for tokens in endless]
