"""Tests of Hugging Face directories. transformers and the engine load each other's directories, and give equal logprobs."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copyfile

import pytest
import torch
from references import BASE, random_samples, reference_logprobs, save_random
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rl_actors.config import ModelConfig, TrainerConfig
from rl_actors.engine import hf
from rl_actors.types import OptimParams, Sample

LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64.0,  # so small that rotary wavelengths lie in all three ranges of the scaling
}
LLAMA = replace(BASE, architecture="llama", rms_norm_eps=1e-5)
MOE = replace(BASE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SHAPES = {
    "4 query heads per key head": replace(BASE, num_key_value_heads=1),
    "2 query heads per key head, tied": replace(BASE, tie_word_embeddings=True),
    "1 query head per key head": replace(BASE, num_key_value_heads=4),
    "odd vocabulary": replace(BASE, vocab_size=67),
    "Llama": LLAMA,
    "Llama 3, tied": replace(LLAMA, rope_scaling=LLAMA3_SCALING, rope_theta=500_000.0, tie_word_embeddings=True),
    "Mistral": replace(LLAMA, architecture="mistral"),
    "experts": MOE,
    "experts in every second block, router weights not normalized, tied": replace(
        MOE, num_hidden_layers=4, decoder_sparse_step=2, norm_topk_prob=False, tie_word_embeddings=True
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made: dict[str, str] = {}

    def make(shape: str) -> str:
        if shape not in made:
            made[shape] = save_random(tmp_path_factory.mktemp("hf"), SHAPES[shape])
        return made[shape]

    return make


def all_targets(vocab_size: int) -> list[Sample]:
    """One sample for every token id. All targets of the k-th sample are id k, so one forward gives the log probabilities of all ids."""
    tokens = random_samples([13], seed=3)[0].tokens
    return [Sample(tokens=tokens, targets=torch.full_like(tokens, target)) for target in range(vocab_size)]


def log_probabilities(engine) -> torch.Tensor:
    output = engine.forward(all_targets(engine.config.model.vocab_size))
    pieces = dict(zip(output.indices, output.logprobs.split(output.lengths), strict=True))
    return torch.stack([pieces[index] for index in range(len(pieces))])


def transformers_log_probabilities(path: str) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = random_samples([13], seed=3)[0].tokens
    with torch.no_grad():
        return model(input_ids=tokens[None]).logits[0].log_softmax(-1).T


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_and_the_engine_load_each_others_directories_with_equal_logprobs(
    make_engine, directory, tmp_path, shape
):
    engine = make_engine(directory(shape))
    expected = transformers_log_probabilities(directory(shape))
    assert expected.std() > 1.0  # a model that guesses uniformly would hide differences
    assert worst(log_probabilities(engine), expected) < 1e-4

    # Train first, because otherwise an export that copies the loaded directory would pass.
    engine.forward_backward(random_samples([31, 7], seed=1), "cross_entropy")
    engine.optim_step(OptimParams(learning_rate=1e-2))
    engine.export_hf(str(tmp_path / "export"))
    trained = log_probabilities(engine)
    assert worst(trained, expected) > 0.1
    assert worst(transformers_log_probabilities(str(tmp_path / "export")), trained) < 1e-4
    assert worst(log_probabilities(make_engine(str(tmp_path / "export"))), trained) < 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_a_trainer_config_without_a_model_reads_the_model_from_hf_path(directory, shape):
    assert TrainerConfig(hf_path=directory(shape)).model == SHAPES[shape]


@pytest.mark.parametrize("shape", ["2 query heads per key head, tied", "experts"])
def test_an_export_in_several_files_has_an_index_that_transformers_reads(
    make_engine, directory, tmp_path, monkeypatch, shape
):
    monkeypatch.setattr(hf, "MAX_FILE_BYTES", 50_000)
    engine, path = make_engine(directory(shape)), tmp_path / "export"
    engine.export_hf(str(path))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    expected = transformers_log_probabilities(directory(shape))
    assert worst(transformers_log_probabilities(str(path)), expected) < 1e-6
    assert worst(log_probabilities(make_engine(str(path))), expected) < 1e-4


def test_an_export_in_bfloat16_holds_rounded_weights_and_loads(make_engine, directory, tmp_path):
    engine, path = make_engine(directory("experts")), tmp_path / "export"
    engine.export_hf(str(path), dtype="bfloat16")
    tensors = load_file(path / "model.safetensors")
    expected = engine.hf_state_dict()
    assert tensors.keys() == expected.keys()
    whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in expected.items()}
    assert all(torch.equal(tensors[name], whole[name].bfloat16()) for name in tensors)
    assert json.loads((path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert worst(log_probabilities(make_engine(str(path))), transformers_log_probabilities(str(path))) < 1e-4


def test_an_export_copies_only_the_tokenizer_files_of_its_source_and_leaves_no_other_folder(
    make_engine, directory, tmp_path
):
    source = tmp_path / "source"
    source.mkdir()
    path = directory("1 query head per key head")
    for name in ("config.json", "model.safetensors"):
        copyfile(f"{path}/{name}", source / name)
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.txt").write_text("private")
    make_engine(str(source)).export_hf(str(tmp_path / "export"))
    assert sorted(file.name for file in (tmp_path / "export").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["export", "source"]


@pytest.mark.parametrize("error", [OSError, SafetensorError])
def test_an_export_that_fails_leaves_no_directory_and_gathers_all_tensors(
    make_engine, directory, tmp_path, monkeypatch, error
):
    """If rank 0 stopped at the error, the other ranks would wait for it in the gather of the next tensor."""

    def full(*_, **__):
        raise error("No space left on device")

    gathered = []

    def whole_tensors(named):
        for name, whole in real_whole_tensors(named):
            gathered.append(name)
            yield name, whole

    engine = make_engine(directory("experts"))
    real_whole_tensors = hf.whole_tensors
    monkeypatch.setattr(hf, "whole_tensors", whole_tensors)
    monkeypatch.setattr(hf, "save_file", full)
    monkeypatch.setattr(
        hf, "MAX_FILE_BYTES", 1
    )  # so that the first tensor is written before the second one is gathered
    with pytest.raises(error, match="No space left"):
        engine.export_hf(str(tmp_path / "export"))
    assert not (tmp_path / "export").exists() and engine.info().state == "idle"
    assert len(gathered) == len(list(engine.built.model.parameters()))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_export_never_replaces_a_file_or_a_folder_with_files(make_engine, directory, tmp_path, kind):
    path = tmp_path / "precious"
    precious = path if kind == "file" else path / "thesis.txt"
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("thesis")
    with pytest.raises(ValueError, match="precious exists and is not an empty directory"):
        make_engine(directory("experts")).export_hf(str(path))
    assert precious.read_text() == "thesis"


def test_an_unknown_dtype_of_an_export_is_refused(make_engine, directory, tmp_path):
    with pytest.raises(ValueError, match="dtype='float8'; it must be one of float32, bfloat16"):
        make_engine(directory("experts")).export_hf(str(tmp_path / "export"), dtype="float8")


def test_tensors_that_do_not_fit_the_config_are_refused_with_names_and_shapes(make_engine, directory, tmp_path):
    path = directory("1 query head per key head")
    tensors = load_file(f"{path}/model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
    tensors["lm_head.weight"] = torch.zeros(64, 63)
    save_file(tensors, tmp_path / "model.safetensors")
    copyfile(f"{path}/config.json", tmp_path / "config.json")
    with pytest.raises(ValueError) as caught:
        make_engine(str(tmp_path))
    assert str(caught.value) == (
        f"the tensors of {tmp_path} do not fit its config.json: 1 missing: model.norm.weight; "
        "1 unexpected: model.layers.7.mlp.up_proj.weight; "
        "1 of another shape: lm_head.weight ([64, 63], expected [64, 64])"
    )


def test_a_directory_of_a_tied_model_may_hold_the_head(make_engine, directory, tmp_path):
    path = directory("2 query heads per key head, tied")
    tensors = load_file(f"{path}/model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    copyfile(f"{path}/config.json", tmp_path / "config.json")
    engine = make_engine(str(tmp_path))
    assert worst(log_probabilities(engine), transformers_log_probabilities(path)) < 1e-4


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3'; supported are qwen3, qwen3_moe, llama, mistral"),
        (
            {"model_type": "mistral", "sliding_window": 4096},
            "sliding_window=4096; supported is only sliding_window=None",
        ),
        (
            {"model_type": "mistral"},
            "lacks sliding_window, so transformers uses its default; supported is only sliding_window=None",
        ),
        ({"use_sliding_window": True}, "use_sliding_window=True; supported is False"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn'; supported are 'default'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_type='llama3' without low_freq_factor"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"model_type": "qwen3_moe", "hidden_size": None, "head_dim": None}, "lacks hidden_size, head_dim, "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_is_not_supported_is_refused_with_the_name_of_the_entry(tmp_path, entry, message):
    values = SHAPES["1 query head per key head"].to_hf() | entry
    (tmp_path / "config.json").write_text(json.dumps({name: x for name, x in values.items() if x is not None}))
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_entries_that_a_config_lacks_have_the_defaults_of_transformers(tmp_path, model_type):
    from transformers import AutoConfig

    values = replace(LLAMA, architecture=model_type, num_attention_heads=16).to_hf()
    del values["num_key_value_heads"], values["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    expected, found = AutoConfig.from_pretrained(tmp_path), ModelConfig.from_hf(tmp_path)
    assert found.num_key_value_heads == expected.num_key_value_heads
    assert found.head_dim == expected.head_dim or (
        expected.head_dim is None and found.head_dim * 16 == found.hidden_size
    )


def test_an_export_of_a_llama_3_has_a_whole_number_of_original_positions(tmp_path):
    config = SHAPES["Llama 3, tied"]
    config.save(tmp_path)
    scaling = json.loads((tmp_path / "config.json").read_text())["rope_scaling"]
    assert scaling["original_max_position_embeddings"] == 64 and scaling["factor"] == 8.0
    assert isinstance(scaling["original_max_position_embeddings"], int)
    assert ModelConfig.from_hf(tmp_path) == config


def test_a_file_of_weights_that_was_cut_off_is_refused_with_its_name(directory, tmp_path):
    for file in Path(directory("1 query head per key head")).iterdir():
        copyfile(file, tmp_path / file.name)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    for length in (len(whole) - 10, 20, 0):
        weights.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"{weights} is cut off or no safetensors file"):
            hf.require_same_tensors(ModelConfig.from_hf(tmp_path), str(tmp_path))


def test_a_path_without_weights_is_refused(make_engine, tmp_path):
    BASE.save(tmp_path)
    with pytest.raises(ValueError, match=r"holds no \*.safetensors"):
        make_engine(str(tmp_path))


def test_logprobs_of_a_batch_through_experts_are_those_of_transformers(make_engine, directory):
    from transformers import AutoModelForCausalLM

    samples = random_samples([7, 31, 1, 64, 13], temperature=0.7)
    path = directory("experts")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = [reference_logprobs(model, sample) for sample in samples]
    output = make_engine(path).forward(samples)
    pieces = dict(zip(output.indices, output.logprobs.split(output.lengths), strict=True))
    assert max(worst(pieces[i], expected[i]) for i in range(len(samples))) < 1e-4
