"""The files of examples/ are what docs/tasks.md says of them."""

import subprocess
import sys
from pathlib import Path

from waiting import GUARD

from controllers.environments import EnvironmentConfig, build_environment
from controllers.tokenizer import load_tokenizer
from rl_actors import ModelConfig

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_graded_reward_falls_with_the_distance(monkeypatch):
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
        reward_pattern=r"#### (-?\d+)",
    )
    problems = [*build_environment(config).held_out(), *map(build_environment(config).problem, range(40))]
    assert len({problem.prompt for problem in problems}) == 50
    for problem in problems:
        steps, answer = problem.answer.split("\n#### ")
        assert steps and int(answer) >= 0
        texts = (problem.answer, f"I think #### {answer}", f"#### {int(answer) + 1}", answer)
        assert [build_environment(config).reward(problem, text) for text in texts] == [1.0, 1.0, 0.0, 0.0]


def test_the_chat_model_has_a_template_and_is_a_model_of_the_trainer(tmp_path):
    command = [sys.executable, str(EXAMPLES / "tiny_chat_model.py"), str(tmp_path / "model")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=GUARD, check=True)
    assert "a tokenizer of 259 tokens" in made.stdout
    assert ModelConfig.from_hf(tmp_path / "model").vocab_size == 259
    tokenizer = load_tokenizer(tmp_path / "model")
    prompt = tokenizer.hf.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n"
