"""The files of examples/ do what docs/tasks.md says about them."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import GUARD

from controllers.environments import EnvironmentConfig, build_environment
from controllers.rollouts.tokenizer import load_tokenizer
from rl_actors import ModelConfig

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_graded_reward_falls_with_the_distance_from_the_answer(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    environment = build_environment(EnvironmentConfig(task="next_number:NextNumber", num_held_out=50))
    problem = environment.problem(0)
    right = int(problem.answer)
    rewards = [environment.reward(problem, str(right + distance)) for distance in (0, 1, -5, 10, 99)]
    assert rewards == [1.0, 0.9, 0.5, 0.0, 0.0]
    assert environment.reward(problem, "no number") == 0.0
    assert not {p.key for p in environment.held_out()} & {environment.problem(index).key for index in range(2000)}


def test_the_word_problems_have_an_answer_that_the_pattern_finds():
    config = EnvironmentConfig(
        task=str(EXAMPLES / "word_problems.jsonl"),
        prompt_column="question",
        num_held_out=10,
        reward="regex",
        reward_pattern=r"#### (-?\d+(?:,\d{3})*(?:\.\d+)?)",
    )
    problems = [*build_environment(config).held_out(), *map(build_environment(config).problem, range(40))]
    assert len({problem.prompt for problem in problems}) == 50
    for problem in problems:
        steps, answer = problem.answer.split("\n#### ")
        assert steps and int(answer) >= 0
        texts = (problem.answer, f"I think #### {answer}", f"#### {int(answer) + 1}", answer)
        assert [build_environment(config).reward(problem, text) for text in texts] == [1.0, 1.0, 0.0, 0.0]


def test_the_script_make_rows_writes_right_answers(tmp_path):
    command = [sys.executable, str(EXAMPLES / "make_rows.py"), str(tmp_path)]
    subprocess.run(command, capture_output=True, text=True, timeout=GUARD, check=True)
    config = EnvironmentConfig(
        task=str(tmp_path / "booleans.jsonl"), prompt_column="expression", answer_column="value", num_held_out=128
    )
    answers = {problem.prompt: problem.answer for problem in map(build_environment(config).problem, range(10_000))}
    known = {"(T&F)": "False", "(T|F)": "True", "!(F&F)": "True", "!!T": "True"}
    assert len(answers) == 10_000
    assert all(answers[text] == value for text, value in known.items() if text in answers)
    assert sorted(set(answers.values())) == ["False", "True"]
    chat = build_environment(EnvironmentConfig(task=str(tmp_path / "conversations.jsonl"), num_held_out=128))
    for problem in map(chat.problem, range(100)):
        number = int(problem.prompt.removeprefix("Which number follows ").removesuffix("?"))
        assert problem.answer == str(number + 1) and problem.messages[-1]["content"] == problem.answer


def test_the_chat_model_has_a_chat_template_and_a_config_that_the_trainer_reads(tmp_path, monkeypatch, capsys):
    script = EXAMPLES / "tiny_chat_model.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "model")])
    runpy.run_path(str(script), run_name="__main__")
    assert "a tokenizer of 259 tokens" in capsys.readouterr().out
    assert ModelConfig.from_hf(tmp_path / "model").vocab_size == 259
    tokenizer = load_tokenizer(tmp_path / "model")
    prompt = tokenizer.hf.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.slow
def test_the_monarch_program_with_a_judge_raises_the_reward(tmp_path):
    command = [sys.executable, str(EXAMPLES / "judge_actor.py"), "10"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    options = {"capture_output": True, "text": True, "timeout": GUARD, "check": True}
    printed = subprocess.run(command, cwd=tmp_path, env=environment, **options).stdout
    rewards = [float(value) for value in re.findall(r"step \d+: reward (\S+), policy_version \d+", printed)]
    assert len(rewards) == 10 and 0.4 < rewards[0] < 0.6 and rewards[-1] > rewards[0] + 0.1, printed


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    notebook = nbformat.read(EXAMPLES / "trainer.ipynb", as_version=4)
    nbformat.validate(notebook)
    options = {"timeout": GUARD, "kernel_name": "python3", "resources": {"metadata": {"path": str(tmp_path)}}}
    NotebookClient(notebook, **options).execute()  # raises the error of a cell
    printed = [output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output]
    [rewards] = [ast.literal_eval(text) for text in printed if re.match(r"\[0\.\d+, ", text)]
    assert len(rewards) == 20 and rewards[-1] > rewards[0] + 0.1
