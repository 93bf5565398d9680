"""The command line accepts every command of docs/tasks.md. The page names only rewards and `--environment` flags that exist.
docs/metrics.md explains the page's metrics of rewards and evaluation.
"""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from waiting import GUARD

from configs import CONFIGS
from controllers.environments.config import REWARDS, EnvironmentConfig
from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.program import cli

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tasks.md").read_text()
FENCED = [text for kind, text in re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if not kind]
TABLE = re.findall(r"^\| `(--.*?)` \| [\d.]+ \|", PAGE, re.MULTILINE)


def commands() -> list[list[str]]:
    """The arguments of controllers.grpo in every command of the page, without repetitions. A row of the page's table has only the flags after
    `--config blank`.
    """
    found: list[list[str]] = []
    for line in "\n".join(FENCED).replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        if "controllers.grpo" in words:
            found.append(words[words.index("controllers.grpo") + 1 :])
    found += [["--config", "blank", *shlex.split(row)] for row in TABLE]
    [graded] = re.findall(r"PYTHONPATH=examples .venv/bin/python -m controllers.grpo ([^`]+)`", PAGE)
    return [list(words) for words in dict.fromkeys(map(tuple, [*found, graded.split()]))]


def named(arguments: list[str]) -> str:
    return " ".join(arguments)[15:60]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the files that the commands name."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "examples").symlink_to(ROOT / "examples")
    runpy.run_path(str(ROOT / "examples" / "make_rows.py"))["main"](folder)
    for file in folder.glob("*.jsonl"):
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:2000]))  # fewer are checked sooner
    runpy.run_path(str(ROOT / "examples" / "tiny_chat_model.py"))["main"](str(folder / "chat_model"))
    (folder / "DIR").symlink_to("chat_model")
    [program] = re.findall(r"<!-- test: letters -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    (folder / "next_letter.py").write_text(program)
    for name, first in (("train", 0), ("test", 1000), ("hard", 2000)):
        rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(first, first + 300)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    """Work in `folder`. The import path has `folder` and its examples, as for the commands of the page."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder / "examples"))
    monkeypatch.syspath_prepend(str(folder))


def test_the_page_has_commands_in_code_blocks_and_in_a_table():
    assert len(FENCED) >= 5 and len(TABLE) == 5 and len(commands()) >= 9


@pytest.mark.parametrize("arguments", commands(), ids=named)
def test_a_command_of_the_page_is_accepted(arguments, dry_run, here):
    assert dry_run(*arguments)["environment"]["num_held_out"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("arguments", commands(), ids=named)
def test_a_command_of_the_page_runs(arguments, folder, tmp_path):
    short = ["--sft-steps", "1", "--steps", "1", "--groups", "2", "--environment.num-held-out", "8"]
    command = [sys.executable, "-m", "controllers.grpo", *arguments, *short, "--output-dir", str(tmp_path / "run")]
    path = {"PYTHONPATH": f"{ROOT}:examples"}
    finished = subprocess.run(command, cwd=folder, env={**os.environ, **path}, capture_output=True, timeout=GUARD)
    assert finished.returncode == 0, finished.stdout.decode() + finished.stderr.decode()
    assert [record["phase"] for record in read_jsonl(RunFolder(tmp_path / "run").metrics)] == ["start", "sft", "grpo"]


def test_the_evaluation_sets_of_the_page_are_accepted(here):
    [sets] = re.findall(r"`--evaluation '(\{.*?\})'`", PAGE)
    config = cli.parse("prog", CONFIGS["controllers.grpo"], ["--config", "tiny", "--evaluation", sets]).config
    config.validate()
    assert list(config.evaluation) == ["hard"]


def test_the_page_lists_every_reward_and_names_only_flags_that_exist():
    table = PAGE.split("## Rewards")[1].split("\n## ")[0]
    names = re.findall(r"^\| `([\w:]+)` \|", table, re.MULTILINE)
    assert set(names) == {*REWARDS, "my_rewards:closeness"}
    flags = set(re.findall(r"--environment\.([\w-]+)", PAGE))
    known = {field.name.replace("_", "-") for field in fields(EnvironmentConfig)}
    assert flags - known == set() and {"held-out-task", "reward-workers", "mixture"} <= flags


def test_metrics_md_explains_the_metrics_of_the_page():
    explained = (ROOT / "docs" / "metrics.md").read_text()
    metrics = set(re.findall(r"`((?:reward|eval)/[\w/<>]+)`", PAGE))
    assert len(metrics) >= 4
    assert [name for name in sorted(metrics) if f"`{name}`" not in explained] == []
