"""Prompts that are texts: the generator's client encodes them as a run does."""

import dataclasses

import pytest

from controllers.rollouts.tokenizer import build_character_tokenizer, load_tokenizer
from rl_actors import GeneratorClient, GeneratorConfig, TrainerConfig
from rl_actors.clients.limits import GeneratorLimits
from rl_actors.texts import TextCodec


@pytest.fixture
def directory(tmp_path) -> str:
    build_character_tokenizer(tmp_path / "tokenizer", "0123456789+=")
    return str(tmp_path / "tokenizer")


def idle(config: GeneratorConfig | None) -> GeneratorClient:
    """A client that starts nothing. config: None before the generator is set up."""
    client = object.__new__(GeneratorClient)
    client.name, client._codec = "generator", None
    client._limits = None if config is None else GeneratorLimits.of_config(config)
    return client


def test_a_text_has_the_tokens_that_a_run_gives_it_and_they_decode_to_it(directory):
    codec = idle(GeneratorConfig(tokenizer_path=directory))._codec_for([[3], "12+3="])
    assert isinstance(codec, TextCodec)
    assert codec.encode("12+3=") == load_tokenizer(directory).encode_beginning("12+3=") == [3, 4, 12, 5, 13]
    assert codec.decode([3, 7, 1]) == "15"
    with pytest.raises(ValueError, match=r"\['x'\] of 'x=' are not in the tokenizer's alphabet '0123456789\+='"):
        codec.encode("x=")


def test_the_tokenizer_is_the_trainers_or_that_of_the_model(directory):
    assert GeneratorConfig.of(TrainerConfig(tokenizer_path=directory)).tokenizer_path == directory
    info = GeneratorLimits.of_config(GeneratorConfig(tokenizer_path=directory))
    assert info.tokenizer_path == directory
    assert "tokenizer_path" in {field.name for field in dataclasses.fields(GeneratorLimits)}


@pytest.mark.parametrize(
    "config, message",
    [
        (GeneratorConfig(), "prompt 1 is the text '12', but generator has no tokenizer; give token ids, or name its"),
        (None, "prompt 1 is the text '12', but generator is not set up yet, so wait for ready"),
    ],
)
def test_a_text_without_a_tokenizer_is_refused_with_the_remedy(config, message):
    with pytest.raises(TypeError, match=message):
        idle(config).generate([[3], "12"])
