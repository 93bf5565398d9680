"""The benchmark of a run's start finds how long each part took. The benchmark watches the files that the run writes.

In these tests a short program that writes such files stands for the run.
"""

import sys

import pytest

from benchmarks import startup
from controllers.observe.run_folder import RunFolder

RUN = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "logs").mkdir(parents=True)
time.sleep(0.1)
(folder / "config.json").write_text("{}")
for name in ("generator-0", "trainer-0"):
    time.sleep(0.1)
    (folder / "logs" / f"{name}.log").touch()
metrics = (folder / "metrics.jsonl").open("a", buffering=1)
time.sleep(0.3)
for accuracy in (0.25, None, 0.75, None):
    metrics.write(json.dumps({"step": 0, "time/step": 0.2, "eval/reward": accuracy}) + "\\n")
time.sleep(0.1)
"""


def test_the_seconds_of_each_part_of_a_start_are_found_from_the_files_of_the_run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    found = startup.measure([sys.executable, "-c", RUN, str(folder.path)], folder)
    assert tuple(found) == startup.PARTS
    assert found["first_step"] == 0.2
    assert found["imports"] >= 0.1
    assert found["imports"] + found["spawn"] >= 0.3
    assert found["first_line"] >= 0.6
    assert found["closing"] >= 0.1
    assert sum(found[part] for part in startup.PARTS[:4]) == pytest.approx(found["first_line"])
    assert found["seconds"] >= 0.7
    # The program ends 0.1 s after its first line. The test does not require this difference, because on a busy machine the
    # benchmark may notice the line late.
    assert found["seconds"] >= found["first_line"]
    assert startup.accuracy(folder) == 0.75


def test_a_run_that_fails_before_its_first_step_gives_no_figures(tmp_path):
    with pytest.raises(SystemExit, match="exit status 2 before its first step"):
        startup.measure([sys.executable, "-c", "raise SystemExit(2)"], RunFolder(tmp_path))
