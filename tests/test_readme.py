"""Tests that the programs in README.md and docs/ run as printed, and that the files, names, calls and metrics in these
pages exist.
"""

import asyncio
import importlib.util
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rl_actors
from controllers.observe.logger import KEYS
from controllers.observe.metric_table import METRICS, key_of
from rl_actors.losses import LOSSES, columns_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
PROGRAM = re.compile(r"<!-- test: (\w+) -->\n```python\n(.*?)```", re.DOTALL)
PROGRAMS = dict(PROGRAM.findall("\n".join([README, *DOCS.values()])))
# The program "task" is a module, so it is not run by itself. A test runs the command of README.md that imports it.
TASK = "task"
LOOP = "loop"  # a program that takes flags
# test_a_program_of_a_page_runs_as_printed adds these lines to the end of each program.
AFTER = """
import sys
loaded = {"torchao", "torchtitan.models", "vllm"} & set(sys.modules)
assert not loaded, f"a program that calls actors must not load their libraries, but it has loaded {loaded}"
"""


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, cwd=folder, env=environment, timeout=300, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished


def test_the_pages_have_exactly_the_programs_that_are_run_here():
    assert set(PROGRAMS) == {"repl", "embedding", "trainer", TASK, LOOP, "letters", "episode", "distillation"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["repl", "trainer", "embedding"])
def test_a_program_of_a_page_runs_as_printed(name, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAMS[name] + AFTER)
    finished = run([sys.executable, "program.py"], tmp_path)
    assert "Traceback" not in finished.stderr and "leaked" not in finished.stderr


@pytest.mark.slow
def test_the_student_of_the_distillation_program_comes_near_its_teacher(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAMS["distillation"])
    printed = run([sys.executable, "program.py"], tmp_path).stdout
    divergences = [float(number) for number in re.findall(r"^\d+ (\S+)$", printed, re.MULTILINE)]
    assert len(divergences) == 20 and divergences[0] > 0.5 and divergences[-1] < 0.1 * divergences[0], divergences


@pytest.mark.slow
def test_the_loop_in_the_readme_takes_the_flags_of_every_loop(tmp_path):
    (tmp_path / "my_loop.py").write_text(PROGRAMS[LOOP])
    shown = json.loads(run([sys.executable, "my_loop.py", "--steps", "3", "--dry-run"], tmp_path).stdout)
    assert shown["steps"] == 3
    [command] = re.findall(r"^\.venv/bin/python (my_loop.py .*--plan)", README, re.MULTILINE)
    assert "trainer-0" in run([sys.executable, *command.split()], tmp_path).stdout


@pytest.mark.slow
def test_the_loop_in_the_readme_trains(tmp_path):
    (tmp_path / "my_loop.py").write_text(PROGRAMS[LOOP])
    run([sys.executable, "my_loop.py", "--steps", "4", "--output-dir", "run"], tmp_path)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    mine = [record for record in records if record["phase"] == "mine"]
    assert len(mine) == 4 and all(record["mine/prompts"] >= 8 for record in mine)
    # after the supervised steps the policy is good enough to learn from its rewards
    assert all(record["reward/mean"] > 0.1 and "grad_norm" in record for record in mine)
    assert "mine" in (tmp_path / "run/report.html").read_text()


def test_the_command_below_the_task_in_the_readme_accepts_the_task(tmp_path, dry_run):
    source = tmp_path / "my_task.py"
    source.write_text(PROGRAMS[TASK])
    [command] = re.findall(r"^\.venv/bin/python -m controllers.grpo (.*my_task.*)$", README, re.MULTILINE)
    # --dry-run builds the task, and encodes its held-out problems and a thousand training problems.
    assert dry_run(*command.split())["environment"]["task"] == "my_task:LargestDigit"
    spec = importlib.util.spec_from_file_location("my_task", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    task = module.LargestDigit(seed=0, num_held_out=8)
    held_out = task.held_out()
    assert len({problem.key for problem in held_out}) == 8
    assert not {task.problem(index).key for index in range(60_000)} & {problem.key for problem in held_out}
    assert task.problem(5) == module.LargestDigit(seed=0, num_held_out=8).problem(5)
    for problem in held_out:
        assert task.reward(problem, problem.answer) == 1.0 and task.reward(problem, "") == 0.0


def test_the_command_below_the_task_in_tasks_md_accepts_the_task(tmp_path, dry_run):
    (tmp_path / "next_letter.py").write_text(PROGRAMS["letters"])
    [command] = re.findall(r"^\.venv/bin/python -m controllers.grpo (.*next_letter.*)$", DOCS["tasks.md"], re.MULTILINE)
    config = dry_run(*command.split())
    assert config["environment"]["task"] == "next_letter:NextLetter"
    assert config["alphabet"] == "=abcdefghijklmnopqrstuvwxyz" and config["trainer"]["model"]["vocab_size"] == 29


def test_the_command_below_the_episode_in_episodes_md_accepts_the_episode(tmp_path, dry_run):
    source = tmp_path / "counting.py"
    source.write_text(PROGRAMS["episode"])
    [command] = re.findall(r"^\.venv/bin/python -m controllers.grpo (.*counting.*)$", DOCS["episodes.md"], re.MULTILINE)
    config = dry_run(*command.split())
    assert config["environment"]["task"] == "counting:Counting" and config["alphabet"] == "+0123456789"
    module = runpy.run_path(str(source))
    task = module["Counting"](seed=0, num_held_out=1)
    assert not {task.problem(index).key for index in range(50)} & {problem.key for problem in task.held_out()}
    episode = task.episode(task.held_out()[0])
    replies = [asyncio.run(episode.step(said)) for said in ("8", "9")]
    assert episode.reset() == "9+" and [(reply.reward, reply.is_over) for reply in replies] == [
        (1.0, False),
        (1.0, True),
    ]
    assert asyncio.run(task.episode(task.problem(3)).step("5")).is_over


def test_the_api_page_lists_every_public_name_and_no_other():
    table = DOCS["api.md"].split("## The public names")[1].split("\n## ")[0]
    first_cells = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    assert sorted(re.findall(r"`(\w+)`", first_cells)) == sorted(rl_actors.__all__)
    for name in rl_actors.__all__:
        assert getattr(rl_actors, name) is not None


@pytest.mark.parametrize("client", ["TrainerClient", "GeneratorClient"])
def test_the_api_page_lists_every_call_of_a_client_and_no_other(client):
    table = DOCS["api.md"].split(f"## Calls on `{client}`")[1].split("\n## ")[0]
    first_cells = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    methods = inspect.getmembers(getattr(rl_actors, client), inspect.isfunction)
    assert set(re.findall(r"`(\w+)\(", first_cells)) == {name for name, _ in methods if not name.startswith("_")}


@pytest.mark.parametrize("name", LOSSES)
def test_the_metrics_page_explains_what_a_loss_reports(name):
    loss = LOSSES[name]()
    if name != "cross_entropy":
        options = {"kl": rl_actors.KL(coefficient=0.1), "correction": rl_actors.IcePop(), "entropy_coefficient": 0.1}
        loss = LOSSES[name](**options)
    required, optional = columns_of(loss)
    columns = {column: torch.full((1, 4), -1.0) for column in required | optional if not column.startswith("target")}
    _, reported = loss(torch.full((1, 4), -1.0), **columns)
    assert len(reported) > 1
    for metric in reported:
        assert f"`{metric}`" in DOCS["metrics.md"], metric


def test_the_metrics_page_explains_every_name_that_a_controller_writes():
    rooms = ("*.py", "algorithms/*.py", "rollouts/*.py", "run/*.py", "observe/logger.py")
    source = "\n".join(path.read_text() for room in rooms for path in (ROOT / "controllers").glob(room))
    written = set(KEYS) | set(re.findall(r'"([a-z_]+/[a-z_]+)"', source))
    written |= {f"time/{name}" for name in re.findall(r'timer\("(\w+)"\)', source)}
    assert len(written) > len(KEYS)
    assert sorted(name for name in written if key_of(name) is None) == []


def test_the_metrics_page_explains_every_metric_of_the_table_and_no_other():
    rows = re.findall(r"^\| (`.*?) \|(.*)\|$", DOCS["metrics.md"].split("## Metrics of a call")[0], re.MULTILINE)
    names = [name for first, _ in rows for name in re.findall(r"`([^`]+)`", first)]
    assert sorted(names) == sorted(METRICS)
    every_step = DOCS["metrics.md"].split("## Metrics that only some steps have")[0]
    of_every_step = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`.*?) \|", every_step, re.MULTILINE)))
    assert set(of_every_step) == {"step", "phase", *KEYS}


def test_every_make_target_of_a_page_exists():
    makefile = (ROOT / "Makefile").read_text()
    pages = "\n".join([README, CONTRIBUTING, *DOCS.values()])
    for target in set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", pages, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{name}" for name in DOCS)])
def test_every_relative_link_of_a_page_leads_to_an_existing_path(page):
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
        assert target.startswith("https://") or (folder / target).exists(), target


def heading_links(page: Path) -> set[str]:
    """What GitHub puts after "#" in the links to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{name}" for name in DOCS)])
def test_every_link_to_a_heading_leads_to_an_existing_heading(page):
    path = ROOT / page
    for target, heading in re.findall(r"\]\(((?!https://)[^)#]*)#([^)]+)\)", path.read_text()):
        linked = path.parent / target if target else path
        assert heading in heading_links(linked), f"{target}#{heading}"


def test_the_readme_names_every_page():
    assert set(re.findall(r"\]\(docs/(\w+\.md)\)", README)) == set(DOCS)


# map.md, upstream.md and the table of speed.md are generated.
WRITTEN = {name: text for name, text in DOCS.items() if name not in ("map.md", "upstream.md")}


def test_the_pages_are_short():
    assert len(README.encode()) <= 10_000
    above, _, rest = WRITTEN["speed.md"].partition("<!-- table of benchmarks")
    written = {**WRITTEN, "speed.md": above + rest.partition("<!-- end of the table -->")[2]}
    assert sum(len(text.encode()) for text in written.values()) <= 130_000


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{name}" for name in WRITTEN)])
def test_no_line_is_long_outside_tables_and_code(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 200 and not line.startswith("|")] == []


def test_the_map_is_as_its_script_writes_it():
    script = subprocess.run([sys.executable, str(ROOT / "scripts/map.py"), "--check"], cwd=ROOT)
    assert script.returncode == 0, "docs/map.md is old: python scripts/map.py"


def test_each_stop_of_the_tour_quotes_only_code_of_its_file():
    tour = CONTRIBUTING.split("## A tour")[1].split("\n## ")[0]
    stops = re.split(r"^\d\. `([\w/.]+\.py)`: ", tour.split("On the way back")[0], flags=re.MULTILINE)[1:]
    assert len(stops) == 2 * 5
    for path, text in zip(stops[::2], stops[1::2], strict=True):
        source = (ROOT / path).read_text()
        shown = re.findall(r"`([^`]+)`", text)
        assert shown and [code for code in shown if code not in source] == [], path
