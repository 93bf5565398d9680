"""Environments: determinism, the split by operands, rewards and refusals."""

import json
import re
import threading

import pytest

from controllers.environments import EnvironmentConfig, Problem, build_environment, math_verify

ADDITION = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 2,
    "max_digits": 2,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
}


def addition(**fields) -> EnvironmentConfig:
    defaults = {"options": ADDITION, "prompt": "{expression}=", "remove_whitespace": True}
    return EnvironmentConfig(**{**defaults, **fields})


def operands(problem: Problem) -> frozenset:
    return frozenset(map(int, re.fullmatch(r"(\d+)\+(\d+)=", problem.prompt).groups()))


def test_prompts_and_answers_are_those_of_the_task():
    environment = build_environment(addition())
    for index in range(200):
        problem = environment.problem(index)
        first, second = re.fullmatch(r"(\d+)\+(\d+)=", problem.prompt).groups()
        assert int(problem.answer) == int(first) + int(second)


@pytest.mark.parametrize("seed", range(5))
def test_training_never_shows_the_operands_of_a_held_out_problem(seed):
    environment = build_environment(addition(seed=seed))
    held_out = {operands(problem) for problem in environment.held_out()}
    training = {operands(environment.problem(index)) for index in range(8000)}
    assert len(held_out) == len(environment.held_out()) == 512
    assert not held_out & training
    # There are 5151 unordered pairs of 0 to 100. Training lacks only the share that is held out.
    assert len(training) > 3000


def test_a_problem_depends_on_seed_and_index_only():
    first, again, other = (build_environment(addition(seed=seed)) for seed in (3, 3, 4))
    backwards = [again.problem(index) for index in reversed(range(50))]
    assert [first.problem(index) for index in range(50)] == backwards[::-1]
    assert first.held_out() == again.held_out()
    prompts = {first.problem(index).prompt for index in range(50)}
    assert len(prompts & {other.problem(index).prompt for index in range(50)}) < 5
    assert {p.key for p in first.held_out()} != {p.key for p in other.held_out()}


def test_the_split_holds_on_a_small_space_and_refuses_one_too_small():
    digits = {**ADDITION, "min_digits": 1, "max_digits": 1}  # 0 to 10: 66 unordered pairs
    environment = build_environment(addition(options=digits, num_held_out=30))
    held_out = {operands(problem) for problem in environment.held_out()}
    training = {operands(environment.problem(index)) for index in range(2000)}
    assert (len(held_out), len(training), len(held_out & training)) == (30, 36, 0)
    with pytest.raises(ValueError, match="num_held_out=40 is more than half of the 66 distinct problems"):
        build_environment(addition(options=digits, num_held_out=40))


def test_only_prompts_of_the_pattern_are_drawn_and_held_out(jsonl):
    two_digits = build_environment(addition(prompt_pattern=r"\d\d\+\d\d="))
    problems = [*two_digits.held_out(), *map(two_digits.problem, range(1000))]
    assert all(10 <= n <= 99 for problem in problems for n in operands(problem))
    of_file = build_environment(EnvironmentConfig(task=jsonl, num_held_out=3, prompt_pattern=r"Half of \d\?"))
    keys = {of_file.problem(index).key for index in range(7)} | {problem.key for problem in of_file.held_out()}
    assert keys == {f"Half of {n}?" for n in range(10)}


def test_tasks_without_operands_are_split_by_their_text():
    environment = build_environment(EnvironmentConfig(task="spell_backward", num_held_out=16, reward="task"))
    held_out = environment.held_out()
    training = [environment.problem(index) for index in range(100)]
    assert not {p.prompt for p in held_out} & {p.prompt for p in training}
    assert all(environment.reward(problem, f" {problem.answer}\n") == 1.0 for problem in training)
    assert environment.reward(training[0], "!") < 1.0


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "problems.jsonl"
    lines = [{"prompt": f"Half of {n}?", "note": "a\u2028b", "answer": str(n / 2), "level": n % 3} for n in range(40)]
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n", encoding="utf-8")
    return str(path)


def test_every_epoch_of_a_file_is_another_order_of_all_problems_that_are_not_held_out(jsonl):
    environment = build_environment(EnvironmentConfig(task=jsonl, num_held_out=10, prompt="[{level}] {question}"))
    held_out = {problem.key for problem in environment.held_out()}
    epochs = [[environment.problem(index).key for index in range(start, start + 30)] for start in (0, 30)]
    assert len(held_out) == 10
    assert set(epochs[0]) == set(epochs[1]) == {f"Half of {n}?" for n in range(40)} - held_out
    assert epochs[0] != epochs[1]
    assert re.fullmatch(r"\[[012]\] Half of \d+\?", environment.problem(0).prompt)


def test_exact_match_strips_and_math_verify_compares_values(jsonl):
    exact = build_environment(EnvironmentConfig(task=jsonl, num_held_out=10))
    problem = Problem(prompt="", answer="0.5", key="")
    assert [exact.reward(problem, text) for text in (" 0.5\n", "0.50", "")] == [1.0, 0.0, 0.0]
    maths = build_environment(EnvironmentConfig(task=jsonl, num_held_out=10, reward="math_verify"))
    assert [maths.reward(problem, text) for text in ("0.50", r"it is $\frac{1}{2}$", "1/3", "")] == [1.0, 1.0, 0.0, 0.0]


def test_math_verify_answers_in_a_thread_too():
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(math_verify("0.5", "1/2")))
    thread.start()
    thread.join()
    assert rewards == [1.0]


class Parity:
    def __init__(self, seed, num_held_out, largest):
        self.bounds = (seed, num_held_out, largest)

    def problem(self, index):
        return Problem(prompt=str(index), answer=str(index % 2), key=str(index))

    def held_out(self):
        return []

    def reward(self, problem, completion):
        return 1.0


def incomplete(seed, num_held_out):
    return object()


def test_a_users_function_gets_the_seed_and_the_options():
    config = EnvironmentConfig(task=f"{__name__}:Parity", options={"largest": 9}, seed=7, num_held_out=3)
    assert build_environment(config).bounds == (7, 3, 9)
    with pytest.raises(ValueError, match="returned object without problem, held_out, reward"):
        build_environment(EnvironmentConfig(task=f"{__name__}:incomplete"))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"task": "basic_aritmetic"}, "task='basic_aritmetic' is not a reasoning-gym task.*basic_arithmetic"),
        ({"task": "nowhere.jsonl"}, "task='nowhere.jsonl' is not a file"),
        ({"task": "nowhere:make"}, "task='nowhere:make' cannot be imported"),
        ({"options": {"digits": 3}}, "digits.*known options: min_terms, max_terms"),
        ({"options": {"min_terms": 0}}, "min_terms must be positive"),
        ({"options": [1]}, r"options=\[1\] is not a JSON object"),
        ({"prompt": "{expresion}"}, "uses the unknown field 'expresion'; known are .*expression"),
        ({"num_held_out": 0}, "num_held_out=0; it must be at least 1"),
        ({"prompt_pattern": "["}, r"prompt_pattern='\[' is not a regular expression"),
        ({"prompt_pattern": "no"}, r"num_held_out=512 is more than half of the 0 .* and prompt_pattern='no'"),
        ({"task": "a:b", "reward": "task"}, "reward='task' needs a reasoning-gym task"),
    ],
)
def test_a_wrong_value_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        build_environment(EnvironmentConfig(**fields))


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "1", "answer": "1"}\n{"prompt": "2"}\n')
    with pytest.raises(ValueError, match=r'bad.jsonl:2 is not a JSON object with "prompt" and "answer"'):
        build_environment(EnvironmentConfig(task=str(path), num_held_out=1))
