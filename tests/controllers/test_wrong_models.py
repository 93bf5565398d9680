"""Models that a run cannot use. Each model is refused before a process starts. The message names the fault, and the file or the field."""

import json
import sys
from pathlib import Path

import pytest
from own_models import save_model

from controllers.program import launch


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A directory with a model that a run can use. A test changes the files that its case names, and restores them afterwards."""
    path = tmp_path_factory.mktemp("models") / "mine"
    save_model(path)
    lines = [json.dumps({"prompt": f"{a}+1=", "answer": str(a + 1)}) for a in range(20)]
    (path.parent / "task.jsonl").write_text("\n".join(lines))
    return path


FLAGS = ["--config", "qwen3", "--dry-run", "--environment.num-held-out", "4", "--max-tokens", "8"]
FLAGS += ["--trainer.max-sequence-length", "256", "--generator.max-model-len", "256"]


@pytest.fixture
def refusal(directory, monkeypatch, capsys):
    """refusal(flags) returns the error text of `python -m controllers.grpo --dry-run` with the model ./mine, or "" if there is no error."""

    def run(*flags: str, model: str = "") -> str:
        monkeypatch.chdir(directory.parent)
        task = ["--environment.task", "task.jsonl"]
        monkeypatch.setattr(sys, "argv", ["grpo", *FLAGS, *task, "--trainer.hf-path", model or "./mine", *flags])
        capsys.readouterr()
        try:
            launch.start_loop("controllers.grpo")
        except SystemExit as ended:
            assert ended.code == 2
            return capsys.readouterr().err
        return ""

    return run


CHANGES = {
    # Name of a case -> ({file: change}, part of the message of the refusal).
    # None removes the file, a text replaces its content, and a dict replaces entries of its JSON.
    "another architecture": (
        {"config.json": {"model_type": "gemma3_text"}},
        "mine/config.json has model_type 'gemma3_text'; supported are qwen3, qwen3_moe, llama, mistral",
    ),
    "another activation": ({"config.json": {"hidden_act": "gelu"}}, "has hidden_act='gelu'; supported is 'silu'"),
    "no config": ({"config.json": None}, "./mine holds no config.json"),
    "no weights": ({"model.safetensors": None}, "trainer.hf_path='./mine' lacks *.safetensors"),
    "a missing part of the weights": (
        {"model.safetensors.index.json": '{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'},
        "trainer.hf_path='./mine' lacks model-00002-of-00002.safetensors",
    ),
    "an index that is cut off": (
        {"model.safetensors.index.json": '{"weight_map": {"a": '},
        "mine/model.safetensors.index.json is not a JSON object with a weight_map",
    ),
    "an index with a number in place of a file name": (
        {"model.safetensors.index.json": '{"weight_map": {"a": 1}}'},
        "mine/model.safetensors.index.json is not a JSON object with a weight_map",
    ),
    "weights that are cut off": (
        {"model.safetensors": "\x08\0\0\0\0\0\0\0{"},
        "mine/model.safetensors cannot be read: ",
    ),
    "no tokenizer": ({"tokenizer_config.json": None}, "./mine holds no tokenizer_config.json"),
    "a small vocabulary": (
        {"config.json": {"vocab_size": 200}},
        "the tokenizer has 259 tokens but trainer.model.vocab_size=200",
    ),
    "no chat template": ({"chat_template.jinja": None}, "the tokenizer of ./mine has no chat template"),
    "a template that fails": (
        {"chat_template.jinja": "{{ raise_exception('the roles must alternate') }}"},
        "the chat template of ./mine does not take the conversation user: '",
    ),
    "a template that is cut off": (
        {"chat_template.jinja": "{% for message in"},
        "the chat template of ./mine does not take",
    ),
    "an unknown stop token": (
        {"generation_config.json": {"eos_token_id": 999}},
        "generation_config.json has eos_token_id=999, but the tokenizer has the tokens 0 to 258",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_the_refusal_of_a_model_directory_that_no_run_can_use_names_the_fault(directory, refusal, case):
    changes, message = CHANGES[case]
    kept = {name: (directory / name).read_bytes() if (directory / name).exists() else None for name in changes}
    try:
        for name, change in changes.items():
            file = directory / name
            if change is None:
                file.unlink()
            elif isinstance(change, str):
                file.write_text(change)
            else:
                file.write_text(json.dumps(json.loads(file.read_text()) | change))
        assert message in refusal()
    finally:
        for name, content in kept.items():
            if content is None:
                (directory / name).unlink(missing_ok=True)
            else:
                (directory / name).write_bytes(content)


def test_flags_that_do_not_fit_the_model_are_refused_and_the_model_itself_is_accepted(directory, refusal, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(directory.parent / "no_cache"))
    assert "the model Qwen/Qwen9 is not on this machine" in refusal(model="Qwen/Qwen9")
    assert "hf download Qwen/Qwen9" in refusal(model="Qwen/Qwen9")
    assert "alphabet and trainer.hf_path are both empty" in refusal("--trainer.hf-path", "")
    assert "trainer.tokenizer_path='elsewhere'; a run uses the tokenizer of" in refusal(
        "--trainer.tokenizer-path", "elsewhere"
    )
    other_layers = refusal("--trainer.model.num-hidden-layers", "3")
    assert "./mine holds another model: its config.json has " in other_layers
    assert "; num_hidden_layers=2 instead of 3; " in other_layers
    assert refusal() == ""
