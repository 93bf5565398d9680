"""Prompts that are texts: the generator's client encodes them as a run does."""

import dataclasses

import pytest
from waiting import GUARD

from controllers.rollouts.tokenizer import build_character_tokenizer, load_tokenizer
from rl_actors import Completion, GeneratorClient, GeneratorConfig, GeneratorInfo, TrainerConfig
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


class Echo:
    """A fake generator that completes every prompt with its own last token."""

    is_owned, last_pull = False, None

    def __init__(self, config: GeneratorConfig) -> None:
        limits = {"max_model_len": 64, "vocab_size": 16, "tokenizer_path": config.tokenizer_path}
        self.known = GeneratorInfo(policy_version=-1, logs="", **limits)

    async def ready(self) -> None: ...

    async def close(self) -> None: ...

    async def start_generate(self, prompts, params, seed_indices, adapter=None) -> int:
        self.prompts = prompts
        return 0

    async def finished_groups(self, call: int, at_least: int):
        made = {"logprobs": [0.0], "policy_versions": [-1], "finish_reason": "stop"}
        return [(index, [Completion(tokens=prompt[-1:], **made)]) for index, prompt in enumerate(self.prompts)]


def test_generate_each_takes_texts_as_generate_does_and_gives_texts(monkeypatch, directory):
    monkeypatch.setattr(GeneratorClient, "_spawn_one", staticmethod(lambda mesh, *, config, **_: Echo(config)))
    with GeneratorClient(None, config=GeneratorConfig(tokenizer_path=directory)) as client:
        prompts = ["12+3=", "7"]
        [[first], [second]] = client.generate(prompts).result(GUARD)
        each = {index: completion for index, [completion] in client.generate_each(prompts)}
        assert [each[0], each[1]] == [first, second] and (first.text, second.text) == ("=", "7")
        [(_, [of_ids])] = list(client.generate_each([[3, 4]]))
        assert of_ids.text is None


def test_a_text_given_to_compute_logprobs_is_refused_with_the_remedy(directory):
    message = r"sequence 1 is the text '12'; give its token ids, such as TextCodec.load\(directory\).encode\(text\)"
    with pytest.raises(TypeError, match=message):
        idle(GeneratorConfig(tokenizer_path=directory)).compute_logprobs([[3], "12"])


@pytest.mark.parametrize(
    "config, message",
    [
        (GeneratorConfig(), "prompt 1 is the text '12', but generator has no tokenizer; give token ids, or name its"),
        (None, "prompt 1 is the text '12', but generator is not set up yet, so wait for ready"),
    ],
)
def test_a_text_without_a_tokenizer_is_refused_with_the_remedy(config, message):
    for call in (idle(config).generate, idle(config).generate_each):
        with pytest.raises(TypeError, match=message):
            call([[3], "12"])
