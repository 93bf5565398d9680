"""RunConfig: the fields that a generator takes from the trainer, and the refusal of trainer and generator configs that do not fit together."""

from dataclasses import replace
from pathlib import Path

import pytest
from references import save_random

from controllers.config_file import from_json, to_json
from controllers.run.config import RunConfig
from rl_actors import GeneratorConfig, LoRAConfig, ModelConfig, TrainerConfig

MODEL = ModelConfig(vocab_size=48, hidden_size=64, num_hidden_layers=2, head_dim=32)


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_random(Path("base"), MODEL)


def config(sync: str, generator: GeneratorConfig | None = None) -> RunConfig:
    lora = LoRAConfig(rank=4, sync=sync)
    trainer = TrainerConfig(model=MODEL, hf_path="base", lora=lora)
    return RunConfig(trainer=trainer, generator=generator or GeneratorConfig())


def test_a_generator_that_pulls_adapters_takes_lora_and_hf_path_from_the_trainer():
    merged, unmerged = config("merged"), config("adapter")
    unmerged.validate()
    assert (merged.generator.lora, merged.generator.hf_path) == (merged.trainer.lora, "")
    assert (unmerged.generator.lora, unmerged.generator.hf_path) == (unmerged.trainer.lora, "base")
    assert unmerged.generator.model == MODEL
    assert from_json(RunConfig, to_json(unmerged)) == unmerged
    assert replace(unmerged, trainer=merged.trainer).generator.lora == merged.trainer.lora


def test_a_generator_that_pulls_adapters_is_refused_if_its_hf_path_is_not_the_trainers():
    with pytest.raises(ValueError, match="generator.hf_path='other' is not trainer.hf_path='base'"):
        config("adapter", GeneratorConfig(hf_path="other")).validate()


def test_an_hf_path_without_the_trainers_model_is_refused():
    with pytest.raises(ValueError, match="nowhere holds no config.json"):
        TrainerConfig(model=MODEL, hf_path="nowhere").validate()
    with pytest.raises(
        ValueError, match="base holds another model: its config.json has hidden_size=64 instead of 128$"
    ):
        TrainerConfig(model=replace(MODEL, hidden_size=128), hf_path="base").validate()


def test_a_generator_is_refused_if_its_trainer_has_an_expert_bias():
    model = replace(MODEL, num_experts=4, num_experts_per_tok=2)
    save_random(Path("base"), model)
    trainer = TrainerConfig(model=model, hf_path="base", load_balance_coeff=0.01)
    with pytest.raises(ValueError, match="generation is not possible with load_balance_coeff=0.01"):
        RunConfig(trainer=trainer, generator=GeneratorConfig()).validate()
