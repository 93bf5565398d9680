"""A process writes its output and its log lines to a file. A prefix or a label marks lines that also go to the terminal."""

import os
import subprocess
import sys
from pathlib import Path

from waiting import GUARD

from rl_actors.processes.output import LOG_VARIABLE

ROOT = Path(__file__).parents[1]
WRITES = """
import ctypes, os, subprocess, sys
print("from python")
print("to stderr", file=sys.stderr)
os.write(1, b"from os.write\\n")
ctypes.CDLL(None).puts(b"from C")
subprocess.run([sys.executable, "-c", "print('from a child')"])
"""
WORDS = ["from python", "to stderr", "from os.write", "from C", "from a child"]


def run_python(code: str, log: Path) -> subprocess.CompletedProcess:
    header = f"from rl_actors.processes.output import route_logs, RoutedOutput\nlog = {str(log)!r}\n"
    return subprocess.run(
        [sys.executable, "-c", header + code], cwd=ROOT, capture_output=True, text=True, timeout=GUARD
    )


def test_routed_output_of_python_of_c_and_of_children_is_in_the_file_and_nowhere_else(tmp_path):
    done = run_python("RoutedOutput(log)\n" + WRITES, tmp_path / "logs" / "trainer-0.log")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    lines = (tmp_path / "logs" / "trainer-0.log").read_text().splitlines()
    assert sorted(lines) == sorted(WORDS)


def test_teed_output_has_the_prefix_on_the_terminal_and_not_in_the_file(tmp_path):
    log = tmp_path / "trainer-0.log"
    log.write_text("from an earlier run\n")
    done = run_python("RoutedOutput(log, tee_prefix='[trainer 0] ')\n" + WRITES, log)
    assert sorted(done.stderr.splitlines()) == sorted(f"[trainer 0] {word}" for word in WORDS)
    assert sorted(log.read_text().splitlines()) == sorted([*WORDS, "from an earlier run"])


def test_output_before_an_abort_is_in_the_file(tmp_path):
    log = tmp_path / "trainer-0.log"
    code = "RoutedOutput(log, tee_prefix='x ')\nimport os\nprint('last words')\nos.abort()"
    assert run_python(code, log).returncode != 0
    assert log.read_text() == "last words\n"


def test_the_stream_terminal_writes_to_the_original_stdout_and_the_end_of_the_block_restores_stdout(tmp_path):
    log = tmp_path / "controller.log"
    code = """
print("before")
with RoutedOutput(log) as routed:
    print("routed")
    print("shown", file=routed.terminal)
print("after")
routed.restore()
"""
    done = run_python(code, log)
    assert done.stdout.splitlines() == ["before", "shown", "after"], done.stderr
    assert log.read_text() == "routed\n"


LOGGING = """
import logging, sys, warnings
library = logging.getLogger("library")
library.addHandler(logging.StreamHandler())
library.propagate = False
route_logs(log, label="controller", verbose=VERBOSE)
library.warning("a library speaks")
warnings.warn("a warning")
"""


def test_logging_and_warnings_go_only_to_the_file(tmp_path):
    log = tmp_path / "logs" / "controller.log"
    done = run_python(LOGGING.replace("VERBOSE", "False"), log)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "WARNING library: a library speaks" in log.read_text()
    assert "a warning" in log.read_text()


def test_verbose_logging_has_the_label_on_the_terminal(tmp_path):
    done = run_python(LOGGING.replace("VERBOSE", "True"), tmp_path / "controller.log")
    assert done.stderr.startswith("[controller] ")
    assert done.stderr.count("a library speaks") == 1
    assert "a library speaks" in (tmp_path / "controller.log").read_text()


LIBRARY_LINES = """
import logging, os, warnings
from rl_actors.processes.output import LOG_VARIABLE, route_library_logs

route_library_logs("trainer")
logging.getLogger("vllm.engine").warning("a library's line")
logging.getLogger("mine").warning("my line")
warnings.warn_explicit("a library's warning", UserWarning, "/venv/site-packages/vllm/x.py", 1)
warnings.warn_explicit("my warning", UserWarning, "mine.py", 1)
print(open(os.environ[LOG_VARIABLE]).read().upper())
"""


def test_in_the_process_of_another_program_only_lines_of_libraries_go_to_a_file():
    environment = {key: value for key, value in os.environ.items() if key != LOG_VARIABLE}
    command = [sys.executable, "-c", LIBRARY_LINES]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=True)
    assert "my line" in run.stderr and "my warning" in run.stderr
    assert "a library's" not in run.stderr
    assert "A LIBRARY'S LINE" in run.stdout and "A LIBRARY'S WARNING" in run.stdout
    assert "MY LINE" not in run.stdout and "MY WARNING" not in run.stdout
