"""Tests of the end tokens of a model: where they come from, and which requests they end."""

import json
from dataclasses import replace

import pytest
from own_models import save_tokenizer

from rl_actors import GeneratorConfig, ModelConfig, SamplingParams, TrainerConfig
from rl_actors.texts import stop_token_ids
from rl_actors.vllm.requests import vllm_params

END = 258  # <|im_end|>, the tokenizer's end token


@pytest.fixture
def directory(tmp_path):
    """A model's directory with a tokenizer. config.json names another end token than the tokenizer."""
    save_tokenizer(tmp_path)
    model = replace(ModelConfig(), vocab_size=300)
    (tmp_path / "config.json").write_text(json.dumps(model.to_hf() | {"eos_token_id": 7}))
    return tmp_path


@pytest.mark.parametrize(("named", "ids"), [(5, (5,)), ([5, 256], (5, 256)), (None, (END,))])
def test_generation_config_comes_before_the_tokenizer(directory, named, ids):
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert stop_token_ids(directory) == ids


def test_the_tokenizer_comes_before_config_json(directory):
    assert stop_token_ids(directory) == (END,)
    for file in directory.glob("*token*"):
        file.unlink()
    assert stop_token_ids(directory) == (7,)


def test_a_model_without_files_has_no_end_token(tmp_path):
    assert stop_token_ids("") == stop_token_ids(tmp_path) == ()
    assert GeneratorConfig.of(TrainerConfig()).stop_token_ids == ()


@pytest.mark.parametrize("named", [300, -1, [5, 1.5], True, "eos"])
def test_an_end_token_that_the_model_lacks_is_refused_with_its_file(directory, named):
    for file in directory.glob("*token*"):
        file.unlink()
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    with pytest.raises(ValueError, match="generation_config.json has eos_token_id=.*the model has the tokens 0 to 299"):
        stop_token_ids(directory)


def test_a_generator_of_a_trainer_has_the_end_tokens_of_its_files(directory):
    trainer = TrainerConfig(model=replace(ModelConfig(), vocab_size=300), hf_path=str(directory))
    assert GeneratorConfig.of(trainer).stop_token_ids == (END,)


def test_stop_tokens_of_a_config_are_compared_with_the_vocabulary():
    config = GeneratorConfig(model=replace(ModelConfig(), vocab_size=16), max_model_len=64, stop_token_ids=(3, 16))
    with pytest.raises(ValueError, match=r"generator.stop_token_ids=\(3, 16\); the model has the tokens 0 to 15"):
        config.validate()


def test_a_request_stops_at_its_own_tokens_and_at_those_of_the_model():
    [request] = vllm_params(SamplingParams(stop_token_ids=(3,)), 0, (5, 6))
    assert sorted(request.stop_token_ids) == [3, 5, 6]


def test_ignore_stop_leaves_only_the_tokens_of_the_request():
    [request] = vllm_params(SamplingParams(stop_token_ids=(3,), ignore_stop=True), 0, (5, 6))
    assert request.stop_token_ids == [3] and request.ignore_eos
