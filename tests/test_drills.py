"""Tests of tests/drills/drills.py. Each round of this program starts a run, and kills or stops processes of the run.

A stopped process counts as dead, too. A bar is a limit of the seconds from a death to the next step. The tests check the
random choices of a round, the table of results, the bars, the search for a run's processes and shared memory, and rounds
with real processes.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest

from configs import CONFIGS
from controllers.observe.run_folder import RunFolder
from controllers.program import cli
from tests.drills import shared_memory
from tests.drills.drills import KINDS, LOOPS, MODES, Watch, draw_round, flags, missed_bars, seconds_to_next_step, table
from tests.drills.resume import MARKER, Controller

ROOT = Path(__file__).parents[1]


def test_the_same_seed_and_number_draw_the_same_round_and_the_kinds_take_turns():
    draws = [draw_round(number, 7, KINDS, ("grpo", "ppo"), ("sync", "async")) for number in range(60)]
    assert draws == [draw_round(number, 7, KINDS, ("grpo", "ppo"), ("sync", "async")) for number in range(60)]
    assert [each.kind for each in draws[:6]] == list(KINDS)
    assert all(each.loop == "ppo" for each in draws if each.kind == "critic")
    assert {each.sent for each in draws} == {"kill", "stop"}
    assert 20 <= sum(bool(each.second) for each in draws) <= 40


@pytest.mark.parametrize("kind", KINDS)
def test_the_controller_accepts_the_flags_of_every_kind_of_round(kind, tmp_path):
    args = argparse.Namespace(seed=7, ranks=2, silent_after=25.0)
    for loop, mode in itertools.product(LOOPS, MODES):
        module = f"controllers.{loop}"
        arguments = [str(each) for each in flags(loop, mode, kind, args)]
        config = cli.parse(module, CONFIGS[module], [*arguments, "--output-dir", str(tmp_path / "run")]).config
        assert (config.seed, config.survival.silent_after) == (7, 25.0)
        assert (config.generator.own_process is True) == (kind == "engine")
        assert (config.transport == "memory") == (kind == "store")


LINE = {"kind": "trainer", "sent": "kill", "second": "", "after_step": 3, "faults": [], "seconds": 10.0, "start": 20.0}


def test_the_table_separates_rounds_with_one_death_two_deaths_and_a_death_during_the_start():
    others = [LINE | {"seconds": 99.0, "second": "trainer"}, LINE | {"seconds": 89.0, "second": "critic"}]
    others.append(LINE | {"seconds": 70.0, "start": None, "after_step": -1})
    [_, row] = table([LINE, LINE | {"seconds": 30.0}, *others, LINE | {"faults": ["x"]}], 20.0).splitlines()
    assert row.split() == [
        "trainer",
        "kill",
        "6",
        "5",
        "0.50,",
        "1.50",
        "10.0,",
        "30.0",
        "94.0,",
        "99.0",
        "70.0,",
        "70.0",
    ]


def test_the_silence_after_which_a_stopped_process_counts_as_dead_is_no_part_of_its_recovery():
    [_, row] = table([LINE | {"sent": "stop", "kind": "engine", "seconds": 40.0}], 25.0).splitlines()
    assert row.split() == ["engine", "stop", "1", "1", "0.75,", "0.75", "40.0,", "40.0", "-,", "-", "-,", "-"]


def test_a_missed_bar_is_named_and_rounds_with_two_deaths_or_a_death_during_the_start_have_no_bar():
    assert missed_bars([LINE, LINE | {"seconds": 39.0}, LINE | {"seconds": 20.0}], 20.0) == []
    assert missed_bars([LINE | {"seconds": 99.0, "second": "critic"}], 20.0) == []
    assert missed_bars([LINE | {"seconds": 99.0, "start": None, "after_step": -1}], 20.0) == []
    late = [LINE | {"seconds": 21.0}, LINE | {"seconds": 41.0}, LINE | {"kind": "engine", "seconds": 20.5}]
    assert missed_bars(late, 20.0) == [
        "trainer kill: the median is 1.55 of the start, the bar 1.00",
        "trainer kill: the worst is 2.05 of the start, the bar 2.00",
        "engine kill: the median is 1.02 of the start, the bar 1.00",
    ]
    stopped = LINE | {"sent": "stop"}
    assert missed_bars([stopped | {"seconds": 39.0}], 20.0) == []
    assert missed_bars([stopped | {"seconds": 41.0}], 20.0) == [
        "trainer stop: the median is 1.05 of the start, the bar 1.00"
    ]


def test_seconds_to_next_step_come_from_the_line_of_the_restart_or_else_from_the_next_recorded_step():
    moment = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    died = {"restart": "generator-0", "time": "2026-01-01T00:00:01.000+00:00"}
    earlier = {"restart": 1, "time": "2025-12-31T23:59:00.000+00:00", "seconds": 9.0}
    steps = [(moment - 1, 3), (moment + 2, 4), (moment + 12, 5)]
    assert seconds_to_next_step([earlier, died | {"seconds": 8.0}], steps, moment) == 9.0
    cut_short = died | {"seconds": None}
    assert seconds_to_next_step([cut_short, died | {"seconds": 19.0}], steps, moment) == 20.0
    assert seconds_to_next_step([earlier], steps, moment) == 2.0  # no record of a restart belongs to this death
    assert seconds_to_next_step([earlier], steps[:1], moment) is None


# A program that makes a segment of shared memory, which is a file in /dev/shm. The first argument is the file's name.
# The second argument says how the program holds the file: "mapped" or "open".
MAKES_SEGMENT = """
import mmap, sys
file = open("/dev/shm/" + sys.argv[1], "w+b")
file.truncate(4096)
if sys.argv[2] == "mapped":
    memory = mmap.mmap(file.fileno(), 4096)
    file.close()
print("made", flush=True)
sys.stdin.read()
"""


class RunWithSegments(Controller):
    """A run without a controller. Every program whose environment has the mark counts as a process of this run."""

    def __init__(self, mark: str) -> None:
        self.mark, self.seen = mark, set()


def test_only_shared_memory_of_the_run_counts_as_left_behind(tmp_path):
    mark = uuid.uuid4().hex
    names = {f"drills-{mark}-{use}": (use, {MARKER: mark}) for use in ("mapped", "open")}
    names[f"drills-{mark}-other"] = ("mapped", {})
    before = Path(f"/dev/shm/drills-{mark}-before")
    before.touch()
    watch = Watch(RunWithSegments(mark), RunFolder(tmp_path))
    programs = []
    try:
        for name, (use, environment) in names.items():
            command = [sys.executable, "-S", "-c", MAKES_SEGMENT, name, use]
            program = subprocess.Popen(
                command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            programs.append(program)
            assert program.stdout.readline() == b"made\n"
        watch.look()
        assert shared_memory.left_behind(watch.segments) == []  # running processes still use these segments
        for program in programs:
            program.kill()
            program.wait(60)
        assert shared_memory.left_behind(watch.segments) == [f"drills-{mark}-mapped", f"drills-{mark}-open"]
    finally:
        for program in programs:
            program.kill()
        for path in Path("/dev/shm").glob(f"drills-{mark}-*"):
            path.unlink()
    assert shared_memory.left_behind(watch.segments) == []


def test_a_child_without_the_mark_of_the_run_is_still_found_after_its_parent_has_ended():
    mark = uuid.uuid4().hex
    run = RunWithSegments(mark)
    program = (
        "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'import sys; sys.stdin.read()'], env={})"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program], env=os.environ | {MARKER: mark}, stdin=subprocess.PIPE
    ) as parent:
        while len(found := run.processes()) < 2:
            assert parent.poll() is None
        assert found[0].pid == parent.pid and found[1].environ() == {}
        parent.kill()
        parent.wait(60)
        assert run.processes() == [found[1]]
    found[1].wait(60)  # the child ends, because its standard input has been closed
    assert run.processes() == []


def test_a_watch_notes_a_step_again_if_the_run_repeats_it_after_a_recovery(tmp_path):
    folder = RunFolder(tmp_path)
    watch = Watch(RunWithSegments(uuid.uuid4().hex), folder)
    for last in (0, 1, 2, 1, 2):
        lines = [json.dumps({"step": step, "phase": "grpo" if step else "start"}) for step in range(last + 1)]
        folder.metrics.write_text("\n".join(lines) + "\n")
        watch.look()
    assert [step for _, step in watch.steps] == [1, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainer", "critic", "store", "engine"])
def test_a_run_with_a_killed_or_stopped_process_ends_like_the_undisturbed_run(tmp_path, kind):
    arguments = ["--rounds", "1", "--kinds", kind, "--modes", "sync", "--without-bars", "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "tests.drills.drills", *arguments]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [line] = map(json.loads, (tmp_path / "drills.jsonl").read_text().splitlines())
    assert line["faults"] == [] and line["causes"]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0 and "round 0" not in again.stdout  # the second command does not repeat the round
