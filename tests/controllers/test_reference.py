"""The KL divergence from the reference, which is the policy with which GRPO began.

Some tests compare the KL penalty on rewards with a closed form in float64. Other tests check which resumed runs can have
a reference. test_grpo.py tests the reference of a real run.
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
from references import save_random

from configs.tiny import tiny
from controllers import config_file
from controllers.algorithms.reference import Reference
from controllers.environments import Problem
from controllers.observe.logger import Timer
from controllers.observe.run_folder import RunFolder
from controllers.program import launch
from controllers.rollouts.groups import Group, RolloutBatch, RolloutConfig
from rl_actors import KL, Completion
from rl_actors.validation import validate_samples

# Keys are the names of estimators. d is the generator's logprob of a token minus the reference's logprob of this token.
ESTIMATES = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
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
    texts = [""] * len(rewards)
    return Group(
        problem=problem, prompt=prompt, completions=completions, texts=texts, task_rewards=rewards, rewards=rewards
    )


@pytest.fixture
def groups() -> list[Group]:
    """Three groups with completions of one to four tokens. The task rewards are equal in the middle group, but not in the other two."""
    draw = torch.Generator().manual_seed(0)
    return [
        group(REWARDS[0], [2, 1, 4], draw),
        group([1.0, 1.0, 1.0], [1, 1, 1], draw),
        group(REWARDS[1], [3, 2, 2], draw),
    ]


class ReferenceClient:
    """A fake client whose `forward` returns random logprobs. `completions` keeps the logprobs at the tokens of the completions."""

    def __init__(self):
        self.completions: list[list[float]] = []
        self.draw = torch.Generator().manual_seed(1)

    async def forward(self, samples):
        rows = [-3 * torch.rand(len(sample), generator=self.draw) for sample in samples]
        for row, sample in zip(rows, samples, strict=True):
            self.completions.append(row[sample.columns["loss_weights"] != 0].tolist())
        return SimpleNamespace(logprobs=rows)


class KnownReference:
    """A fake client whose `forward` returns given logprobs for the completions, and 0 for the prompts."""

    def __init__(self, completions: list[torch.Tensor]):
        self.completions = iter(completions)

    async def forward(self, samples):
        rows = []
        for sample in samples:
            row = torch.zeros(len(sample))
            row[sample.columns["loss_weights"] != 0] = next(self.completions).float()
            rows.append(row)
        return SimpleNamespace(logprobs=rows)


def reference_of(client) -> Reference:
    return Reference(model=client, samples_per_forward=4, timer=Timer())


def penalised(groups: list[Group], client, **kl) -> list[Group]:
    return asyncio.run(reference_of(client).penalise(groups, KL(**kl), 1.3))


@pytest.mark.parametrize("estimator", ESTIMATES)
def test_the_kl_penalty_on_rewards_equals_its_closed_form(groups, estimator):
    client = ReferenceClient()
    found = penalised(groups, client, coefficient=0.3, estimator=estimator)

    sampled = [completion.logprobs for group in groups for completion in group.completions]
    expected = []
    for olds, refs in zip(sampled, client.completions, strict=True):
        expected.append(sum(ESTIMATES[estimator](old - ref) for old, ref in zip(olds, refs, strict=True)))
    rewards = [reward for group in groups for reward in group.task_rewards]
    actual = [reward for group in found for reward in group.rewards]
    assert [divergence for group in found for divergence in group.divergences] == pytest.approx(
        expected, rel=2e-6, abs=2e-6
    )
    assert actual == pytest.approx([r - 0.3 * d for r, d in zip(rewards, expected, strict=True)], rel=2e-6, abs=2e-6)
    assert [group.task_rewards for group in found] == [group.task_rewards for group in groups]

    batch = RolloutBatch(samples=[], groups=found, advantages=[], num_refills=0, num_retries=0, version=0)
    metrics = batch.metrics()
    num_tokens = sum(map(len, sampled))
    assert metrics["kl/reference"] == pytest.approx(sum(expected) / num_tokens, rel=1e-5)
    assert metrics["reward/kl_penalty"] == pytest.approx(0.3 * statistics.fmean(expected), rel=1e-5)
    assert metrics["reward/mean"] == pytest.approx(statistics.fmean(rewards))


def samples_of(groups: list[Group], config: RolloutConfig):
    return RolloutBatch.of(groups, config, num_refills=0, num_retries=0, version=0).samples


def test_advantages_and_the_choice_of_groups_use_the_penalised_rewards(groups):
    config = RolloutConfig(advantage="dr_grpo", group_size=3)
    assert len(samples_of(groups, config)) == 6  # without the middle group, whose task rewards are equal
    found = penalised(groups, ReferenceClient(), coefficient=0.3, estimator="k1")
    assert [group.is_trainable() for group in found] == [True, True, True]
    samples = samples_of(found, config)
    assert len(samples) == 9
    expected = [reward - statistics.fmean(group.rewards) for group in found for reward in group.rewards]
    for sample, value in zip(samples, expected, strict=True):
        weights = sample.columns["loss_weights"]
        torch.testing.assert_close(sample.columns["advantages"], weights * value, rtol=2e-6, atol=2e-6)
    same = [replace(group, rewards=[0.5, 0.5, 0.5]) for group in found]
    assert samples_of(same, config) == []
    validate_samples(samples, tiny().make_loss(), vocab_size=16, max_sequence_length=64, max_call_bytes=1 << 20)


def test_kl_in_the_loss_adds_the_column_ref_logprobs_and_changes_no_advantage(groups):
    client = ReferenceClient()
    before = samples_of(groups, RolloutConfig(advantage="grpo", group_size=3))
    samples = asyncio.run(reference_of(client).with_logprobs(before))
    assert len(samples) == len(client.completions) == 6
    for sample, unchanged, logprobs in zip(samples, before, client.completions, strict=True):
        assert sample.columns["ref_logprobs"][sample.columns["loss_weights"] != 0].tolist() == logprobs
        assert sample.columns["advantages"] is unchanged.columns["advantages"]


def test_kl_in_the_reward_is_not_in_the_loss_and_its_default_estimator_is_k1():
    config = replace(tiny(), reference_kl=0.3, reference_kl_in="reward")
    assert config.make_loss().kl is None and config.kl().estimator == "k1"
    assert replace(config, reference_kl_estimator="k2").kl().estimator == "k2"
    assert replace(config, reference_kl_in="loss").make_loss().kl == KL(coefficient=0.3, estimator="k3")
    assert replace(config, reference_kl=0.0, reference_kl_in="loss").make_loss().kl is None


def test_the_example_in_the_docstring_of_penalise_is_true():
    completions = [Completion(tokens=[1, 2], logprobs=[-0.5, -0.5], policy_versions=[0, 0], finish_reason="length")] * 2
    client = KnownReference([torch.tensor([-1.0, -1.0]), torch.tensor([-0.5, -0.5])])
    [found] = penalised([group_of([3], completions, [1.0, 0.0])], client, coefficient=0.1, estimator="k1")
    assert found.rewards == pytest.approx([0.9, 0.0])


def test_with_k1_in_the_reward_the_policy_gradient_is_the_gradient_of_expected_reward_minus_kl():
    """Completions have two tokens, and the vocabulary has three tokens. The expectation is a sum over all nine completions, in float64.

    In shapes, S is the number of completions, and T is the number of tokens of a completion.
    """
    draw = torch.Generator().manual_seed(2)
    logits, reference = (torch.randn(4, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    pairs = [(a, b) for a in range(3) for b in range(3)]
    rewards = torch.rand(9, generator=draw)

    # Row 0 has the logits of the first token. Row 1 + a has the logits of the second token if the first token is a.
    def logprobs_ST(logits_43):
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
    found = penalised(
        [group_of([0], completions, rewards.tolist())],
        KnownReference(list(reference_ST)),
        coefficient=0.7,
        estimator="k1",
    )
    samples = samples_of(found, RolloutConfig(advantage="dr_grpo", group_size=9, temperature=1.0))
    advantages_ST = torch.stack([sample.columns["advantages"] for sample in samples]).double()
    surrogate = (log_S.detach().exp() * (advantages_ST * policy_ST).sum(1)).sum()
    [actual] = torch.autograd.grad(surrogate, logits)
    torch.testing.assert_close(actual, gradient, rtol=1e-6, atol=1e-6)


def past_run(path, *, step: int, has_reference: bool, config, **state) -> RunFolder:
    """The folder of a run whose only checkpoint is that of `step`. state: further entries of the checkpoint's state.json."""
    folder = RunFolder(path)
    checkpoint = folder.checkpoints / f"step-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"step": step, "cursor": 0} | state))
    folder.config.write_text(config_file.to_json(config))
    if has_reference:
        folder.reference.mkdir()
    return folder


def resume(monkeypatch, capsys, folder: RunFolder, *flags: str) -> tuple[int | None, str]:
    """Resume the run as a dry run. Returns its exit status, or None if it did not exit, and its errors on stderr."""
    monkeypatch.setattr(sys, "argv", ["grpo", "--resume", str(folder.path), "--dry-run", *flags])
    try:
        launch.start_loop("controllers.grpo")
    except SystemExit as exit:
        return exit.code, capsys.readouterr().err
    shown = capsys.readouterr().err.splitlines(keepends=True)
    return None, "".join(line for line in shown if not line.startswith("the reward "))


@pytest.mark.parametrize(
    ("kind", "sft_steps"),
    [("loss", 600), *(pytest.param("reward", steps, marks=pytest.mark.slow) for steps in (600, 0))],
)
def test_a_reference_whose_weights_were_not_saved_is_refused_at_resume(tmp_path, monkeypatch, capsys, kind, sft_steps):
    config = replace(tiny(), sft_steps=sft_steps)
    warmup_steps = 5 if sft_steps else 0
    folder = past_run(tmp_path / "run", step=9, has_reference=False, config=config, sft_steps=warmup_steps)
    status, error = resume(monkeypatch, capsys, folder, "--reference-kl", "0.05", "--reference-kl-in", kind)
    assert status == 2
    assert (
        f"error: reference_kl=0.05 needs the weights that GRPO or PPO began with, but {folder.reference} does not exist"
        in error
    )
    assert "this run began with reference_kl=0; resume it with reference_kl=0, or start a new run" in error
    assert resume(monkeypatch, capsys, folder) == (None, "")


@pytest.mark.parametrize(
    ("step", "state", "has_reference"),
    [
        (9, {"sft_steps": 5}, True),  # the run had a reference
        (5, {"sft_steps": 5}, False),  # the supervised phase is just over
        (3, {"recent": []}, False),  # the run is in the supervised phase
    ],
)
def test_a_resumed_run_takes_a_reference_that_exists_or_is_still_to_be_made(
    tmp_path, monkeypatch, capsys, step, state, has_reference
):
    folder = past_run(tmp_path / "run", step=step, has_reference=has_reference, config=tiny(), **state)
    assert resume(monkeypatch, capsys, folder, "--reference-kl", "0.05") == (None, "")


def test_hf_path_gives_a_reference_at_any_time_unless_supervised_steps_came_first(tmp_path, monkeypatch, capsys):
    made = tiny()
    directory = save_random(tmp_path / "model", made.trainer.model)
    capsys.readouterr()  # discards the progress that transformers shows
    config = replace(made, trainer=replace(made.trainer, hf_path=directory), sft_steps=0)
    folder = past_run(tmp_path / "run", step=9, has_reference=False, config=config, sft_steps=0)
    assert resume(monkeypatch, capsys, folder, "--reference-kl", "0.05") == (None, "")
    folder = past_run(tmp_path / "warm", step=9, has_reference=False, config=config, sft_steps=5)
    assert resume(monkeypatch, capsys, folder, "--reference-kl", "0.05")[0] == 2


def test_a_run_without_a_complete_checkpoint_starts_again_and_may_have_a_reference(tmp_path, monkeypatch, capsys):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.config.write_text(config_file.to_json(tiny()))
    assert resume(monkeypatch, capsys, folder, "--reference-kl", "0.05") == (None, "")
