"""Command lines, data files and rewards that a run cannot use.

The controller refuses each of them before a process starts. The message names the fault and its place.
"""

import json
import sys
from pathlib import Path

import pytest

from controllers.environments import own_code
from controllers.program import launch

GOOD = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
LONG = [{"prompt": "1" * 300 + f"{n}=", "answer": "1"} for n in range(40)]


# The text of wrong_tasks.py, a module with tasks and rewards such as users write.
OWN_TASKS = """
from controllers.environments import Problem

NUMBER = 3
ONE = Problem(prompt="1=", answer="1", key="1")

def one(text): return 1.0
def make(): return Task()
def failing(seed, num_held_out): return {}["level"]

class Task:
    def __init__(self, **options): self.options = options
    def problem(self, index): return ONE
    def held_out(self): return [ONE]
    def reward(self, problem, completion): return 1.0

class Incomplete:
    def __init__(self, **options): pass
    def held_out(self): return []

class NothingHeldOut(Task):
    def held_out(self): return []

class HeldOutTwice(Task):
    def held_out(self): return [ONE, ONE]

class Pairs(Task):
    def held_out(self): return [("1=", "1")]

class NumberAsAnswer(Task):
    def problem(self, index): return Problem(prompt="1=", answer=1, key="1")

class Exhausted(Task):
    def problem(self, index): return [ONE][index + 1]

class RewardOfText(Task):
    def reward(self, completion): return 1.0
"""


def lines(rows: list) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("wrong_tasks")
    texts = {
        "good.jsonl": lines(GOOD),
        "copy.jsonl": lines(GOOD),
        "long.jsonl": lines(LONG),
        "mixed.jsonl": lines([GOOD[0], {"prompt": "2+2=", "answer": 4}]),
        "nested.jsonl": lines([{"prompt": "1", "answer": [1]}]),
        "rows.jsonl": lines([[1, 2]]),
        "broken.jsonl": lines(GOOD[:2]) + '{"prompt": "3+',
        "empty.jsonl": "",
        "object.json": "{}",
        "chats.jsonl": lines([{"messages": "hello", "answer": "1"}]),
        "nothing.csv": "prompt,answer\n",
        "cut.csv": "prompt,answer\n1,2\n3\n",
        "wrong_tasks.py": OWN_TASKS,
        "wrong_syntax.py": "def make(:\n",
        "wrong_import.py": "\nimport nowhere\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latin.jsonl").write_bytes((lines(GOOD[:1]) + '{"prompt": "café", "answer": "1"}\n').encode("latin-1"))
    parquet.write_table(pyarrow.Table.from_pylist(GOOD), folder / "whole.parquet")
    (folder / "cut.parquet").write_bytes((folder / "whole.parquet").read_bytes()[:-20])
    return folder


@pytest.fixture
def refusal(folder, monkeypatch, capsys):
    """refusal(flags) returns what `python -m controllers.grpo` prints to stderr when it refuses the flags, joined to one line."""

    def run(flags: list[str]) -> str:
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        monkeypatch.setattr(launch, "_run", lambda *_: pytest.fail("the run began"))
        held_out = [] if "--environment.num-held-out" in flags else ["--environment.num-held-out", "8"]
        monkeypatch.setattr(sys, "argv", ["grpo", "--config", "blank", *held_out, *flags, "--output-dir", "run"])
        with pytest.raises(SystemExit) as ended:
            launch.start_loop("controllers.grpo")
        assert ended.value.code == 2 and not (folder / "run").exists()
        return " ".join(capsys.readouterr().err.replace("│", " ").split())

    return run


def of(task: str, *flags: str) -> list[str]:
    """The flags of a run with this task."""
    return ["--task", task, *flags]


def reward(name: str, *flags: str) -> list[str]:
    """The flags of a run with good data and this reward."""
    return of("good.jsonl", "--environment.reward", name, *flags)


# The fault -> (the flags, a part of the message).
WRONG = {
    "no task": ([], "environment.task is empty: --task takes"),
    "a file that does not exist": (of("none.jsonl"), "task='none.jsonl' is not a file"),
    "a file without the prompt column": (
        of("good.jsonl", "--environment.prompt-column", "question"),
        "good.jsonl:1 has no column 'question'; it has prompt, answer",
    ),
    "a file without the answer column": (
        of("whole.parquet", "--environment.answer-column", "solution"),
        "whole.parquet, row 0 has no column 'solution'; it has prompt, answer",
    ),
    "a column with two types": (
        of("mixed.jsonl"),
        "mixed.jsonl:2: column 'answer' holds int 4, but it holds str at mixed.jsonl:1",
    ),
    "a list as an answer": (of("nested.jsonl"), "nested.jsonl:1: column 'answer' holds '[1]', which is neither"),
    "a row that is not an object": (of("rows.jsonl"), "rows.jsonl:1 is '[1, 2]', not an object with columns"),
    "a line that is cut off": (of("broken.jsonl"), "broken.jsonl:3 is not JSON"),
    "an empty file": (of("empty.jsonl"), "empty.jsonl has no rows"),
    "a table without rows": (of("nothing.csv"), "nothing.csv has no rows"),
    "a table that is cut off": (of("cut.csv"), "cut.csv:3 cannot be read; it may be cut off"),
    "a text that is not UTF-8": (of("latin.jsonl"), "latin.jsonl:2 is not UTF-8 text"),
    "JSON that is not a list": (of("object.json"), "object.json holds dict, not a list of objects"),
    "a Parquet file that is cut off": (of("cut.parquet"), "cut.parquet cannot be read; it may be cut off"),
    "a conversation that is not a list": (
        of("chats.jsonl"),
        "chats.jsonl:1: column 'messages' holds 'hello', not a list of messages",
    ),
    "a data set that does not exist": (of("no/where"), "task='no/where', split='train': "),
    "a field that the rows lack": (
        of("good.jsonl", "--environment.prompt", "[{level}] {question}"),
        "uses the unknown field 'level'; the problems of task='good.jsonl' have these fields: question",
    ),
    "a template that is cut off": (
        of("good.jsonl", "--environment.prompt", "{question"),
        "prompt='{question' is not a",
    ),
    "a template with a field that has no name": (
        of("good.jsonl", "--environment.prompt", "{}"),
        "prompt='{}' is not a template",
    ),
    "a template with an attribute": (
        of("good.jsonl", "--environment.prompt", "{question.text}"),
        "prompt='{question.text}' is not a template: 'str' object has no attribute 'text'",
    ),
    "a pattern that nothing matches": (
        of("good.jsonl", "--environment.prompt-pattern", "x"),
        "num_held_out=8 is more than half of the 0 distinct problems found in task='good.jsonl'",
    ),
    "a prompt that is too long": (
        of("long.jsonl"),
        "has 303 tokens, but with max_tokens=16 a prompt may have at most 240",
    ),
    "more than half of the problems held out": (
        of("good.jsonl", "--environment.num-held-out", "30"),
        "num_held_out=30 is more than half of the 40 distinct problems",
    ),
    "a held-out file that does not exist": (
        of("good.jsonl", "--environment.held-out-task", "none.jsonl"),
        "held_out_task='none.jsonl' is not a file",
    ),
    "every problem held out": (
        of("good.jsonl", "--environment.held-out-task", "copy.jsonl", "--environment.num-held-out", "99"),
        "no problem of task='good.jsonl' with options={} is left to train on",
    ),
    "an unknown task": (of("count_bit"), "task='count_bit' is not a reasoning-gym task; did you mean count_bits"),
    "an unknown option": (of("count_bits", "--environment.options", '{"size_n": 3}'), "known options: "),
    "options that are not JSON": (of("count_bits", "--environment.options", "{"), "--environment.options"),
    "a module that does not exist": (
        of("nowhere:Task"),
        "task='nowhere:Task' cannot be imported: ModuleNotFoundError: No module",
    ),
    "a module that cannot be imported": (of("wrong_import:make"), "No module named 'nowhere' ("),
    "a module that is not Python": (of("wrong_syntax:make"), "invalid syntax (wrong_syntax.py, line 1)"),
    "a number as a task": (of("wrong_tasks:NUMBER"), "task='wrong_tasks:NUMBER' is int 3, not a function or a class"),
    "a task that takes no seed": (of("wrong_tasks:make"), "make() got an unexpected keyword argument 'seed'"),
    "a task that raises": (of("wrong_tasks:failing"), "called with seed=0, num_held_out=8: KeyError: 'level' ("),
    "an object without methods": (of("wrong_tasks:Incomplete"), "returned Incomplete without problem, reward"),
    "a task that holds nothing out": (of("wrong_tasks:NothingHeldOut"), "held_out() returned [], not a list of"),
    "a problem that is held out twice": (of("wrong_tasks:HeldOutTwice"), "returned two problems with the key '1'"),
    "a held-out problem that is not a Problem": (of("wrong_tasks:Pairs"), "held_out() gave ('1=', '1'), not a Problem"),
    "an answer that is not text": (
        of("wrong_tasks:NumberAsAnswer"),
        "problem(0) gave a problem whose answer is int 1, not text",
    ),
    "a problem that raises": (of("wrong_tasks:Exhausted"), "problem(0) raised IndexError: list index out of range ("),
    "a reward method with other arguments": (
        of("wrong_tasks:RewardOfText"),
        "reward must take (problem, completion): too many",
    ),
    "an unknown reward": (reward("exact"), "reward='exact'; it must be one of exact_match"),
    "a reward function that does not exist": (
        reward("wrong_tasks:none"),
        "reward='wrong_tasks:none' cannot be imported",
    ),
    "a number as a reward": (reward("wrong_tasks:NUMBER"), "reward='wrong_tasks:NUMBER' is int 3, not a function"),
    "a reward function with other arguments": (
        reward("wrong_tasks:one"),
        "reward='wrong_tasks:one' must take (answer, completion): too many positional arguments",
    ),
    "reward=regex without a pattern": (reward("regex"), "the reward regex needs a pattern"),
    "a pattern that is not a regular expression": (
        reward("regex", "--environment.reward-pattern", "("),
        "is not a regular expression",
    ),
    "reward=judge without a URL and a model": (reward("judge"), "the reward judge needs both"),
    "a judge's prompt with an attribute": (
        reward(
            *("judge", "--environment.judge.url", "http://localhost:1/v1", "--environment.judge.model", "m"),
            *("--environment.judge.prompt", "{question.text}"),
        ),
        "the prompt may use question, answer and completion",
    ),
    "a judge's pattern without a group for the score": (
        reward(
            *("judge", "--environment.judge.url", "http://localhost:1/v1", "--environment.judge.model", "m"),
            *("--environment.judge.pattern", "score"),
        ),
        "judge.pattern='score' has no group",
    ),
    "no CPU time for a program": (
        reward("python", "--environment.sandbox.cpu-seconds", "0"),
        "sandbox.cpu_seconds=0",
    ),
    "as much time for a reward as for a program": (
        reward("python", "--environment.sandbox.cpu-seconds", "15"),
        "reward_timeout=60; it must be above 60, the wall-clock seconds that a program may take (4 times sandbox.cpu_seconds=15)",
    ),
    "a number of reward processes below 0": (
        of("good.jsonl", "--environment.reward-workers", "-1"),
        "reward_workers=-1; it must be at least 0",
    ),
    "no time for a reward": (of("good.jsonl", "--environment.reward-timeout", "0"), "reward_timeout=0.0; it must be"),
    "a mixture with a part without a task": (
        ["--environment.mixture", '[{"weight": 1}]'],
        "mixture[0]={'weight': 1} names no task",
    ),
    "a mixture with a weight of 0": (
        ["--environment.mixture", '[{"task": "good.jsonl", "weight": 0}]'],
        "it must be an object whose weight is a number above 0",
    ),
    "a mixture with a weight below 0": (
        ["--environment.mixture", '[{"task": "good.jsonl"}, {"task": "copy.jsonl", "weight": -1}]'],
        "mixture[1]={'task': 'copy.jsonl', 'weight': -1}; it must be an object whose weight is a number above 0",
    ),
    "a mixture with two parts of one name": (
        ["--environment.mixture", '[{"task": "good.jsonl"}, {"task": "copy.jsonl", "name": "good.jsonl"}]'],
        "mixture has several parts with the name 'good.jsonl'",
    ),
    "a mixture in a mixture": (
        ["--environment.mixture", '[{"task": "x", "mixture": [{"task": "good.jsonl"}]}]'],
        "mixture[0] is itself a mixture",
    ),
    "a mixture with too many parts": (
        ["--environment.mixture", json.dumps([{"task": "good.jsonl"}] * 101)],
        "mixture has 101 parts, but at most 100 are allowed",
    ),
    "a mixture with a wrong file": (
        ["--environment.mixture", '[{"task": "good.jsonl"}, {"task": "mixed.jsonl"}]'],
        "mixture, mixed.jsonl: mixed.jsonl:2: column 'answer'",
    ),
    "an evaluation set without a file": (
        of("good.jsonl", "--evaluation", '{"hard": {"task": "none.jsonl"}}'),
        "evaluation.hard: task='none.jsonl' is not a file",
    ),
    "an evaluation set with a wrong file": (
        of("good.jsonl", "--evaluation", '{"hard": {"task": "rows.jsonl"}}'),
        "evaluation.hard: rows.jsonl:1 is '[1, 2]'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_task_is_refused_before_a_process_starts(case, refusal):
    flags, message = WRONG[case]
    assert message in refusal(flags)


def test_the_place_of_an_error_is_the_users_line_and_not_a_librarys(tmp_path, monkeypatch):
    (tmp_path / "reads_json.py").write_text(
        "import json\n\n\ndef reward(problem, completion):\n    return json.loads('{')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reward = own_code.imported("environment.reward", "reads_json:reward")
    with pytest.raises(ValueError, match=r"reads_json.py:5\)"):
        own_code.tried("the reward", reward, None, "")
