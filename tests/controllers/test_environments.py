"""Tests that environments are deterministic, give no held-out problem for training, and give the right rewards.

They also test that wrong values and wrong data are refused.
"""

import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from controllers.environments import EnvironmentConfig, Problem, build_environment, math_verify
from controllers.environments.scores import last_match

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


def test_the_answer_is_the_sum_of_the_two_numbers_in_the_prompt():
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
    # For two digits the task draws numbers from 0 to 100, not from 10 to 99. So there are 5151 unordered pairs of
    # numbers. 512 of them are held out. The 8000 draws give most of the other 4639 pairs, but not all.
    assert len(training) > 3000


def test_a_problem_depends_on_seed_and_index_only():
    first, again, other = (build_environment(addition(seed=seed)) for seed in (3, 3, 4))
    backwards = [again.problem(index) for index in reversed(range(50))]
    assert [first.problem(index) for index in range(50)] == backwards[::-1]
    assert first.held_out() == again.held_out()
    prompts = {first.problem(index).prompt for index in range(50)}
    assert len(prompts & {other.problem(index).prompt for index in range(50)}) < 5
    assert {p.key for p in first.held_out()} != {p.key for p in other.held_out()}


def test_at_most_half_of_the_distinct_problems_of_a_task_can_be_held_out():
    digits = {**ADDITION, "min_digits": 1, "max_digits": 1}  # numbers from 0 to 10: 66 unordered pairs
    environment = build_environment(addition(options=digits, num_held_out=30))
    held_out = {operands(problem) for problem in environment.held_out()}
    training = {operands(environment.problem(index)) for index in range(2000)}
    assert (len(held_out), len(training), len(held_out & training)) == (30, 36, 0)
    with pytest.raises(ValueError, match="num_held_out=40 is more than half of the 66 distinct problems"):
        build_environment(addition(options=digits, num_held_out=40))


def test_only_problems_whose_prompts_match_the_pattern_are_trained_on_or_held_out(jsonl):
    two_digits = build_environment(addition(prompt_pattern=r"\d\d\+\d\d="))
    problems = [*two_digits.held_out(), *map(two_digits.problem, range(1000))]
    assert all(10 <= n <= 99 for problem in problems for n in operands(problem))
    of_file = build_environment(EnvironmentConfig(task=jsonl, num_held_out=3, prompt_pattern=r"Half of \d\?"))
    keys = {of_file.problem(index).key for index in range(7)} | {problem.key for problem in of_file.held_out()}
    assert keys == {f"Half of {n}?" for n in range(10)}


def test_training_never_shows_a_held_out_prompt_of_a_task_without_operands():
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


def test_every_epoch_is_a_new_order_of_all_problems_of_a_file_that_are_not_held_out(jsonl):
    environment = build_environment(EnvironmentConfig(task=jsonl, num_held_out=10, prompt="[{level}] {question}"))
    held_out = {problem.key for problem in environment.held_out()}
    epochs = [[environment.problem(index).key for index in range(start, start + 30)] for start in (0, 30)]
    assert len(held_out) == 10
    assert set(epochs[0]) == set(epochs[1]) == {f"[{n % 3}] Half of {n}?" for n in range(40)} - held_out
    assert epochs[0] != epochs[1]
    assert re.fullmatch(r"\[[012]\] Half of \d+\?", environment.problem(0).prompt)


def test_exact_match_ignores_outer_whitespace_and_math_verify_compares_values(jsonl):
    exact = build_environment(EnvironmentConfig(task=jsonl, num_held_out=10))
    problem = Problem(prompt="", answer="0.5", key="")
    assert [exact.reward(problem, text) for text in (" 0.5\n", "0.50", "")] == [1.0, 0.0, 0.0]
    maths = build_environment(EnvironmentConfig(task=jsonl, num_held_out=10, reward="math_verify"))
    assert [maths.reward(problem, text) for text in ("0.50", r"it is $\frac{1}{2}$", "1/3", "")] == [1.0, 1.0, 0.0, 0.0]


def test_math_verify_also_works_outside_the_main_thread():
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
        return [self.problem(-1)]

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
        ({"options": [1]}, r"options=\[1\] is of type list; it must be dict"),
        (
            {"prompt": "{expresion}"},
            "uses the unknown field 'expresion'; the problems of task=.* have these fields: .*expression",
        ),
        ({"num_held_out": 0}, "num_held_out=0; it must be at least 1"),
        ({"prompt_pattern": "["}, r"prompt_pattern='\[' is not a regular expression"),
        ({"prompt_pattern": "no"}, r"num_held_out=512 is more than half of the 0 .* and prompt_pattern='no'"),
        ({"task": "a:b", "reward": "task"}, "reward='task' needs a reasoning-gym task"),
        ({"task": ""}, "environment.task is empty: --task takes"),
        (
            {"reward": "exact"},
            "reward='exact'; it must be one of exact_match, math_verify, regex, task, judge, python, or module:function",
        ),
        ({"reward": "nowhere:score"}, "reward='nowhere:score' cannot be imported"),
        ({"reward": "regex"}, "the reward regex needs a pattern"),
        ({"reward_pattern": "a"}, "the reward regex needs a pattern, and no other reward takes one"),
        ({"reward": "regex", "reward_pattern": "("}, r"reward_pattern='\(' is not a regular expression"),
        ({"mixture": [{"weight": 2}]}, r"mixture\[0\]={'weight': 2} names no task"),
        ({"mixture": [{"task": "spell_backward", "weight": 0}]}, "weight is a number above 0"),
        ({"mixture": ["spell_backward"]}, r"mixture\[0\]='spell_backward' is of type str; it must be dict"),
        (
            {"mixture": [{"task": "spell_backward", "promt": "x"}]},
            r"mixture\[0\]: promt is not a field; did you mean prompt",
        ),
        (
            {"mixture": [{"task": "spell_backward", "reward_timeout": 1.0}]},
            r"mixture\[0\] sets reward_timeout, which applies to the whole run; set environment.reward_timeout instead",
        ),
        ({"mixture": [{"task": "spell_backward"}] * 2}, "mixture has several parts with the name 'spell_backward'"),
        ({"mixture": [{"task": "spel_backward"}]}, "mixture, spel_backward: .*did you mean spell_backward"),
    ],
)
def test_the_error_for_a_wrong_value_names_the_value(fields, message):
    with pytest.raises(ValueError, match=message):
        build_environment(EnvironmentConfig(**fields))


def test_the_error_for_a_missing_data_set_has_the_command_that_downloads_it(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the test needs no network
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    message = "task='no/where', split='train': .*hf download --repo-type dataset no/where"
    with pytest.raises(ValueError, match=message):
        build_environment(EnvironmentConfig(task="no/where"))


def test_the_error_for_a_bad_line_names_the_file_and_the_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "1", "answer": "1"}\n{"prompt": "2"}\n')
    with pytest.raises(ValueError, match=r"bad.jsonl:2 has no column 'answer'; it has prompt"):
        build_environment(EnvironmentConfig(task=str(path), num_held_out=1))


ROWS = [{"question": f"{n}+1", "value": n + 1, "level": n % 3} for n in range(40)]
MORE_ROWS = [{"question": f"{n}+1", "value": n + 1, "level": n % 3} for n in range(40, 60)]


def write_table(path, rows) -> str:
    import pyarrow
    from pyarrow import csv, parquet

    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    elif path.suffix == ".csv":
        csv.write_csv(table, path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def data(task: str, **fields) -> EnvironmentConfig:
    return EnvironmentConfig(task=task, prompt_column="question", answer_column="value", num_held_out=4, **fields)


def test_all_problems_of_a_held_out_file_are_held_out_and_never_trained_on(tmp_path):
    train, test = write_table(tmp_path / "train.jsonl", ROWS), write_table(tmp_path / "test.csv", ROWS[30:] + MORE_ROWS)
    whole = build_environment(replace(data(train, held_out_task=test), num_held_out=512))
    assert {problem.answer for problem in whole.held_out()} == {str(n + 1) for n in range(30, 60)}
    epoch = {whole.problem(index).answer for index in range(30)}
    assert epoch == {str(n + 1) for n in range(30)}  # the ten rows that both files have are left out
    part = build_environment(replace(data(train, held_out_task=test), num_held_out=20))
    assert len(part.held_out()) == 20 and {p.key for p in part.held_out()} < {p.key for p in whole.held_out()}


def test_all_problems_of_a_held_out_split_are_held_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "mine"
    folder.mkdir()
    write_table(folder / "train.parquet", ROWS)
    write_table(folder / "test.parquet", MORE_ROWS)
    environment = build_environment(replace(data(str(folder), held_out_split="test"), num_held_out=100))
    assert len(environment.held_out()) == 20
    assert len({environment.problem(index).key for index in range(40)}) == 40


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"held_out_task": "no.jsonl"}, "held_out_task='no.jsonl' is not a file"),
        ({"held_out_task": "spell_backward"}, "held_out_task='spell_backward'.*must be a file or a data set"),
        ({"held_out_split": "test"}, "held_out_split='test'; the file .*rows.jsonl has no splits"),
        ({"held_out_task": "rows.jsonl"}, "the problems of task=.*rows.jsonl' itself; leave both fields empty"),
        ({"held_out_task": "copy.jsonl"}, "no problem of task=.* is left to train on after 40 problems are held out"),
        ({"held_out_task": "empty.csv"}, "empty.csv has no rows"),
        ({"task": "spell_backward", "held_out_task": "rows.jsonl"}, "task='spell_backward'; only a file or a data set"),
        (
            {"mixture": [{"task": "rows.jsonl"}], "held_out_task": "copy.jsonl"},
            "a mixture takes neither held_out_task nor held_out_split",
        ),
    ],
)
def test_a_wrong_choice_of_held_out_problems_is_refused(tmp_path, monkeypatch, fields, message):
    monkeypatch.chdir(tmp_path)
    task = write_table(Path("rows.jsonl"), ROWS)
    write_table(Path("copy.jsonl"), ROWS)
    Path("empty.csv").write_text("question,value\n")
    with pytest.raises(ValueError, match=message):
        build_environment(replace(data(task), **{"num_held_out": 512, **fields}))


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet", "csv"])
def test_every_file_format_gives_the_same_problems(tmp_path, ending):
    environment = build_environment(
        data(write_table(tmp_path / f"rows.{ending}", ROWS), prompt="[{level}] {question}=")
    )
    # All columns of CSV are text.
    rows = [{name: str(value) for name, value in row.items()} for row in ROWS] if ending == "csv" else ROWS
    expected = build_environment(data(write_table(tmp_path / "same.jsonl", rows), prompt="[{level}] {question}="))
    assert environment.held_out() == expected.held_out()
    first = [environment.problem(index) for index in range(36)]
    assert first == [expected.problem(index) for index in range(36)]
    assert {problem.answer for problem in [*first, *environment.held_out()]} == {str(n + 1) for n in range(40)}
    assert re.fullmatch(r"\[[012]\] \d+\+1=", first[0].prompt)


def test_the_split_that_the_config_names_is_read_from_a_directory_of_a_hugging_face_data_set(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "mine"
    folder.mkdir()
    write_table(folder / "train.parquet", ROWS)
    write_table(folder / "test.parquet", ROWS[:20])
    assert len({build_environment(data(str(folder))).problem(index).key for index in range(36)}) == 36
    small = build_environment(data(str(folder), split="test"))
    assert len({small.problem(index).key for index in range(16)}) == 16


def test_the_answer_of_a_conversation_is_its_last_message_or_a_column(tmp_path):
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "One more than 3?"}]
    answered = [*asked, {"role": "assistant", "content": "4"}]
    rows = [{"chat": answered, "n": 0}] + [
        {"chat": [{"role": "user", "content": str(n)}, {"role": "assistant", "content": str(n + 1)}], "n": n}
        for n in range(1, 9)
    ]
    task = write_table(tmp_path / "chats.jsonl", rows)
    environment = build_environment(EnvironmentConfig(task=task, messages_column="chat", num_held_out=1))
    problems = {p.prompt: p for p in [*environment.held_out(), *map(environment.problem, range(8))]}
    assert problems["One more than 3?"].answer == "4"
    assert problems["One more than 3?"].messages == answered
    rows = [{"chat": asked[:1] + [{"role": "user", "content": str(n)}], "answer": n} for n in range(8)]
    task = write_table(tmp_path / "asked.jsonl", rows)
    environment = build_environment(EnvironmentConfig(task=task, messages_column="chat", num_held_out=1))
    assert environment.problem(0).answer == environment.problem(0).prompt


def test_conversations_that_end_with_the_same_question_are_different_problems(tmp_path):
    def said(n: int) -> list[dict[str, str]]:
        turns = [("user", f"Remember {n}."), ("assistant", "Yes."), ("user", "Which number?"), ("assistant", str(n))]
        return [{"role": role, "content": content} for role, content in turns]

    task = write_table(tmp_path / "chats.jsonl", [{"messages": said(n)} for n in range(8)])
    environment = build_environment(EnvironmentConfig(task=task, num_held_out=2))
    problems = [*environment.held_out(), *map(environment.problem, range(6))]
    assert sorted(problem.answer for problem in problems) == [str(n) for n in range(8)]
    assert len({problem.key for problem in problems}) == 8


def cut_off(tmp_path) -> str:
    path = tmp_path / "cut.parquet"
    write_table(path, ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    return str(path)


@pytest.mark.parametrize(
    "name, text, fields, message",
    [
        (
            "a.jsonl",
            '{"question": "1", "value": "1"}\n{"question"',
            {},
            r"a.jsonl:2 is not JSON \(.*column.*\{\"question\"",
        ),
        ("a.jsonl", "[1]", {}, r"a.jsonl:1 is '\[1\]', not an object with columns"),
        ("a.jsonl", "", {}, "a.jsonl has no rows"),
        ("a.json", "[]", {}, "a.json has no rows"),
        ("a.json", '{"question": 1}', {}, "a.json holds dict, not a list of objects"),
        ("a.json", "[1", {}, r"a.json is not JSON \(.*line 1 column 3"),
        ("a.csv", "question,answer\n1,2\n", {}, "a.csv:2 has no column 'value'; it has question, answer"),
        (
            "a.jsonl",
            '{"question": "1", "value": 1}\n{"question": "2", "value": "2"}',
            {},
            "a.jsonl:2: column 'value' holds str '2', but it holds int at .*a.jsonl:1",
        ),
        (
            "a.jsonl",
            '{"question": "1", "value": null}',
            {},
            "column 'value' holds 'None', which is neither text nor a number",
        ),
        (
            "a.jsonl",
            '{"question": "1", "value": 1}',
            {"prompt": "{level}"},
            "uses the unknown field 'level'; the problems of task=.* have these fields: question",
        ),
        (
            "a.jsonl",
            '{"talk": [], "value": 1}',
            {"messages_column": "chat"},
            "has no column 'question'; it has talk, value",
        ),
        ("a.jsonl", '{"chat": "hi", "value": 1}', {"messages_column": "chat"}, "holds 'hi', not a list of messages"),
        (
            "a.jsonl",
            '{"chat": [{"role": "user"}], "value": 1}',
            {"messages_column": "chat"},
            'not {"role": …, "content": …}',
        ),
    ],
)
def test_the_error_for_wrong_data_names_what_is_wrong(tmp_path, name, text, fields, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        build_environment(data(str(tmp_path / name), **fields))


def test_the_error_for_a_cut_off_parquet_file_names_the_file(tmp_path):
    with pytest.raises(ValueError, match="cut.parquet cannot be read; it may be cut off"):
        build_environment(data(cut_off(tmp_path)))


def test_every_block_of_100_problems_of_a_mixture_follows_the_weights_and_each_problem_names_its_source(tmp_path):
    task = write_table(tmp_path / "rows.jsonl", ROWS)
    parts = [
        {"task": task, "weight": 3, "name": "file", "prompt_column": "question", "answer_column": "value"},
        {"task": "spell_backward", "prompt": "{question}!"},
    ]
    made = build_environment(EnvironmentConfig(mixture=parts, num_held_out=8))
    again = build_environment(EnvironmentConfig(mixture=parts, num_held_out=8))
    problems = [made.problem(index) for index in range(200)]
    assert problems == [again.problem(index) for index in reversed(range(200))][::-1]
    for block in (problems[:100], problems[100:]):
        assert [problem.source for problem in block].count("file") == 75
    assert {problem.source for problem in made.held_out()} == {"file", "spell_backward"}
    assert [problem.source for problem in made.held_out()].count("file") == 6
    trained = {problem.prompt for problem in problems if problem.source == "file"}
    assert len(trained) == 34  # every problem of the file that is not held out
    for problem in problems[:20]:
        assert made.reward(problem, problem.answer) == 1.0 and made.reward(problem, "?") == 0.0


def closeness(answer: str, completion: str) -> float:
    return 1 / (1 + abs(len(answer) - len(completion)))


def test_the_regex_reward_compares_last_matches_and_a_users_function_can_be_the_reward(jsonl):
    problem = Problem(prompt="", answer="72", key="")
    config = EnvironmentConfig(task=jsonl, num_held_out=10, reward="regex", reward_pattern=r"#### (-?\d+)")
    reward = build_environment(config).reward
    texts = ("#### 7 no, #### 72", "#### 72, #### 7", "72", "")
    assert [reward(problem, text) for text in texts] == [1.0, 0.0, 0.0, 0.0]
    whole = EnvironmentConfig(task=jsonl, num_held_out=10, reward="regex", reward_pattern=r"\d+")
    assert build_environment(whole).reward(problem, "7 and 72") == 1.0
    own = EnvironmentConfig(task=jsonl, num_held_out=10, reward=f"{__name__}:closeness")
    assert build_environment(own).reward(problem, "123") == 0.5


GSM8K = r"#### (-?\d+(?:,\d{3})*(?:\.\d+)?)"


@pytest.mark.parametrize(
    ("pattern", "answer", "completion", "reward"),
    [
        (r"\\boxed\{(-?\d+)\}|#### (-?\d+)", "#### 5", "#### 7", 0.0),
        (r"\\boxed\{(-?\d+)\}|#### (-?\d+)", "#### 5", "#### 5", 1.0),
        (r"\\boxed\{(-?\d+)\}|#### (-?\d+)", "#### 5", r"\boxed{5}", 1.0),
        (r"(\d+)?x", "x", "x", 0.0),  # no group took part in either match
        (r"(\d*)x", "", "x", 0.0),
        (GSM8K, "#### 2,125", "#### 2", 0.0),
        (GSM8K, "#### 2,125", "#### 2,125", 1.0),
        (GSM8K, "#### 2,125", "#### 2125", 1.0),
        (GSM8K, "2,125", "#### 2125.", 1.0),
        (GSM8K, "#### 2.5", "#### 2", 0.0),
        (GSM8K, "#### 2.5", "so #### 2.5", 1.0),
        (GSM8K, "#### -1,000,000", "#### -1000000", 1.0),
        (r"(\d,\d)", "1,2", "1,2", 1.0),
        (r"([\d,]+)", "1,2", "12", 0.0),  # "1,2" has no thousands separator
    ],
)
def test_the_regex_reward_compares_the_first_group_that_took_part(pattern, answer, completion, reward):
    assert last_match(pattern, answer, completion) == reward


MATRIX = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (
            r"2\sqrt{3}",
            [r"2\sqrt{3}", r"so \boxed{2\sqrt{3}}", r"The answer is 2\sqrt{3}.", r"$\sqrt{12}$"],
            ["2", "3"],
        ),
        ("x^2+1", ["x^2+1", r"\boxed{x^2+1}", "it is $1+x^2$"], ["1", "2", "x^2"]),
        (r"\text{Evelyn}", ["Evelyn", r"\boxed{\text{Evelyn}}", r"\boxed{Evelyn}"], ["Evelny", r"\boxed{Evelny}", ""]),
        ("listen", ["listen", r"\boxed{listen}", "The answer is listen."], ["silent", r"\boxed{silent}"]),
        ("[2,5]", ["[2,5]", "[2, 5]", r"\boxed{[2,5]}"], ["2", "5", "(2,5)", "[2,6]"]),
        ("(C)", ["(C)", r"\boxed{C}", r"\boxed{\text{(C)}}", "The answer is (C)."], ["(D)", r"\boxed{D}", ""]),
        ("2", ["2", "2.0", r"\frac{4}{2}"], [r"2\sqrt{3}", r"The answer is 2\sqrt{3}", "3"]),
        (r"\left(3, \frac{\pi}{2}\right)", [r"\boxed{(3, \frac{\pi}{2})}"], ["3", r"\boxed{(3, \pi)}"]),
        ("2,125", ["2125", "So 2,125"], ["2", "125"]),
        ("0.5", ["1/2", r"it is $\frac{1}{2}$"], ["5", "0"]),
        ("5", ["**5**", "Answer: **5**", "The answer is **5**.", "The answer is 5!", "x: 5"], ["**6**", "is 6!"]),
        ("5", ["a = 2, b = 3, a + b = 5"], ["a = 5, b = 3, a + b = 8"]),
        ("18", ["16-3-4=9, 9*2=18"], ["9*2=19"]),
        ("10000", ["10 000"], ["10 001"]),
        (MATRIX, [MATRIX, rf"\boxed{{{MATRIX}}}", rf"${MATRIX}$"], ["4", MATRIX.replace("4", "5")]),
        (r"\$12.50", ["12.5", "$12.50"], ["12"]),
        ("5", ["5", "-(-5)"], ["- 5", "The answer is - 5", "2x + 5", "1, 2, 3, 4, 5", "x < 5"]),
        ("2", ["2", "1 + 1"], ["(1, 2)", "10 * 2", "3/2"]),
        ("6", ["6", "3!"], ["6!"]),
        ("3", ["3"], ["3x", "3i", "3/x"]),
        ("x^2", ["The answer is **x^2**"], ["The answer is **x^3**"]),
    ],
)
def test_math_verify_reads_answers_without_delimiters(answer, right, wrong):
    assert [math_verify(answer, text) for text in right] == [1.0] * len(right)
    assert [math_verify(answer, text) for text in wrong] == [0.0] * len(wrong)


@pytest.mark.parametrize(
    ("fields", "answer", "message"),
    [
        ({"reward": "math_verify"}, "???", "tasks.jsonl:11: the answer '[?]{3}' has no value"),
        ({"reward": "python"}, " ", "tasks.jsonl:11: column 'answer' is empty"),
    ],
)
def test_an_answer_that_no_completion_can_match_is_refused_with_its_row(tmp_path, fields, answer, message):
    rows = [{"prompt": f"{n}?", "answer": "1"} for n in range(10)] + [{"prompt": "?", "answer": answer}]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=message):
        build_environment(EnvironmentConfig(task=str(file), num_held_out=2, **fields))
