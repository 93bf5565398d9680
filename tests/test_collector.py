"""Tests of Python's garbage collector in processes that this package spawns and in other processes. Also tests how a
process that this package spawned ends.

Every test except the last starts a process."""

import os
import subprocess
import sys

import pytest
from monarch.actor import default_bootstrap_cmd
from waiting import GUARD

from rl_actors.processes.spawn import BOOTSTRAP

MODULE = """
import gc, sys
print("module", gc.isenabled(), __name__, sys.argv[1:])
from rl_actors.processes import collector
collector.keep()
print("kept", gc.isenabled(), gc.get_freeze_count() > 0)
with collector.importing():
    print("importing", gc.isenabled())
    before = gc.get_freeze_count()
    objects = [[] for _ in range(10_000)]
print("imported", gc.isenabled(), gc.get_freeze_count() >= before + 10_000)
"""
ENDING = """
import atexit, sys, threading, time

class Kept:
    def __del__(self):
        print("taken apart")

sys.kept = Kept()
atexit.register(print, "exit handler")

def work():
    time.sleep(0.2)
    print("thread")

threading.Thread(target=work).start()
print("module")
"""


@pytest.fixture
def output(tmp_path):
    path = os.pathsep.join([str(tmp_path), *sys.path])

    def run(arguments: list[str], environment: dict[str, str], module: str = MODULE, status: int = 0) -> list[str]:
        (tmp_path / "started_module.py").write_text(module)
        inherited = {name: value for name, value in os.environ.items() if name != "RL_ACTORS_PROCESS"}
        run = subprocess.run(
            [sys.executable, *arguments],
            env={**inherited, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=GUARD,
        )
        assert run.returncode == status, run.stderr
        return run.stdout.splitlines()

    return run


def test_our_process_collects_no_garbage_while_it_starts_or_imports_and_later_collections_skip_the_modules(output):
    command = ["-c", BOOTSTRAP, "-m", "started_module"]
    assert output(command, {"RL_ACTORS_PROCESS": "trainer-0"}) == [
        "module False __main__ []",
        "kept True True",
        "importing False",
        "imported True True",
    ]


def test_the_collector_of_another_programs_process_is_not_changed(output):
    assert output(["-m", "started_module"], {}) == [
        "module True __main__ []",
        "kept True False",
        "importing True",
        "imported True False",
    ]


@pytest.mark.parametrize(
    ("last_line", "status"),
    [("", 0), ("sys.exit(3)", 3), ("sys.exit()", 0), ("sys.exit('text')", 1), ("raise ValueError", 1)],
)
def test_our_process_ends_after_its_threads_and_exit_handlers_and_deletes_no_objects(output, last_line, status):
    command = ["-c", BOOTSTRAP, "-m", "started_module"]
    lines = output(command, {"RL_ACTORS_PROCESS": "trainer-0"}, ENDING + last_line, status)
    assert lines == ["module", "thread", "exit handler"]


def test_monarch_starts_a_process_with_python_m():
    assert default_bootstrap_cmd().args[0] == "-m" and len(default_bootstrap_cmd().args) == 2
