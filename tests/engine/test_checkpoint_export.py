"""Tests of exports that are made from a checkpoint, without a trainer.

Such an export must equal the export of the trainer that saved the checkpoint.
"""

import json
from dataclasses import replace

import pytest
import torch
from own_models import save_model
from references import random_samples, save_random
from safetensors.torch import load_file
from test_hf import BASE, LLAMA3_SCALING, MOE

from rl_actors.config import LoRAConfig, TrainerConfig
from rl_actors.engine import export
from rl_actors.types import OptimParams

SHAPES = {
    "Qwen3": BASE,
    "Llama 3, tied": replace(BASE, architecture="llama", rope_scaling=LLAMA3_SCALING, tie_word_embeddings=True),
    "experts": replace(MOE, decoder_sparse_step=2),
}
ADAPTERS = LoRAConfig(rank=4, alpha=16.0, train_unembed=True)


@pytest.fixture
def saved(make_engine, tmp_path):
    """saved(path, lora) trains the model in the directory `path` for one step, and returns the engine and the path of its checkpoint."""

    def saved(path: str, lora: LoRAConfig | None = None):
        engine = make_engine(path, lora=lora or LoRAConfig())
        engine.forward_backward(random_samples([31, 7], seed=1), "cross_entropy")
        engine.optim_step(OptimParams(learning_rate=1e-2))
        checkpoint = str(tmp_path / "checkpoint")
        engine.save_checkpoint(checkpoint).result()
        return engine, checkpoint

    return saved


def same_tensors(a, b) -> bool:
    first, second = load_file(a), load_file(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("shape", "dtype"), [*((shape, "float32") for shape in SHAPES), ("experts", "bfloat16")])
def test_an_export_of_a_checkpoint_equals_the_export_of_its_trainer(saved, tmp_path, shape, dtype):
    engine, checkpoint = saved(save_random(tmp_path / "model", SHAPES[shape]))
    engine.export_hf(str(tmp_path / "theirs"), dtype)
    export.export_checkpoint(checkpoint, engine.config, str(tmp_path / "ours"), dtype=dtype)
    assert same_tensors(tmp_path / "ours/model.safetensors", tmp_path / "theirs/model.safetensors")
    assert (tmp_path / "ours/config.json").read_text() == (tmp_path / "theirs/config.json").read_text()
    assert not (tmp_path / "ours.partial").exists()


def test_adapters_of_a_checkpoint_are_exported_merged_or_by_themselves(saved, tmp_path):
    engine, checkpoint = saved(save_random(tmp_path / "model", BASE), ADAPTERS)
    engine.export_hf(str(tmp_path / "theirs"))
    export.export_checkpoint(checkpoint, engine.config, str(tmp_path / "ours"))
    assert same_tensors(tmp_path / "ours/model.safetensors", tmp_path / "theirs/model.safetensors")
    engine.export_lora(str(tmp_path / "their_adapters"))
    export.export_adapters(checkpoint, engine.config, str(tmp_path / "adapters"))
    name = "adapter_model.safetensors"
    assert same_tensors(tmp_path / "adapters" / name, tmp_path / "their_adapters" / name)
    name = "adapter_config.json"
    assert json.loads((tmp_path / "adapters" / name).read_text()) == json.loads(
        (tmp_path / "their_adapters" / name).read_text()
    )


def test_transformers_generates_with_the_tokenizer_and_the_end_tokens_of_an_export(saved, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_model(tmp_path / "model")
    engine, checkpoint = saved(str(tmp_path / "model"))
    export.export_checkpoint(checkpoint, engine.config, str(tmp_path / "export"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] > prompt["input_ids"].shape[1]
    assert model.generation_config.eos_token_id == [258, 256]


def test_an_impossible_export_is_refused_with_the_reason(saved, tmp_path):
    engine, checkpoint = saved(save_random(tmp_path / "model", BASE))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/thesis.txt").write_text("thesis")
    wider = TrainerConfig(model=replace(BASE, intermediate_size=128))
    deeper = TrainerConfig(model=replace(BASE, num_hidden_layers=BASE.num_hidden_layers + 1))
    cases = [
        (str(tmp_path / "model"), engine.config, "new", "is not a checkpoint of a trainer"),
        (
            checkpoint,
            wider,
            "new",
            r"holds another model: layers.0.feed_forward.w1.weight is \(96, 64\) in the checkpoint",
        ),
        (checkpoint, deeper, "new", r"holds another model: layers.\d.attention.* is not in the checkpoint"),
        (checkpoint, engine.config, "taken", "is not an empty directory; an export never replaces files"),
    ]
    for source, config, target, message in cases:
        with pytest.raises(ValueError, match=message):
            export.export_checkpoint(source, config, str(tmp_path / target))
    with pytest.raises(ValueError, match="lora.rank=0: the run trained no adapters"):
        export.export_adapters(checkpoint, engine.config, str(tmp_path / "new"))
    assert not (tmp_path / "new").exists() and (tmp_path / "taken/thesis.txt").exists()
