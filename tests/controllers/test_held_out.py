"""Tests of pass@k and of the evaluation sets, which are sets of held-out problems."""

import itertools
import json
from dataclasses import asdict

import pytest
from fakes import ParityReward

from configs import CONFIGS
from controllers import config_file
from controllers.environments import EnvironmentConfig
from controllers.program.cli import parse
from controllers.rollouts.evaluation import build_sets, pass_at_k
from controllers.run.config import RunConfig


@pytest.mark.parametrize(("num_samples", "num_passed"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (6, 6)])
def test_pass_at_k_is_the_share_of_choices_of_k_completions_in_which_at_least_one_passes(num_samples, num_passed):
    passes = [index < num_passed for index in range(num_samples)]
    for k in range(1, num_samples + 1):
        choices = list(itertools.combinations(passes, k))
        assert pass_at_k(num_samples, num_passed, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_is_refused_if_k_is_above_the_number_of_samples():
    with pytest.raises(ValueError, match=r"k=5; it must be in \[1, 4\]"):
        pass_at_k(4, 1, 5)


def test_named_sets_are_read_from_the_command_line_and_from_a_config_file():
    text = '{"hard": {"task": "chain_sum", "num_held_out": 7}}'
    flags = ["--evaluation", text, "--pass-at-k.num-samples", "8", "--pass-at-k.k", "1", "8", "--dry-run"]
    config = parse("prog", CONFIGS["controllers.grpo"], flags).config
    assert config.evaluation == {"hard": EnvironmentConfig(task="chain_sum", num_held_out=7)}
    assert (config.pass_at_k.num_samples, config.pass_at_k.k) == (8, (1, 8))
    again = config_file.from_json(type(config), config_file.to_json(config))
    assert again.evaluation == config.evaluation and asdict(again) == asdict(config)


def test_a_named_set_has_the_held_out_problems_of_its_own_environment():
    own = ParityReward(0.0, 5)
    config = EnvironmentConfig(task="chain_sum", num_held_out=7, seed=3)
    first, second = build_sets(own, {"hard": config}, seed=1)
    assert (first.name, first.environment, len(first.problems)) == ("", own, 5)
    assert (second.name, len(second.problems)) == ("hard", 7)
    moved = build_sets(own, {"hard": EnvironmentConfig(task="chain_sum", num_held_out=7, seed=4)}, seed=0)[1]
    assert moved.problems == second.problems  # the set's own seed and the run's seed are added: 3 + 1 and 4 + 0
    assert (first.metric("reward"), second.metric("pass@2")) == ("eval/reward", "eval/hard/pass@2")


def test_a_named_set_may_be_a_whole_file(tmp_path):
    path = tmp_path / "hard.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1", "answer": n + 1}) + "\n" for n in range(9)))
    parts = [{"task": str(path)}, {"task": "chain_sum"}]
    sets = {"all": EnvironmentConfig(task=str(path)), "some": EnvironmentConfig(task=str(path), num_held_out=5)}
    sets["mixed"] = EnvironmentConfig(mixture=parts, num_held_out=40)
    built = build_sets(ParityReward(0.0, 5), sets, seed=0)
    assert [len(each.problems) for each in built] == [5, 9, 5, 9 + 20]
    assert {problem.answer for problem in built[1].problems} == {str(n + 1) for n in range(9)}


WRONG = {
    "evaluation has a set named 'a/b'": ["--evaluation", '{"a/b": {"task": "chain_sum"}}'],
    "evaluation has a set named ''": ["--evaluation", '{"": {"task": "chain_sum"}}'],
    "evaluation.hard: task='hard.jsonl' is not a file": ["--evaluation", '{"hard": {"task": "hard.jsonl"}}'],
    "hard.num_held_out=0: it should be greater than or equal to 1": ["--evaluation", '{"hard": {"num_held_out": 0}}'],
    "evaluation.hard: reward_workers=2: a set cannot have its own reward_workers; use environment.reward_workers, which applies to all rewards of a run": [
        *("--evaluation", '{"hard": {"task": "chain_sum", "reward_workers": 2}}')
    ],
    "hard.tusk is not a field; did you mean task?": ["--evaluation", '{"hard": {"tusk": "chain_sum"}}'],
    "pass_at_k.num_samples=-1; it must be at least 0": ["--pass-at-k.num-samples", "-1"],
    "pass_at_k.k=(1, 8) needs 8 completions, but pass_at_k.num_samples=4": [
        *("--pass-at-k.num-samples", "4", "--pass-at-k.k", "1", "8")
    ],
    "pass_at_k.k=(0,); give one or more integers, each at least 1": ["--pass-at-k.k", "0"],
    "pass_at_k.temperature=3.0; it must be in [0.01, 2]": ["--pass-at-k.temperature", "3"],
    "pass_at_k.threshold=inf; it must be finite": ["--pass-at-k.threshold", "inf"],
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_field_is_refused_by_the_command_line_with_its_name_and_value(message, capsys):
    with pytest.raises(SystemExit) as exit:
        parse("prog", CONFIGS["controllers.grpo"], WRONG[message])
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert exit.value.code == 2 and message in shown


def test_the_error_names_the_set_whose_environment_cannot_be_built():
    with pytest.raises(ValueError, match="evaluation.hard: task='chain_sun' is not a reasoning-gym task; did you mean"):
        build_sets(ParityReward(0.0, 5), {"hard": EnvironmentConfig(task="chain_sun")}, seed=0)


def test_by_default_a_run_has_no_named_sets_and_no_completions_for_pass_at_k():
    assert RunConfig().evaluation == {} and RunConfig().pass_at_k.num_samples == 0
