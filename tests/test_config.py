"""Tests of GeneratorConfig.of, which makes a generator's config from the trainer's, and of the check of head_dim."""

from copy import deepcopy
from dataclasses import replace

import pytest

from configs.tiny import tiny
from rl_actors import GeneratorConfig, LoRAConfig, ModelConfig, TrainerConfig

MODEL = ModelConfig(vocab_size=48, hidden_size=64, num_hidden_layers=2, max_position_embeddings=512)


def test_a_generators_config_is_made_from_the_trainers_and_shares_no_object_with_it():
    trainer = TrainerConfig(model=MODEL, max_sequence_length=100)
    before = deepcopy(trainer)
    generator = replace(GeneratorConfig.of(trainer), dtype="bfloat16")
    assert generator.model == trainer.model and generator.lora == trainer.lora
    assert (generator.max_model_len, generator.dtype) == (101, "bfloat16")
    generator.model.vocab_size = 50
    generator.lora.rank = 8
    assert trainer == before


def test_a_generators_sequences_are_no_longer_than_the_model_allows():
    assert GeneratorConfig.of(TrainerConfig(model=MODEL, max_sequence_length=512)).max_model_len == 512


def test_a_generator_that_pulls_only_adapters_has_the_hf_path_of_the_trainer(tied_qwen3):
    trainer = TrainerConfig(hf_path=tied_qwen3, lora=LoRAConfig(rank=4, sync="adapter"), max_sequence_length=64)
    assert GeneratorConfig.of(trainer).hf_path == tied_qwen3
    assert GeneratorConfig.of(replace(trainer, lora=LoRAConfig(rank=4))).hf_path == ""


def test_a_runs_generator_config_has_copies_of_the_trainers_model_and_adapters():
    run = tiny()
    before = deepcopy(run.trainer)
    assert run.generator.model == run.trainer.model and run.generator.lora == run.trainer.lora
    run.generator.model.num_hidden_layers = 7
    run.generator.lora.rank = 8
    assert run.trainer == before


@pytest.mark.parametrize(
    "made", [TrainerConfig(model=replace(MODEL, head_dim=33)), GeneratorConfig(model=replace(MODEL, head_dim=33))]
)
def test_heads_of_an_odd_width_are_refused(made):
    """The rotary embedding rotates pairs of dimensions, so head_dim must be even."""
    with pytest.raises(ValueError, match="model.head_dim=33; it must be even"):
        made.validate()
