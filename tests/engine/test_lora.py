"""Tests of LoRA adapters: which parameters are trained, and which tensors are saved, pushed and exported.

One test compares the logprobs with those that peft computes.
"""

from dataclasses import replace

import pytest
import torch
from references import random_samples, reference_logprobs, save_random
from safetensors.torch import load_file
from test_hf import BASE, MOE

from rl_actors import adapters
from rl_actors.config import LoRAConfig, TrainerConfig
from rl_actors.types import OptimParams

SAMPLES = random_samples([31, 7, 13, 40], seed=1)
STEP = OptimParams(learning_rate=3e-2, grad_divisor=20.0)
ALL = LoRAConfig(rank=4, alpha=16.0, train_unembed=True, seed=3)
ATTENTION = LoRAConfig(rank=2, train_mlp=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return save_random(tmp_path_factory.mktemp("base"), BASE)


def train(engine, steps: int = 2) -> None:
    for _ in range(steps):
        engine.forward_backward(SAMPLES, "cross_entropy")
        engine.optim_step(STEP)


def logprobs(engine) -> list[torch.Tensor]:
    output = engine.forward(SAMPLES)
    pieces = dict(zip(output.indices, output.logprobs.split(output.lengths), strict=True))
    return [pieces[index] for index in range(len(pieces))]


def worst(a, b) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def parameters(engine) -> dict[str, torch.Tensor]:
    return {name: x.detach().full_tensor().clone() for name, x in engine.built.model.named_parameters()}


def test_a_fresh_adapter_changes_no_logprob(make_engine, base):
    assert worst(logprobs(make_engine(base, lora=ALL)), logprobs(make_engine(base))) < 1e-5


@pytest.mark.parametrize("config", [ALL, ATTENTION], ids=["all", "attention"])
def test_training_changes_only_the_adapters(make_engine, base, config):
    engine = make_engine(base, lora=config)
    before = parameters(engine)
    train(engine)
    changed = {name for name, x in parameters(engine).items() if not torch.equal(x, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    layers = {name.split(".")[-3] for name in changed}
    expected = {"wq", "wk", "wv", "wo"} | ({"w1", "w2", "w3", "lm_head"} if config is ALL else set())
    assert layers == expected


@pytest.mark.parametrize("config", [ALL, ATTENTION], ids=["all", "attention"])
def test_peft_computes_the_same_logprobs_with_the_exported_adapter(make_engine, base, tmp_path, config):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine = make_engine(base, lora=config)
    untrained = logprobs(engine)
    train(engine)
    engine.export_lora(str(tmp_path / "adapter"))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    model = PeftModel.from_pretrained(model, str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        expected = [reference_logprobs(model, sample) for sample in SAMPLES]
    assert worst(logprobs(engine), expected) < 1e-4
    assert worst(untrained, expected) > 0.1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter"]


def test_adapters_are_merged_into_pushed_and_exported_weights(make_engine, base, tmp_path):
    engine = make_engine(base, lora=ALL)
    train(engine)
    engine.export_hf(str(tmp_path / "merged"))
    assert worst(logprobs(make_engine(str(tmp_path / "merged"))), logprobs(engine)) < 1e-4
    exported = load_file(tmp_path / "merged" / "model.safetensors")
    pushed = {name: x.full_tensor() for name, x in engine.hf_state_dict().items()}
    assert exported.keys() == pushed.keys() == load_file(f"{base}/model.safetensors").keys()
    assert all(torch.equal(exported[name], pushed[name]) for name in exported)


@pytest.mark.parametrize("config", [ALL, ATTENTION], ids=["all", "attention"])
def test_a_push_of_unmerged_adapters_has_the_tensors_of_export_lora(make_engine, base, tmp_path, config):
    engine = make_engine(base, lora=replace(config, sync="adapter"))
    train(engine)
    engine.export_lora(str(tmp_path / "adapter"))
    exported = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    pushed = {name: x.full_tensor() for name, x in engine.hf_state_dict().items()}
    weights = {name: tuple(tensor.shape) for name, tensor in load_file(f"{base}/model.safetensors").items()}
    assert {name: tuple(x.shape) for name, x in pushed.items()} == adapters.shapes(config, weights)
    assert exported.keys() == pushed.keys()
    assert all(torch.equal(exported[name], pushed[name]) for name in exported)
    assert {x.dtype for x in engine.hf_state_dict(torch.bfloat16).values()} == {torch.bfloat16}


def test_a_checkpoint_holds_only_the_adapters_and_training_from_it_goes_on_bit_for_bit(make_engine, base, tmp_path):
    from torch.distributed.checkpoint import FileSystemReader

    engine = make_engine(base, lora=ALL)
    train(engine)
    engine.save_checkpoint(str(tmp_path / "checkpoint")).result()
    names = FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata
    model_names = [name for name in names if name.startswith("model.")]
    assert model_names and all("lora_" in name for name in model_names)
    other = make_engine(base, lora=ALL)
    assert other.load_checkpoint(str(tmp_path / "checkpoint")) == 2
    train(engine)
    train(other)
    assert all(torch.equal(x, y) for x, y in zip(parameters(engine).values(), parameters(other).values(), strict=True))


def test_the_seed_determines_the_initial_values_of_adapters(make_engine, base):
    one, same, other = (parameters(make_engine(base, lora=replace(ALL, seed=seed))) for seed in (1, 1, 2))
    for name in one:
        if "lora_a" in name:
            assert torch.equal(one[name], same[name]) and not torch.equal(one[name], other[name]), name


def test_export_lora_is_refused_without_adapters(make_engine, base, tmp_path):
    with pytest.raises(ValueError, match="export_lora is not possible with lora.rank=0"):
        make_engine(base).export_lora(str(tmp_path / "adapter"))


@pytest.mark.parametrize(
    "model, fields, message",
    [
        (BASE, {"train_attn": False, "train_mlp": False}, "are all False"),
        (BASE, {"rank": 513, "sync": "adapter"}, 'lora.rank=513 with lora.sync="adapter"; vLLM takes at most 512'),
        (
            replace(BASE, tie_word_embeddings=True),
            {"train_unembed": True},
            "would change the head but not the embedding",
        ),
        (MOE, {}, "model.num_experts=4: torchtitan has no adapters for experts"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_adapters_that_the_model_cannot_have_are_refused(model, fields, message):
    with pytest.raises(ValueError, match=message):
        LoRAConfig(**{"rank": 4, **fields}).validate(model, "somewhere")


@pytest.mark.parametrize(
    "fields, message", [({"rank": -1}, "lora.rank=-1"), ({"rank": 4, "alpha": 0.0}, "lora.alpha=0.0")]
)
def test_a_rank_or_alpha_out_of_range_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TrainerConfig(lora=LoRAConfig(**fields)).validate()


def test_adapters_on_random_weights_are_refused():
    with pytest.raises(ValueError, match="lora.rank=4 with an empty hf_path"):
        TrainerConfig(lora=LoRAConfig(rank=4)).validate()
