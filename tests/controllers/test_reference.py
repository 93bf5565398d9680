"""The KL divergence from the policy as GRPO began: in the reward against a closed form in float64, and the runs that cannot have it.

The reference that a real run holds is in test_grpo.py.
"""

import asyncio
import json
import math
import statistics
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from configs.tiny import tiny
from controllers import cli, launch
from controllers.environments import Problem
from controllers.metrics import Timer
from controllers.reference import apply_reference, penalise
from controllers.rollouts import Group, RolloutBatch, RolloutConfig, to_sample
from controllers.run_folder import RunFolder
from rl_actors import KL, Completion, ModelConfig
from rl_actors.validation import validate_samples

ESTIMATES = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}
ADVANTAGES = {
    "rloo": lambda rewards: [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards],
    "dr_grpo": lambda rewards: [r - statistics.fmean(rewards) for r in rewards],
    "grpo": lambda rewards: [(r - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6) for r in rewards],
}
REWARDS = [[1.0, 0.0, 0.25], [0.0, 1.0, 0.0]]


def group(rewards: list[float], lengths: list[int], draw: torch.Generator) -> Group:
    completions = []
    for length in lengths:
        tokens = torch.randint(16, (length,), generator=draw).tolist()
        logprobs = (-3 * torch.rand(length, generator=draw)).tolist()
        versions = [0] * length
        completions.append(
            Completion(tokens=tokens, logprobs=logprobs, policy_versions=versions, finish_reason="length")
        )
    return group_of([3, 4, 5], completions, rewards)


def group_of(prompt: list[int], completions: list[Completion], rewards: list[float]) -> Group:
    problem = Problem(prompt="", answer="", key="")
    return Group(problem=problem, prompt=prompt, completions=completions, texts=[""] * len(rewards), rewards=rewards)


@pytest.fixture
def batch() -> RolloutBatch:
    """Two groups with a signal and one without between them; completions of one to four tokens."""
    draw = torch.Generator().manual_seed(0)
    groups = [
        group(REWARDS[0], [2, 1, 4], draw),
        group([1.0, 1.0, 1.0], [1, 1, 1], draw),
        group(REWARDS[1], [3, 2, 2], draw),
    ]
    samples = [to_sample(g.prompt, c, 0.0, 1.3) for g in groups if g.has_signal() for c in g.completions]
    return RolloutBatch(samples=samples, groups=groups, num_refills=0)


class ReferenceClient:
    """Answers forward with logprobs that it drew, on prompts, too, and keeps those of the completions."""

    def __init__(self):
        self.completions: list[list[float]] = []
        self.draw = torch.Generator().manual_seed(1)

    async def forward(self, samples):
        rows = [-3 * torch.rand(len(sample), generator=self.draw) for sample in samples]
        self.completions += [
            row[sample.columns["loss_weights"] != 0].tolist() for row, sample in zip(rows, samples, strict=True)
        ]
        return SimpleNamespace(logprobs=rows)


def run_with(**options) -> SimpleNamespace:
    config = replace(tiny(), reference_kl=0.3, samples_per_forward_backward=4, **options)
    return SimpleNamespace(config=config, timer=Timer())


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("estimator", ESTIMATES)
def test_kl_in_the_reward_is_the_closed_form_in_float64(batch, estimator, advantage):
    rollouts = RolloutConfig(advantage=advantage)
    run = run_with(reference_kl_in="reward", reference_kl_estimator=estimator, rollouts=rollouts)
    client = ReferenceClient()
    samples, metrics = asyncio.run(apply_reference(run, client, batch))

    sampled = [c.logprobs for g in (batch.groups[0], batch.groups[2]) for c in g.completions]
    divergences = [
        sum(ESTIMATES[estimator](old - ref) for old, ref in zip(olds, refs, strict=True))
        for olds, refs in zip(sampled, client.completions, strict=True)
    ]
    penalties = [0.3 * divergence for divergence in divergences]
    expected = [
        value
        for rewards, own in zip(REWARDS, (penalties[:3], penalties[3:]), strict=True)
        for value in ADVANTAGES[advantage]([r - p for r, p in zip(rewards, own, strict=True)])
    ]
    for sample, value in zip(samples, expected, strict=True):
        weights = sample.columns["loss_weights"].double()
        torch.testing.assert_close(sample.columns["advantages"].double(), weights * value, rtol=2e-6, atol=2e-6)
    num_tokens = sum(map(len, sampled))
    assert metrics == pytest.approx(
        {"kl/reference": sum(divergences) / num_tokens, "reward/kl_penalty": statistics.fmean(penalties)}, rel=1e-5
    )
    validate_samples(samples, run.config.loss(), vocab_size=16, max_sequence_length=64, max_call_bytes=1 << 20)


def test_kl_in_the_loss_adds_the_column_and_leaves_the_advantages(batch):
    run, client = run_with(), ReferenceClient()
    samples, metrics = asyncio.run(apply_reference(run, client, batch))
    assert metrics == {} and run.config.loss().kl == KL(coefficient=0.3, estimator="k3")
    for sample, before, logprobs in zip(samples, batch.samples, client.completions, strict=True):
        assert sample.columns["ref_logprobs"][sample.columns["loss_weights"] != 0].tolist() == logprobs
        assert sample.columns["advantages"] is before.columns["advantages"]


def test_kl_in_the_reward_is_not_in_the_loss_and_k1_unless_said_otherwise():
    config = run_with(reference_kl_in="reward").config
    assert config.loss().kl is None and config.kl().estimator == "k1"
    assert replace(config, reference_kl_estimator="k2").kl().estimator == "k2"
    assert replace(config, reference_kl_in="loss").loss().kl.estimator == "k3"
    assert replace(config, reference_kl=0.0, reference_kl_in="loss").loss().kl is None


def test_the_example_of_the_docstring():
    completions = [Completion(tokens=[1, 2], logprobs=[-0.5, -0.5], policy_versions=[0, 0], finish_reason="length")] * 2
    one = group_of([3], completions, [1.0, 0.0])
    samples = [to_sample([3], completion, 0.0, 1.0) for completion in completions]
    references = [torch.tensor([-1.0, -1.0]), torch.tensor([-0.5, -0.5])]
    samples = [replace(s, columns={**s.columns, "ref_logprobs": r}) for s, r in zip(samples, references, strict=True)]
    found, _ = penalise([one], samples, KL(coefficient=0.1, estimator="k1"), "dr_grpo")
    advantages = [sample.columns["advantages"].tolist() for sample in found]
    assert advantages == [pytest.approx([0.45, 0.45]), pytest.approx([-0.45, -0.45])]


def test_k1_in_the_reward_has_the_gradient_of_the_expected_reward_less_the_kl():
    """In the mean over all completions of two tokens out of three, by enumeration in float64."""
    draw = torch.Generator().manual_seed(2)
    logits, reference = (torch.randn(4, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    pairs = [(a, b) for a in range(3) for b in range(3)]
    rewards = torch.rand(9, generator=draw)

    def logprobs_ST(logits_43):  # row 0 is of the first token, row 1 + a of the second after the first token a
        rows = torch.log_softmax(logits_43, -1)
        return torch.stack([torch.stack([rows[0, a], rows[1 + a, b]]) for a, b in pairs])

    policy_ST, reference_ST = logprobs_ST(logits), logprobs_ST(reference)
    log_S, reference_S = policy_ST.sum(1), reference_ST.sum(1)
    expected = (log_S.exp() * (rewards - 0.7 * (log_S - reference_S))).sum()
    [gradient] = torch.autograd.grad(expected, logits, retain_graph=True)

    completions = [
        Completion(tokens=list(pair), logprobs=row, policy_versions=[0, 0], finish_reason="length")
        for pair, row in zip(pairs, policy_ST.tolist(), strict=True)
    ]
    samples = [to_sample([0], completion, 0.0, 1.0) for completion in completions]
    samples = [
        replace(s, columns={**s.columns, "ref_logprobs": row.float()})
        for s, row in zip(samples, reference_ST, strict=True)
    ]
    found, _ = penalise(
        [group_of([0], completions, rewards.tolist())], samples, KL(coefficient=0.7, estimator="k1"), "dr_grpo"
    )
    advantages_ST = torch.stack([sample.columns["advantages"] for sample in found]).double()
    surrogate = (log_S.detach().exp() * (advantages_ST * policy_ST).sum(1)).sum()
    [actual] = torch.autograd.grad(surrogate, logits)
    torch.testing.assert_close(actual, gradient, rtol=1e-6, atol=1e-6)


def past_run(path, *, step: int, has_reference: bool, config, **state) -> RunFolder:
    folder = RunFolder(path)
    checkpoint = folder.checkpoints / f"step-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"step": step, "cursor": 0} | state))
    folder.config.write_text(cli.config_to_json(config))
    if has_reference:
        folder.reference.mkdir()
    return folder


def resume(monkeypatch, capsys, folder: RunFolder, *flags: str) -> tuple[int | None, str]:
    """The exit status of a dry run and what it says on stderr."""
    monkeypatch.setattr(sys, "argv", ["grpo", "--resume", str(folder.path), "--dry-run", *flags])
    try:
        launch.main("controllers.grpo")
    except SystemExit as exit:
        return exit.code, capsys.readouterr().err
    return None, capsys.readouterr().err


@pytest.mark.parametrize(("kind", "max_warmup_steps"), [("loss", 600), ("reward", 600), ("reward", 0)])
def test_a_reference_asked_for_only_at_resume_is_refused(tmp_path, monkeypatch, capsys, kind, max_warmup_steps):
    config = replace(tiny(), max_warmup_steps=max_warmup_steps)
    warmup_steps = 5 if max_warmup_steps else 0
    folder = past_run(tmp_path / "run", step=9, has_reference=False, config=config, warmup_steps=warmup_steps)
    status, error = resume(monkeypatch, capsys, folder, "--reference-kl", "0.05", "--reference-kl-in", kind)
    assert status == 2
    assert (
        f"error: reference_kl=0.05 needs the weights that GRPO began with, but {folder.reference} is not there" in error
    )
    assert "this run began with reference_kl=0; resume it so, or start a new one" in error
    assert resume(monkeypatch, capsys, folder) == (None, "")


@pytest.mark.parametrize(
    ("step", "state", "has_reference"),
    [
        (9, {"warmup_steps": 5}, True),  # it had one
        (5, {"warmup_steps": 5}, False),  # the warm-up is just over
        (3, {"recent": []}, False),  # in the warm-up
    ],
)
def test_a_reference_that_is_there_or_still_to_come_is_taken_at_resume(
    tmp_path, monkeypatch, capsys, step, state, has_reference
):
    folder = past_run(tmp_path / "run", step=step, has_reference=has_reference, config=tiny(), **state)
    assert resume(monkeypatch, capsys, folder, "--reference-kl", "0.05") == (None, "")


def test_the_weights_of_hf_path_are_a_reference_at_any_time(tmp_path, monkeypatch, capsys, untied_qwen3):
    made = tiny()
    trainer = replace(made.trainer, model=ModelConfig.from_hf(untied_qwen3), hf_path=untied_qwen3)
    config = replace(made, trainer=trainer, max_warmup_steps=0)
    folder = past_run(tmp_path / "run", step=9, has_reference=False, config=config, warmup_steps=0)
    assert resume(monkeypatch, capsys, folder, "--reference-kl", "0.05") == (None, "")
    folder = past_run(tmp_path / "warm", step=9, has_reference=False, config=config, warmup_steps=5)
    assert resume(monkeypatch, capsys, folder, "--reference-kl", "0.05")[0] == 2


def test_a_run_without_a_complete_checkpoint_starts_again_and_may_have_a_reference(tmp_path, monkeypatch, capsys):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.config.write_text(cli.config_to_json(tiny()))
    assert resume(monkeypatch, capsys, folder, "--reference-kl", "0.05") == (None, "")
