"""The rows of the benchmarks: listed, measured where they are missing, and laid out as the README's table. No engine starts here."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import wait_until

from benchmarks import __main__
from benchmarks.harness import missing, register, results, table
from benchmarks.harness.register import TABLE, TableRow
from benchmarks.harness.rows import ROWS, RUNS
from benchmarks.harness.table import H200
from configs import CONFIGS

ROOT = Path(__file__).parents[1]
# Measured with this in the place of `python -m benchmarks`: NAME ... appends a line each, and a note that it ran.
FAKE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from benchmarks.harness import results
_, *names = sys.argv[1:]
if places := os.environ["CUDA_VISIBLE_DEVICES"]:
    results.gpus = lambda: ("NVIDIA H200",) * len(places.split(","))
for name in names:
    (results.FOLDER / f"places-{name}").write_text(places)
    while name.startswith("meets") and len(list(results.FOLDER.glob("places-meets*"))) < 2:
        time.sleep(0.05)
    with (results.FOLDER / "ran").open("a") as file:
        file.write(name + " ")
    if name.startswith("stubborn"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)", str(results.FOLDER)])
        (results.FOLDER / f"began-{name}").touch()
        time.sleep(60)
    if name == "slow" and not (results.FOLDER / "quick").exists():
        time.sleep(60)
    if name == "broken" and not (results.FOLDER / "mended").exists():
        sys.exit(3)
    if name != "silent":
        results.add("fake", name, {"ratio": 0.5, "tokens_per_second": 50.0, "engine_tokens_per_second": 100.0})
"""
# `missing` with fake rows of these names, in a process of its own.
DRIVER = """
import sys
from benchmarks.harness import missing, register
folder, *names = sys.argv[1:]
fakes = {
    name: register.TableRow(what="", num_gpus=0, command=("fake", name), line=name, measured=register._beside) for name in names
}
missing.PYTHON = [sys.executable, "-S", folder + "/fake.py"]
missing.TABLE.clear()
missing.TABLE.update(fakes)
sys.argv = ["missing"]
missing.main()
"""


def fake_rows(*names: str, num_gpus: int = 0) -> dict[str, TableRow]:
    """Rows of the same process are written a+b."""
    return {
        line: TableRow(
            what="fake",
            num_gpus=num_gpus,
            command=("fake",) if "+" in name else ("fake", line),
            argument=line if "+" in name else "",
            line=line,
            measured=register._beside,
        )
        for name in names
        for line in name.split("+")
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of results, on a machine without GPUs, where `fake.py` measures."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(results, "gpus", tuple)
    monkeypatch.setattr(missing, "PYTHON", [sys.executable, "-S", str(tmp_path / "fake.py")])
    monkeypatch.setenv("RL_ACTORS_RESULTS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of fake.py
    return tmp_path


@pytest.fixture
def rows(monkeypatch):
    def put(made: dict[str, TableRow]) -> None:
        monkeypatch.setattr(table, "TABLE", made)
        monkeypatch.setattr(missing, "TABLE", made)
        monkeypatch.setattr(__main__, "TABLE", made)

    return put


def keep(folder: Path, benchmark: str, name: str, device: str, date: str = "2026-01-01T00:00:00+00:00", **figures):
    with (folder / f"{benchmark}.jsonl").open("a") as file:
        file.write(json.dumps({"name": name, "device": device, "date": date, **figures}) + "\n")


def ran(folder: Path) -> list[str]:
    return (folder / "ran").read_text().split() if (folder / "ran").exists() else []


def test_every_row_is_one_of_a_benchmark_that_is_there():
    modules = __main__.benchmarks(ROOT / "benchmarks")
    assert not TABLE.keys() & modules.keys()
    assert TABLE.keys() >= ROWS.keys()
    for name, row in TABLE.items():
        assert all(part in TABLE for part in row.quotient_of), name
        assert bool(row.command) != bool(row.quotient_of), name
        assert not row.command or row.command[0] in modules, name


def test_every_config_of_a_gpu_has_a_short_run_on_as_many_gpus_as_it_takes():
    configs = {name: make() for name, make in CONFIGS["controllers.grpo"].items() if name.startswith("qwen3")}
    taken = {
        name: max(config.trainer.parallelism.data_parallel_shard_degree, config.generator.gpu + 1)
        for name, config in configs.items()
    }
    assert {name: count for name, count in RUNS.items() if count} == taken


def test_the_list_says_of_every_row_what_it_needs_and_loads_no_torch():
    program = (
        "import sys; sys.argv[1:] = []; from benchmarks import __main__; __main__.main(); print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    *listed, torch_is_loaded = run.stdout.splitlines()
    assert torch_is_loaded == "False", run.stderr
    needs = {line.split()[0]: line for line in listed if line.strip()}
    for name, row in TABLE.items():
        assert row.needs in needs[name], name


def test_the_list_counts_results_of_this_kind_of_machine_alone(folder, rows, monkeypatch):
    rows({**fake_rows("a", "b"), **fake_rows("g", num_gpus=1), **fake_rows("h", num_gpus=4)})
    keep(folder, "fake", "a", "2 x NVIDIA H200", ratio=0.1)
    keep(folder, "fake", "b", "64 cores of x86_64", ratio=0.25)
    keep(folder, "fake", "g", "8 x NVIDIA H200", ratio=0.75)
    _, *on_a_cpu = (line.split()[:5] for line in __main__.rows())
    assert on_a_cpu[0][:3] == ["a", "CPU", "missing"]
    assert on_a_cpu[1][:4] == ["b", "CPU", "measured", "0.250"]
    assert on_a_cpu[2] == ["g", "1", "GPU", "-", "0.750"]
    monkeypatch.setattr(results, "gpus", lambda: ("NVIDIA H100",) * 2)
    _, *on_two_gpus = (line.split()[:4] for line in __main__.rows())
    assert [line[1:] for line in on_two_gpus] == [
        ["CPU", "-", "not"],
        ["CPU", "-", "0.250"],
        ["1", "GPU", "missing"],  # an H200 is no H100
        ["4", "GPUs", "-"],
    ]


def test_missing_are_the_rows_without_a_result_of_this_kind_of_machine(folder, rows, monkeypatch):
    rows({**fake_rows("a", "b"), **fake_rows("g", num_gpus=1), **fake_rows("h", num_gpus=4)})
    keep(folder, "fake", "a", "1 x NVIDIA H200", ratio=0.1)
    keep(folder, "fake", "b", "2 cores of x86_64", ratio=0.25)
    keep(folder, "fake", "g", "2 cores of x86_64", ratio=0.25)
    assert missing.missing(table.TABLE) == ["a"]
    assert missing.missing(table.TABLE, since="2026-01-02") == ["a", "b"]
    monkeypatch.setattr(results, "gpus", lambda: (H200,) * 2)
    assert missing.missing(table.TABLE) == ["g"]
    keep(folder, "fake", "g", "1 x NVIDIA H200", error="RuntimeError: out of memory")
    assert missing.missing(table.TABLE) == ["g"]
    keep(folder, "fake", "g", "1 x NVIDIA H200", ratio=0.25)
    assert missing.missing(table.TABLE) == []


def test_a_row_that_fails_does_not_end_the_table_and_is_run_again(folder, rows, capsys):
    rows(fake_rows("a", "broken", "silent", "b"))
    assert missing.run(missing.missing(table.TABLE)) == 1
    assert ran(folder) == ["a", "broken", "silent", "b"]
    out = capsys.readouterr().out
    assert "failed: broken, silent" in out and "a: ratio 0.500" in out and "broken: not run" in out
    (folder / "mended").touch()
    rows(fake_rows("a", "broken", "b"))
    assert missing.run(missing.missing(table.TABLE)) == 0
    assert ran(folder) == ["a", "broken", "silent", "b", "broken"]
    assert missing.missing(table.TABLE) == []


def test_rows_of_one_process_are_run_by_one_and_only_the_missing_ones(folder, rows):
    rows(fake_rows("a+b+c", "d"))
    keep(folder, "fake", "b", "2 cores of x86_64", ratio=0.25)
    assert missing.run(missing.missing(table.TABLE)) == 0
    assert ran(folder) == ["a", "c", "d"]


def test_no_row_is_begun_after_the_time_and_none_takes_longer_than_its_own(folder, rows, capsys):
    rows(fake_rows("slow", "a"))
    assert missing.run(["slow"], timeout=2) == 1
    assert "stopped after 2 s" in capsys.readouterr().out
    assert missing.run(["a"], until=time.monotonic() - 1) == 0
    assert "not begun: a" in capsys.readouterr().out
    assert "a" not in ran(folder)


def test_rows_side_by_side_have_gpus_of_their_own_and_wait_for_as_many_as_they_take(folder, rows, monkeypatch, capsys):
    monkeypatch.setattr(results, "gpus", lambda: (H200,) * 2)
    monkeypatch.setattr(missing, "OUTPUTS", folder / "outputs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    rows(
        {
            **fake_rows("meets-a", "meets-b", num_gpus=1),
            **fake_rows("wide", num_gpus=2),
            **fake_rows("broken", num_gpus=1),
        }
    )
    names = ["meets-a", "meets-b", "wide", "broken"]
    assert missing.run(names, timeout=60, side_by_side=True) == 1
    assert ran(folder) in (names, ["meets-b", "meets-a", "wide", "broken"])
    assert [(folder / f"places-{name}").read_text() for name in names] in (
        ["4", "7", "4,7", "4"],
        ["4", "7", "7,4", "7"],
    )
    assert "failed: broken" in capsys.readouterr().out
    assert "meets-b: ratio 0.5" in (folder / "outputs" / "meets-b.log").read_text()


def commands() -> Iterator[str]:
    """The command lines of all processes."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield file.read_text(errors="replace").replace("\0", " ")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_broken_off_table_leaves_no_process_and_goes_on_where_it_stopped(folder, sent):
    (folder / "driver.py").write_text(DRIVER)
    command = [sys.executable, "-S", str(folder / "driver.py"), str(folder), "a", "slow", "b"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    broken = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: "slow" in ran(folder) or broken.poll() is not None, 30)
    assert broken.poll() is None
    broken.send_signal(sent)
    out, _ = broken.communicate(timeout=60)
    ended = (-signal.SIGKILL, False) if sent == signal.SIGKILL else (130, True)
    assert (broken.returncode, "goes on from there" in out) == ended
    wait_until(lambda: not any(str(folder / "fake.py") in command for command in commands()), 30)
    (folder / "quick").touch()
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stdout + again.stderr
    assert ran(folder) == ["a", "slow", "slow", "b"]


def test_rows_that_do_not_stop_are_killed_at_the_same_time_with_what_they_started(folder, rows, monkeypatch, capsys):
    monkeypatch.setattr(results, "gpus", lambda: (H200,) * 2)
    monkeypatch.setattr(missing, "OUTPUTS", folder / "outputs")
    monkeypatch.setattr(missing, "GRACE", 3.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    rows(fake_rows("stubborn-a", "stubborn-b", num_gpus=1))
    assert missing.run(["stubborn-a", "stubborn-b"], timeout=4, side_by_side=True) == 1
    told = [
        line.split(": ")[1].split()[0]
        for line in capsys.readouterr().out.splitlines()
        if ": stopped" in line or ": exit" in line
    ]
    assert told == ["stopped", "stopped", "exit", "exit"]  # none waits for the other's grace
    wait_until(lambda: not any(str(folder) in command for command in commands()), 60)


def test_a_second_interrupt_kills_what_did_not_stop_at_the_first(folder):
    (folder / "driver.py").write_text(DRIVER)
    command = [sys.executable, "-S", str(folder / "driver.py"), str(folder), "stubborn"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    broken = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    wait_until((folder / "began-stubborn").exists, 60)
    broken.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        broken.wait(2)
    broken.send_signal(signal.SIGINT)
    out, _ = broken.communicate(timeout=20)
    assert broken.returncode == 130 and "goes on from there" in out
    wait_until(lambda: not any(str(folder) in command for command in commands()), 60)


def test_a_row_with_changed_fields_is_no_result_of_the_row(monkeypatch):
    from benchmarks import trainer_speed

    ran = []
    monkeypatch.setattr(trainer_speed, "run_row", lambda name, row, **_: ran.append((name, row)))
    changes = ["--attention", "flex", "--checkpointing", "selective"]
    monkeypatch.setattr(sys, "argv", ["trainer_speed", "0_6b-packed", "4b-packed", *changes])
    trainer_speed.main()
    changed = [replace(ROWS[name], attention="flex") for name in ("0_6b-packed", "4b-packed")]
    assert ran == [("0_6b-packed, attention flex", changed[0]), ("4b-packed, attention flex", changed[1])]


def test_a_short_run_is_judged_by_its_worst_update():
    from benchmarks import runs

    update = {"reward/mean": 0.5, "logprob_diff/mean": 1e-3, "logprob_diff/max": 0.1, "kl/policy_generator": 1e-5}
    update |= {"time/generate": 1.0, "time/train": 9.0, "time/sync": 2.0}
    other = update | {"logprob_diff/mean": 3e-2, "time/train": 0.5}
    figures = runs.figures({"time/step": 20.0}, [update, other])
    assert (figures["updates"], figures["difference_mean"], figures["train_seconds"]) == (2, 3e-2, 0.5)
    row = TABLE["run-qwen3_0_6b"]
    assert table.verdict(row, figures) == "misses difference mean"
    assert table.verdict(row, figures | {"difference_mean": 1e-3}) == "yes"


def test_a_quotient_runs_its_rows_and_is_of_their_speeds(folder, rows, capsys):
    quotient = TableRow(
        what="", num_gpus=0, measured=register._quotient, at_least={"ratio": 1.2}, quotient_of=("a", "b")
    )
    rows({**fake_rows("a", "b"), "q": quotient})
    assert missing.missing(table.TABLE) == ["a", "b"]
    assert missing.run(["q"]) == 0
    assert ran(folder) == ["a", "b"]
    assert "q: ratio 1.000; target ≥ 1.2: misses ratio" in capsys.readouterr().out


def test_a_row_may_ask_for_a_flag():
    row = TableRow(what="", num_gpus=0, command=("fake",), line="a", measured=str, at_least={"bit_equal": True})
    assert table.target(row) == "bit equal"
    assert table.verdict(row, {"bit_equal": True}) == "yes"
    assert table.verdict(row, {"bit_equal": False}) == "misses bit equal"


def test_a_row_that_this_machine_cannot_run_is_refused_by_name(folder, rows):
    rows({**fake_rows("a"), **fake_rows("g", num_gpus=2)})
    with pytest.raises(SystemExit, match="g needs 2 GPUs; here is no GPU"):
        missing.run(["a", "g"])
    assert ran(folder) == []


def test_the_table_says_what_is_met_what_misses_and_what_was_not_run(folder, rows):
    met, missed, nan = (fake_rows(name, num_gpus=1)[name] for name in ("met", "missed", "nan"))
    for row in (met, missed, nan):
        row.at_least["ratio"] = 0.98
        row.at_least["tokens_per_second"] = 1000
    rows({"met": met, "missed": missed, "nan": nan, **fake_rows("cpu", "bare")})
    speeds = {"tokens_per_second": 1200.0, "reference_tokens_per_second": 1000.0}
    keep(folder, "fake", "met", "2 x NVIDIA H200", ratio=0.5, **speeds)
    keep(folder, "fake", "met", "2 x NVIDIA H200", ratio=1.2, **speeds)  # the newest counts
    keep(folder, "fake", "met", "2 cores of x86_64", ratio=0.1, **speeds)  # no GPU
    keep(folder, "fake", "nan", "1 x NVIDIA H200", ratio=float("nan"), **speeds)
    keep(folder, "fake", "cpu", "2 cores of x86_64", ratio=0.3, **speeds)
    head, _, *lines = ([cell.strip() for cell in row.split("|")[1:-1]] for row in table.markdown().splitlines())
    cells = [dict(zip(head, line, strict=True)) for line in lines]
    assert [line["meets it"] for line in cells] == ["yes", "not run", "misses ratio", "", "not run"]
    assert cells[0] == {
        "row": "`met`",
        "what": "fake",
        "measured": "1,200 beside 1,000 tokens/s",
        "ratio": "1.200",
        "target": "≥ 0.98, tokens/s ≥ 1,000",
        "meets it": "yes",
        "device, date": "2 x NVIDIA H200, 2026-01-01",
        "again": "`make bench ROW=met`",
    }
    assert cells[1]["device, date"] == "needs 1 GPU" and cells[3]["device, date"] == "2 cores of x86_64, 2026-01-01"


def test_the_readme_has_the_table_that_the_results_give(monkeypatch):
    monkeypatch.setattr(results, "FOLDER", ROOT / "benchmarks" / "results")
    shown = (ROOT / "README.md").read_text().partition(table.MARKS[0])[2].partition(table.MARKS[1])[0]
    assert shown == table.markdown(), "python -m benchmarks table --write puts it there"


def test_a_table_is_written_between_its_marks_and_nowhere_else(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"above\n{table.MARKS[0]}old\n{table.MARKS[1]}below\n")
    table.write(page)
    assert page.read_text() == f"above\n{table.MARKS[0]}{table.markdown()}{table.MARKS[1]}below\n"
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="lacks the marks"):
        table.write(page)
    assert page.read_text() == "no marks"
