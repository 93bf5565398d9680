"""GRPO runs under other layouts: with the rollouts of the single-process run they report its first numbers."""

import asyncio
import io
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import rl_actors
from configs.tiny import tiny
from controllers import cli, main
from controllers.grpo import GRPOConfig, train
from controllers.metrics import RunFolder, read_jsonl

# A run amplifies rounding: Adam divides by the root of small second moments. So the yardstick is a run of one process from weights
# that differ by a few roundings of float32, and a layout may deviate from the run by no more than a few times as much as that one.
PERTURBATION = 1e-6
FACTOR = 5.0
FLOOR = 1e-5
LAYOUTS = {
    "FSDP2 x TP2": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    "PP2": {"pipeline_parallel_degree": 2},
}


class RecordingGenerator(rl_actors.GeneratorClient):
    """The real generator; what it answers is kept in `recording`."""

    recording: list[Any]

    def generate(self, prompts, params=None):
        call = super().generate(prompts, params)
        self.recording.append(call)
        return call


class ReplayingGenerator:
    """Answers as the recorded one did, call by call, whatever the weights."""

    recording: list[Any]

    @classmethod
    def spawn(cls, config, **_):
        return cls()

    async def ready(self) -> None: ...

    async def close(self) -> None: ...

    async def pull_model_state_dict(self, version):
        return version

    async def generate(self, prompts, params):
        return self.recording.pop(0).result()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """The weights that all runs start from: random ones are not the same in every layout."""
    directory = str(tmp_path_factory.mktemp("base"))
    torch.manual_seed(0)
    shape = AutoConfig.for_model(**tiny().trainer.model.to_hf())
    AutoModelForCausalLM.from_config(shape).save_pretrained(directory)
    return directory


def config(base: str, **degrees: int) -> GRPOConfig:
    made = tiny()
    parallelism = replace(made.trainer.parallelism, **degrees)
    return replace(
        made,
        trainer=replace(made.trainer, hf_path=base, parallelism=parallelism),
        steps=10,
        max_warmup_steps=60,
        validate_every=100,
        checkpoint_every=100,
        rollouts=replace(made.rollouts, groups_per_step=64, max_refills=0),
    )


def run(folder: RunFolder, made: GRPOConfig, generator: type, monkeypatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(rl_actors, "GeneratorClient", generator, raising=False)
    flags = dict.fromkeys(("dry_run", "plan", "verbose"), False)
    made.validate()
    environment, tokenizer = main._environment_and_tokenizer(made)
    invocation = cli.Invocation(
        config=made, config_name="tiny", output_dir=folder.path, resume=None, eval_only=None, **flags
    )
    asyncio.run(main._train(train, invocation, folder, environment, tokenizer, io.StringIO()))
    return read_jsonl(folder.metrics)


def perturbed(base: str, directory: str) -> str:
    """A copy of the weights, each multiplied by 1 + PERTURBATION x a normal number."""
    model = AutoModelForCausalLM.from_pretrained(base)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + PERTURBATION * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory)
    return directory


def deviations(records: list[dict[str, Any]], expected: list[dict[str, Any]], key: str) -> list[float]:
    """By step, the largest deviation so far, relative where the value is above 1."""
    errors = [abs(r[key] - e[key]) / max(1.0, abs(e[key])) for r, e in zip(records, expected, strict=True)]
    return list(itertools.accumulate(errors, max))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_under_another_layout_follows_the_run_of_one_process(base, tmp_path, monkeypatch):
    calls: list[Any] = []
    monkeypatch.setattr(RecordingGenerator, "recording", calls, raising=False)
    expected = run(RunFolder(tmp_path / "one"), config(base), RecordingGenerator, monkeypatch)
    grpo = [record for record in expected if record["phase"] == "grpo"]
    assert len(expected) == 70 and len(grpo) == 10 and sum(record.get("updates") or 0 for record in grpo) >= 40

    def replay(name: str, made: GRPOConfig) -> dict[str, list[float]]:
        monkeypatch.setattr(ReplayingGenerator, "recording", list(calls), raising=False)
        records = run(RunFolder(tmp_path / name), made, ReplayingGenerator, monkeypatch)
        assert ReplayingGenerator.recording == []
        assert [record.get("reward/mean") for record in records] == [record.get("reward/mean") for record in expected]
        found = {key: deviations(records, expected, key) for key in ("loss", "grad_norm")}
        print(name, {key: [f"{values[step]:.1e}" for step in (0, 29, 59, 60, 64, 69)] for key, values in found.items()})
        return found

    yardstick = replay("perturbed", config(perturbed(base, str(tmp_path / "perturbed_base"))))
    for name, degrees in LAYOUTS.items():
        for key, found in replay(name, config(base, **degrees)).items():
            for step, (error, allowed) in enumerate(zip(found, yardstick[key], strict=True)):
                assert error <= FLOOR + FACTOR * allowed, f"{name}: {key} of step {step}"
