"""Tests of direct preference optimization (DPO).

The loss is compared with a closed form in float64 and with autograd. Other tests check the pairs, the errors for wrong
data and the start of a run.
"""

import json
import math
import sys

import pytest
import torch
from torch.testing import assert_close

from configs import CONFIGS
from configs.tiny import tiny_dpo
from controllers import config_file
from controllers.algorithms.preferences import DPO, to_samples
from controllers.environments import EnvironmentConfig, build_environment
from controllers.observe.run_folder import RunFolder
from controllers.program import launch
from controllers.program.describe_plan import describe
from controllers.rollouts.tokenizer import build_character_tokenizer, load_tokenizer
from rl_actors import Sample
from rl_actors.losses.custom import output_gradients
from rl_actors.metrics import finish, merge

BETA = 0.3
LENGTHS = [(3, 5), (1, 2), (4, 4), (2, 1)]  # tokens of the chosen and of the rejected completion
PROMPT = [3, 4, 5]


def pairs(seed: int = 0) -> tuple[list[Sample], list[torch.Tensor]]:
    """Samples with the reference's logprobs, and the policy's logprobs of these samples. All logprobs are float64.

    The policy's logprobs of prompt tokens are at most -100. If a loss counted them, its value would be far from the expected value.
    """
    draw = torch.Generator().manual_seed(seed)
    samples, logprobs = [], []
    for length in [length for lengths in LENGTHS for length in lengths]:
        sample = Sample.from_tokens(PROMPT, [6] * length)
        weights = torch.as_tensor(sample.columns["loss_weights"], dtype=torch.float64)
        reference = -4 * torch.rand(len(sample), generator=draw, dtype=torch.float64)
        columns = {"loss_weights": weights, "ref_logprobs": reference}
        samples.append(Sample(tokens=sample.tokens, targets=sample.targets, columns=columns))
        logprobs.append(-4 * torch.rand(len(sample), generator=draw, dtype=torch.float64) - 100 * (weights == 0))
    return samples, logprobs


def rewards(samples: list[Sample], logprobs: list[torch.Tensor]) -> list[float]:
    """The reward beta * (log pi - log ref) of every completion, computed with plain sums of floats.

    log pi and log ref are the sums of the completion's logprobs under the policy and under the reference.
    """
    found = []
    for sample, row in zip(samples, logprobs, strict=True):
        first = len(PROMPT) - 1
        ratios = [p - r for p, r in zip(row.tolist(), sample.columns["ref_logprobs"].tolist(), strict=True)]
        found.append(BETA * math.fsum(ratios[first:]))
    return found


def test_loss_and_gradient_are_those_of_the_closed_form():
    samples, logprobs = pairs()
    gradients, partials = output_gradients(DPO(beta=BETA), samples, logprobs)
    found = rewards(samples, logprobs)
    margins = [chosen - rejected for chosen, rejected in zip(found[::2], found[1::2], strict=True)]
    assert {margin > 0 for margin in margins} == {True, False}
    values = finish(partials)
    assert values["loss:sum"] == pytest.approx(sum(math.log1p(math.exp(-margin)) for margin in margins), rel=1e-12)
    for index, (sample, gradient) in enumerate(zip(samples, gradients, strict=True)):
        sign = -1 if index % 2 == 0 else 1
        size = sign * BETA / (1 + math.exp(margins[index // 2]))
        expected = size * sample.columns["loss_weights"]
        assert_close(gradient, expected, rtol=1e-12, atol=0)
    assert values["dpo/accuracy:mean"] == sum(margin > 0 for margin in margins) / len(margins)
    assert values["dpo/margin:mean"] == pytest.approx(sum(margins) / len(margins))
    assert values["dpo/reward_chosen:mean"] == pytest.approx(sum(found[::2]) / len(margins))
    assert values["dpo/reward_rejected:mean"] == pytest.approx(sum(found[1::2]) / len(margins))


def test_the_gradient_of_a_models_weights_is_that_of_plain_autograd():
    """The model is one matrix.

    Its gradient is computed in two ways: from the gradients with respect to the logprobs, which `output_gradients`
    returns, and by autograd through the formula of the DPO paper.
    """
    samples, _ = pairs()
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(8, 8, generator=draw, dtype=torch.float64, requires_grad=True)

    def logprobs() -> list[torch.Tensor]:
        rows = []
        for sample in samples:
            inputs, targets = torch.as_tensor(sample.tokens), torch.as_tensor(sample.targets)
            rows.append(weight[inputs].log_softmax(-1).gather(1, targets[:, None])[:, 0])
        return rows

    columns, _ = output_gradients(DPO(beta=BETA), samples, logprobs())
    carried = sum((row * column).sum() for row, column in zip(logprobs(), columns, strict=True))
    (through_columns,) = torch.autograd.grad(carried, weight)

    ratios = []
    for sample, row in zip(samples, logprobs(), strict=True):
        first = len(PROMPT) - 1
        ratios.append(row[first:].sum() - sample.columns["ref_logprobs"][first:].sum())
    loss = sum(
        torch.log1p(torch.exp(-BETA * (chosen - rejected)))
        for chosen, rejected in zip(ratios[::2], ratios[1::2], strict=True)
    )
    (plain,) = torch.autograd.grad(loss, weight)
    assert_close(through_columns, plain, rtol=1e-11, atol=1e-13)


def test_merged_metrics_of_two_parts_are_those_of_all_pairs_and_half_a_pair_is_refused():
    samples, logprobs = pairs()
    loss = DPO(beta=BETA)
    _, whole = loss(samples, logprobs)
    parts = [loss(samples[:2], logprobs[:2])[1], loss(samples[2:], logprobs[2:])[1]]
    assert finish(merge(parts)) == pytest.approx(finish(whole))
    with pytest.raises(ValueError, match="3 samples cannot form pairs"):
        loss(samples[:3], logprobs[:3])


def test_a_pair_is_two_samples_of_one_prompt(tmp_path):
    build_character_tokenizer(tmp_path, "0123456789+=")
    tokenizer = load_tokenizer(tmp_path)
    environment = build_environment(tiny_dpo().environment)
    problem = environment.problem(0)
    chosen, rejected = to_samples([problem], tokenizer, "rejected")
    for sample, answer in ((chosen, problem.answer), (rejected, problem.metadata["rejected"])):
        prompt = tokenizer.encode(problem.prompt)
        tokens = [*prompt, *tokenizer.encode(answer), tokenizer.end_token_id]
        assert torch.as_tensor(sample.tokens).tolist() == tokens[:-1]
        assert torch.as_tensor(sample.targets).tolist() == tokens[1:]


def test_a_generated_pair_has_a_right_and_a_wrong_answer_and_no_held_out_prompt_is_trained_on():
    environment = build_environment(tiny_dpo().environment)
    held_out, training = environment.held_out(), [environment.problem(index) for index in range(90 * 90 - 256)]
    assert len(held_out) == 256
    assert not {problem.prompt for problem in held_out} & {problem.prompt for problem in training}
    for problem in [*held_out, *training]:
        a, b = problem.prompt.removesuffix("=").split("+")
        assert int(problem.answer) == int(a) + int(b) != int(problem.metadata["rejected"])


def test_the_plan_of_a_run_has_a_reference_and_no_generator():
    text = describe(tiny_dpo())
    assert "  reference-0  " in text and "generator" not in text


def line(**fields: object) -> str:
    return json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": "3"} | fields)


FEW = "\n".join(line(prompt=f"{n}+1=") for n in range(9))
WRONG = {
    "a missing column": (FEW + '\n{"prompt": "1", "chosen": "2"}', [], "pairs.jsonl:10 has no column 'rejected'"),
    "a missing prompt": ('{"chosen": "2", "rejected": "3"}', [], "pairs.jsonl:1 has no column 'prompt'"),
    "an empty file": ("", [], "pairs.jsonl has no rows"),
    "equal answers": (FEW + "\n" + line(rejected="2"), [], "pairs.jsonl:10: columns 'chosen' and 'rejected' both hold"),
    "mixed types": (
        FEW + "\n" + line(rejected=3),
        [],
        "pairs.jsonl:10: column 'rejected' holds int 3, but it holds str at",
    ),
    "a list as the rejected answer": (
        FEW + "\n" + line(rejected=["3"]),
        [],
        "column 'rejected' holds \"['3']\", which is neither text nor",
    ),
    "a long prompt": (FEW + "\n" + line(prompt="1+" * 50), [], "tokens, but trainer.max_sequence_length=64"),
    "a long rejected answer": (FEW + "\n" + line(prompt="7", rejected="9" * 99), [], "and the answer '999"),
    "a conversation": (
        '{"messages": [{"role": "user", "content": "1"}], "chosen": "2", "rejected": "3"}',
        [],
        "pairs.jsonl:1 has no column 'prompt'",
    ),
    "too few pairs": (FEW, ["--environment.num-held-out", "5"], "num_held_out=5 is more than half of the 9"),
    "a beta of 0": (FEW, ["--beta", "0"], "beta=0.0; it must be positive and finite"),
    "an odd number of samples in a call": (
        FEW,
        ["--samples-per-forward-backward", "7"],
        "samples_per_forward_backward=7; it must be even",
    ),
    "an unknown rejected column": (FEW, ["--environment.rejected-column", "worse"], "has no column 'worse'"),
    "no rejected column": (FEW, ["--environment.rejected-column", ""], "environment.rejected_column=''"),
    "an evaluation set without pairs": (FEW, ["--evaluation", '{"x": {"task": "chain_sum"}}'], "x.rejected_column=''"),
    "no pairs in a step": (FEW, ["--pairs-per-step", "0"], "pairs_per_step=0; it must be at least 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_pairs_and_options_end_the_command_with_status_2_before_anything_starts(
    tmp_path, monkeypatch, capsys, case
):
    text, flags, message = WRONG[case]
    file = tmp_path / "pairs.jsonl"
    file.write_text(text)
    given = ["--config", "tiny", "--data", str(file), "--environment.num-held-out", "2"]
    monkeypatch.setattr(sys, "argv", ["dpo", *given, *flags, "--output-dir", str(tmp_path / "run"), "--dry-run"])
    with pytest.raises(SystemExit) as stopped:
        launch.start_loop("controllers.dpo")
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_eval_only_is_refused_because_dpo_has_no_generator(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(config_file.to_json(tiny_dpo()))
    monkeypatch.setattr(sys, "argv", ["dpo", "--eval-only", str(tmp_path)])
    with pytest.raises(SystemExit):
        launch.start_loop("controllers.dpo")
    assert "controllers.dpo has no generator" in capsys.readouterr().err


@pytest.mark.parametrize("has_reference", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_run_is_resumed_only_if_its_folder_has_the_weights_of_the_reference(
    tmp_path, monkeypatch, capsys, has_reference
):
    folder = RunFolder(tmp_path)
    checkpoint = folder.checkpoints / "step-9"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"step": 9, "cursor": 0}))
    folder.config.write_text(config_file.to_json(tiny_dpo()))
    if has_reference:
        folder.reference.mkdir()
    monkeypatch.setattr(sys, "argv", ["dpo", "--resume", str(tmp_path), "--dry-run"])
    if has_reference:
        launch.start_loop("controllers.dpo")
        return
    with pytest.raises(SystemExit) as stopped:
        launch.start_loop("controllers.dpo")
    assert stopped.value.code == 2
    assert f"{folder.reference} is missing" in capsys.readouterr().err


def test_the_alphabet_of_a_file_of_pairs_has_the_characters_of_rejected_answers(tmp_path, monkeypatch, capsys):
    file = tmp_path / "pairs.jsonl"
    file.write_text(FEW + "\n" + line(prompt="7", rejected="?"))
    given = ["--data", str(file), "--environment.num-held-out", "2", "--output-dir", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["dpo", *given, "--dry-run"])
    launch.start_loop("controllers.dpo")
    config = config_file.from_json(type(CONFIGS["controllers.dpo"]["tiny"]()), capsys.readouterr().out)
    assert config.alphabet == "+0123456789=?"
    assert config.environment == EnvironmentConfig(
        task=str(file), answer_column="chosen", rejected_column="rejected", num_held_out=2
    )
