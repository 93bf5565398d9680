"""benchmarks/drills.py: what a round draws and how the table reads; rounds with real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.drills import KINDS, draw_round, table

ROOT = Path(__file__).parents[1]


def test_a_round_depends_only_on_its_number_and_the_kinds_take_turns():
    draws = [draw_round(number, 7, KINDS, ("grpo", "ppo"), ("sync", "async")) for number in range(60)]
    assert draws == [draw_round(number, 7, KINDS, ("grpo", "ppo"), ("sync", "async")) for number in range(60)]
    assert [each.kind for each in draws[:6]] == list(KINDS)
    assert all(each.loop == "ppo" for each in draws if each.kind == "critic")
    assert {each.sent for each in draws} == {"kill", "stop"}
    assert 20 <= sum(bool(each.second) for each in draws) <= 40


def test_the_table_has_the_seconds_of_rounds_with_one_death():
    line = {"kind": "trainer", "sent": "kill", "second": "", "faults": [], "seconds": 10.0}
    lines = [line, line | {"seconds": 30.0}, line | {"seconds": 99.0, "second": "trainer"}, line | {"faults": ["x"]}]
    [_, row] = table(lines).splitlines()
    assert row.split() == ["trainer", "kill", "4", "3", "10.0", "30.0", "40"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainer", "critic", "store"])
def test_a_run_whose_process_is_killed_ends_as_the_undisturbed_one(tmp_path, kind):
    arguments = ["--rounds", "1", "--kinds", kind, "--modes", "sync", "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks", "drills", *arguments]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [line] = map(json.loads, (tmp_path / "drills.jsonl").read_text().splitlines())
    assert line["faults"] == [] and line["causes"]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0 and "round 0" not in again.stdout  # the round is not carried out twice
