"""Command lines, data files and rewards that a run cannot use. Each is refused before a process starts, in a message that names what and where."""

import json
import sys
from pathlib import Path

import pytest

from controllers import launch

GOOD = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
LONG = [{"prompt": "1" * 300 + f"{n}=", "answer": "1"} for n in range(40)]


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
        "wrong_tasks_rewards.py": "lock = open(__file__)\nclass Task:\n    def held_out(self): return []\n"
        "def make(seed, num_held_out): return Task()\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    parquet.write_table(pyarrow.Table.from_pylist(GOOD), folder / "whole.parquet")
    (folder / "cut.parquet").write_bytes((folder / "whole.parquet").read_bytes()[:-20])
    return folder


@pytest.fixture
def refusal(folder, monkeypatch, capsys):
    """refusal(flags) -> what `python -m controllers.grpo` prints to stderr, on one line, when it refuses."""

    def run(flags: list[str]) -> str:
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        monkeypatch.setattr(launch, "_run", lambda *_: pytest.fail("the run began"))
        held_out = [] if "--environment.num-held-out" in flags else ["--environment.num-held-out", "8"]
        monkeypatch.setattr(sys, "argv", ["grpo", "--config", "blank", *held_out, *flags, "--output-dir", "run"])
        with pytest.raises(SystemExit) as ended:
            launch.main("controllers.grpo")
        assert ended.value.code == 2 and not (folder / "run").exists()
        return " ".join(capsys.readouterr().err.replace("│", " ").split())

    return run


def of(task: str, *flags: str) -> list[str]:
    return ["--task", task, *flags]


def reward(name: str, *flags: str) -> list[str]:
    return of("good.jsonl", "--environment.reward", name, *flags)


WRONG = {
    "no task": ([], "environment.task is empty: --task takes"),
    "no file": (of("none.jsonl"), "task='none.jsonl' is not a file"),
    "no prompt column": (
        of("good.jsonl", "--environment.prompt-column", "question"),
        "good.jsonl:1 has no column 'question'; it has prompt, answer",
    ),
    "no answer column": (
        of("whole.parquet", "--environment.answer-column", "solution"),
        "whole.parquet, row 0 has no column 'solution'; it has prompt, answer",
    ),
    "mixed types": (of("mixed.jsonl"), "mixed.jsonl:2: column 'answer' holds int 4, but str at mixed.jsonl:1"),
    "a list as an answer": (of("nested.jsonl"), "nested.jsonl:1: column 'answer' holds '[1]', which is neither"),
    "a row that is no object": (of("rows.jsonl"), "rows.jsonl:1 is '[1, 2]', not an object with columns"),
    "a line that is cut off": (of("broken.jsonl"), "broken.jsonl:3 is not JSON"),
    "an empty file": (of("empty.jsonl"), "empty.jsonl:1 is not JSON"),
    "JSON that is no list": (of("object.json"), "object.json holds dict, not a list of objects"),
    "a Parquet file that is cut off": (of("cut.parquet"), "cut.parquet cannot be read; it may be cut off"),
    "no conversation": (of("chats.jsonl"), "chats.jsonl:1: column 'messages' holds 'hello', not a list of messages"),
    "no data set": (of("no/where"), "task='no/where', split='train': "),
    "a field that the rows lack": (
        of("good.jsonl", "--environment.prompt", "[{level}] {question}"),
        "uses the unknown field 'level'; the problems of task='good.jsonl' have question",
    ),
    "a template that is cut off": (
        of("good.jsonl", "--environment.prompt", "{question"),
        "prompt='{question' is not a",
    ),
    "a template of a part": (
        of("good.jsonl", "--environment.prompt", "{question.text}"),
        "prompt='{question.text}' is not a template: 'str' object has no attribute 'text'",
    ),
    "a pattern that nothing matches": (
        of("good.jsonl", "--environment.prompt-pattern", "x"),
        "num_held_out=8 is more than half of the 0 distinct problems found in task='good.jsonl'",
    ),
    "a prompt that is too long": (of("long.jsonl"), "has 303 tokens, but only 240 fit beside max_tokens=16"),
    "too many held out": (
        of("good.jsonl", "--environment.num-held-out", "30"),
        "num_held_out=30 is more than half of the 40 distinct problems",
    ),
    "no file of held-out problems": (
        of("good.jsonl", "--environment.held-out-task", "none.jsonl"),
        "held_out_task='none.jsonl' is not a file",
    ),
    "all held out": (
        of("good.jsonl", "--environment.held-out-task", "copy.jsonl", "--environment.num-held-out", "99"),
        "no problem of task='good.jsonl' with options={} is left to train on",
    ),
    "an unknown task": (of("count_bit"), "task='count_bit' is not a reasoning-gym task; did you mean count_bits"),
    "an unknown option": (of("count_bits", "--environment.options", '{"size_n": 3}'), "known options: "),
    "options that are no JSON": (of("count_bits", "--environment.options", "{"), "--environment.options"),
    "no module": (of("nowhere:Task"), "task='nowhere:Task' cannot be imported: No module named 'nowhere'"),
    "an object without methods": (of("wrong_tasks_rewards:make"), "returned Task without problem, reward"),
    "an unknown reward": (reward("exact"), "reward='exact'; it must be one of exact_match"),
    "no reward function": (reward("wrong_tasks_rewards:none"), "reward='wrong_tasks_rewards:none' cannot be imported"),
    "no pattern": (reward("regex"), "the reward regex needs a pattern"),
    "a wrong pattern": (reward("regex", "--environment.reward-pattern", "("), "is not a regular expression"),
    "no judge": (reward("judge"), "the reward judge needs both"),
    "no score in the judge's answer": (
        reward(
            *("judge", "--environment.judge.url", "http://localhost:1/v1", "--environment.judge.model", "m"),
            *("--environment.judge.pattern", "score"),
        ),
        "judge.pattern='score' has no group",
    ),
    "no time for the tests of code": (
        reward("python", "--environment.sandbox.cpu-seconds", "0"),
        "sandbox.cpu_seconds=0",
    ),
    "a number of processes below 0": (
        of("good.jsonl", "--environment.reward-workers", "-1"),
        "reward_workers=-1; it must be at least 0",
    ),
    "no time for a reward": (of("good.jsonl", "--environment.reward-timeout", "0"), "reward_timeout=0.0; it must be"),
    "a part without a task": (["--environment.mixture", '[{"weight": 1}]'], "mixture[0]={'weight': 1} names no task"),
    "a part without a weight": (
        ["--environment.mixture", '[{"task": "good.jsonl", "weight": 0}]'],
        "it must be an object whose weight is a number above 0",
    ),
    "a part of a wrong file": (
        ["--environment.mixture", '[{"task": "good.jsonl"}, {"task": "mixed.jsonl"}]'],
        "mixture, mixed.jsonl: mixed.jsonl:2: column 'answer'",
    ),
    "a named set without a file": (
        of("good.jsonl", "--validation", '{"hard": {"task": "none.jsonl"}}'),
        "validation.hard: task='none.jsonl' is not a file",
    ),
    "a named set of a wrong file": (
        of("good.jsonl", "--validation", '{"hard": {"task": "rows.jsonl"}}'),
        "validation.hard: rows.jsonl:1 is '[1, 2]'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_task_is_refused_before_a_process_starts(case, refusal):
    flags, message = WRONG[case]
    assert message in refusal(flags)
