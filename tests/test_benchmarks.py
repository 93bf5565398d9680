"""Tests of the rows of the benchmarks. A row is one measurement that benchmarks/harness/register.py defines.

The tests are about the list of the rows, the command that measures missing rows, the tables of rows in docs/speed.md
and the README, and the figures that some benchmarks compute from their measurements. No engine starts here."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from waiting import GUARD, wait_until

from benchmarks import __main__, ppo_step
from benchmarks.harness import register, results, table
from benchmarks.harness.register import TABLE, TableRow
from benchmarks.harness.rows import ROWS, RUNS
from benchmarks.harness.table import H200
from configs import CONFIGS

ROOT = Path(__file__).parents[1]
# A program that replaces `python -m benchmarks NAME …`. For each name it appends the name to the file "ran", and a
# result to the results. "slow" makes the program hang while there is no file "quick", until SIGINT, after which it takes
# a second to end. "broken" makes it fail while there is no file "mended". "silent" gives no result.
FAKE = """
import sys, time
from benchmarks.harness import results
results.gpus = tuple  # every result names a CPU as its device, even on a machine with GPUs
_, *names = sys.argv[1:]
for name in names:
    with (results.FOLDER / "ran").open("a") as file:
        file.write(name + " ")
    if name == "slow" and not (results.FOLDER / "quick").exists():
        try:
            time.sleep(600)
        finally:
            time.sleep(1)
            (results.FOLDER / "closed").touch()
    if name == "broken" and not (results.FOLDER / "mended").exists():
        sys.exit(3)
    if name != "silent":
        results.add("fake", name, {"ratio": 0.5, "tokens_per_second": 50.0}, "50 against 100 tokens/s")
"""
# A program that runs `python -m benchmarks missing` with fake rows. Its arguments are the folder of fake.py and the
# names of the rows.
DRIVER = """
import sys
from benchmarks import __main__
from benchmarks.harness import register, results
folder, *names = sys.argv[1:]
fakes = {name: register.TableRow(what="", num_gpus=0, command=("fake", name), line=name) for name in names}
results.gpus = tuple
__main__.PYTHON = [sys.executable, "-S", folder + "/fake.py"]
register.TABLE.clear()
register.TABLE.update(fakes)
sys.argv = ["benchmarks", "missing"]
__main__.main()
"""


def fake_rows(*names: str, num_gpus: int = 0) -> dict[str, TableRow]:
    """Fake rows by name. "a+b" stands for the rows a and b with the same command, which measures both."""
    made = {}
    for name in names:
        for line in name.split("+"):
            made[line] = TableRow(what="fake", num_gpus=num_gpus, command=("fake", *name.split("+")), line=line)
    return made


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of results on a machine without GPUs. The program that measures is FAKE."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(results, "gpus", tuple)
    monkeypatch.setattr(__main__, "PYTHON", [sys.executable, "-S", str(tmp_path / "fake.py")])
    monkeypatch.setenv("RL_ACTORS_RESULTS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


@pytest.fixture
def rows(monkeypatch):
    """rows(made) replaces the rows of the table by those in `made`."""

    def put(made: dict[str, TableRow]) -> None:
        monkeypatch.setattr(table, "TABLE", made)
        monkeypatch.setattr(__main__, "TABLE", made)

    return put


def keep(folder: Path, benchmark: str, name: str, device: str, date: str = "2026-01-01T00:00:00+00:00", **figures):
    """Append a line to the results of a benchmark."""
    figures = {"text": "1,200 against 1,000 tokens/s"} | figures
    with (folder / f"{benchmark}.jsonl").open("a") as file:
        file.write(json.dumps({"name": name, "device": device, "date": date, **figures}) + "\n")


def ran(folder: Path) -> list[str]:
    """The names that FAKE has run, in order."""
    return (folder / "ran").read_text().split() if (folder / "ran").exists() else []


def test_every_row_is_measured_by_a_program_that_exists():
    modules = __main__.programs()
    assert not TABLE.keys() & modules.keys()
    assert "missing" not in TABLE.keys() | modules.keys()
    assert TABLE.keys() >= ROWS.keys()
    for name, row in TABLE.items():
        assert all(part in TABLE for part in row.quotient_of), name
        assert bool(row.command) != bool(row.quotient_of), name
        assert not row.command or row.command[0] in modules, name
    assert TABLE.keys() >= set(register.HEADLINE)


def test_programs_are_the_benchmarks_and_the_tools_of_the_harness():
    modules = {name: module for name, (module, _) in __main__.programs().items()}
    assert modules["overhead"] == "benchmarks.overhead"
    assert modules["table"] == "benchmarks.harness.table"
    assert not modules.keys() & {"__main__", "register", "rows", "results"}
    assert all(first_line for _, first_line in __main__.programs().values())


def test_a_qwen3_config_named_by_size_has_a_short_run_on_as_many_gpus_as_the_config_uses():
    configs = {name: make() for name, make in CONFIGS["controllers.grpo"].items() if name.startswith("qwen3_")}
    taken = {
        name: max(config.trainer.parallelism.data_parallel_shard_degree, config.generator.gpu + 1)
        for name, config in configs.items()
    }
    assert {name: count for name, count in RUNS.items() if count} == taken


def test_the_list_shows_what_every_row_needs_and_loads_no_torch():
    program = (
        "import sys; sys.argv[1:] = []; from benchmarks import __main__; __main__.main(); print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=GUARD)
    *listed, torch_is_loaded = run.stdout.splitlines()
    assert torch_is_loaded == "False", run.stderr
    needs = {line.split()[0]: line for line in listed if line.strip()}
    for name, row in TABLE.items():
        assert row.needs in needs[name], name


def test_the_list_has_results_of_cpus_in_cpu_rows_and_results_of_one_kind_of_gpu_in_gpu_rows(folder, rows, monkeypatch):
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
        ["1", "GPU", "missing"],  # a result from an H200 does not count on an H100
        ["4", "GPUs", "-"],
    ]


def test_missing_rows_have_no_result_of_this_kind_of_machine(folder, rows, monkeypatch):
    rows({**fake_rows("a", "b"), **fake_rows("g", num_gpus=1), **fake_rows("h", num_gpus=4)})
    keep(folder, "fake", "a", "1 x NVIDIA H200", ratio=0.1)
    keep(folder, "fake", "b", "2 cores of x86_64", ratio=0.25)
    keep(folder, "fake", "g", "2 cores of x86_64", ratio=0.25)
    assert __main__.missing() == ["a"]
    monkeypatch.setattr(results, "gpus", lambda: (H200,) * 2)
    assert __main__.missing() == ["g"]
    keep(folder, "fake", "g", "1 x NVIDIA H200", ratio=0.25)
    assert __main__.missing() == []


def test_a_row_that_fails_does_not_stop_the_others_and_is_run_again(folder, rows, capsys):
    rows(fake_rows("a", "broken", "silent", "b"))
    assert __main__.measure(__main__.missing()) == 1
    assert ran(folder) == ["a", "broken", "silent", "b"]
    out = capsys.readouterr().out
    assert "failed: broken, silent" in out and "a: ratio 0.500" in out and "broken: not run" in out
    (folder / "mended").touch()
    rows(fake_rows("a", "broken", "b"))
    assert __main__.measure(__main__.missing()) == 0
    assert ran(folder) == ["a", "broken", "silent", "b", "broken"]
    assert __main__.missing() == []


def test_rows_with_the_same_command_are_measured_by_one_process(folder, rows):
    rows(fake_rows("a+b+c", "d"))
    keep(folder, "fake", "b", "2 cores of x86_64", ratio=0.25)
    assert __main__.measure(__main__.missing(), []) == 0
    assert ran(folder) == ["a", "b", "c", "d"]


def test_an_interrupt_waits_for_the_end_of_the_row_and_the_same_command_goes_on(folder):
    (folder / "driver.py").write_text(DRIVER)
    command = [sys.executable, "-S", str(folder / "driver.py"), str(folder), "a", "slow", "b"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"cwd": ROOT, "env": environment, "text": True}
    broken = subprocess.Popen(command, **options, stdout=subprocess.PIPE, start_new_session=True)
    wait_until(lambda: "slow" in ran(folder) or broken.poll() is not None)
    os.killpg(broken.pid, signal.SIGINT)  # as a terminal does
    out, _ = broken.communicate(timeout=GUARD)
    assert (broken.returncode, "rows that are still missing" in out) == (130, True)
    assert (folder / "closed").exists()
    (folder / "quick").touch()
    again = subprocess.run(command, **options, capture_output=True, timeout=GUARD)
    assert again.returncode == 0, again.stdout + again.stderr
    assert ran(folder) == ["a", "slow", "slow", "b"]


def training_line(name: str, *, reference_attention: str, speed: float) -> dict[str, Any]:
    """The fields of a result that trainer_speed measured with the settings of the row `name`."""
    return {**asdict(ROWS[name]), "reference_attention": reference_attention, "tokens_per_second": speed}


def test_a_result_counts_for_a_training_row_if_its_fields_match_and_its_reference_used_the_kernel_of_the_row(folder):
    made = training_line("4b-packed", reference_attention="flex", speed=100.0)
    keep(folder, "trainer_speed", "4b-packed", "1 x NVIDIA H200", **made)
    assert table.newest(TABLE["4b-packed"], H200) is None
    made = training_line("4b-packed", reference_attention="flash4", speed=200.0)
    keep(folder, "trainer_speed", "another name", "1 x NVIDIA H200", **made)
    made = training_line("4b-packed-flex", reference_attention="flex", speed=160.0)
    keep(folder, "trainer_speed", "4b-packed, attention flex", "1 x NVIDIA H200", **made)
    found = {name: table.newest(TABLE[name], H200) for name in ROWS}
    assert {name: line["tokens_per_second"] for name, line in found.items() if line} == {
        "4b-packed": 200.0,
        "4b-packed-flex": 160.0,
    }
    assert table.newest(TABLE["kernel-4b-packed"], H200)["ratio"] == 1.25


def test_a_quotient_of_two_rows_ignores_the_kernel_of_the_reference(folder):
    for name, speed in (("4b-packed", 100.0), ("4b-packed-float8", 130.0)):
        made = training_line(name, reference_attention="flex", speed=speed)
        keep(folder, "trainer_speed", name, "1 x NVIDIA H200", **made)
    assert table.newest(TABLE["float8-against-bf16"], H200)["ratio"] == 1.3


def test_rows_that_compare_two_kernels_differ_only_in_the_kernel():
    for name in register.ON_BOTH_KERNELS:
        assert ROWS[f"{name}-flex"] == replace(ROWS[name], attention="flex")
        assert ROWS[name].attention == "flash4"


def test_the_name_of_a_changed_row_lists_the_changed_fields():
    from benchmarks import trainer_speed

    changed = replace(ROWS["0_6b-packed"], attention="flex")
    made = trainer_speed.changed("0_6b-packed", attention="flex", checkpointing="selective")
    assert made == ("0_6b-packed, attention flex", changed)
    assert trainer_speed.changed("4b-packed", attention=None) == ("4b-packed", ROWS["4b-packed"])


def test_mfu_is_a_share_of_the_peak_in_the_dtype_of_the_matrix_products(monkeypatch):
    from benchmarks import trainer_speed

    row = ROWS["4b-packed"]
    most = 989e12 / trainer_speed.flops_per_token(
        trainer_speed.model_of(row), row.document
    )  # tokens/s at the bf16 peak
    monkeypatch.setattr(results, "gpus", lambda: (H200,))
    assert trainer_speed.mfu(row, most) == pytest.approx(1)
    assert trainer_speed.mfu(replace(row, num_gpus=4), most) == pytest.approx(1 / 4)
    assert trainer_speed.mfu(replace(row, float8=True), most) == pytest.approx(1 / 2)
    monkeypatch.setattr(results, "gpus", lambda: ("another GPU",))
    assert trainer_speed.mfu(row, most) is None
    assert trainer_speed.mfu(ROWS["tiny-cpu"], most) is None


def test_a_short_run_is_judged_by_its_worst_update():
    from benchmarks import runs

    update = {"reward/mean": 0.5, "logprob_diff/mean": 1e-3, "logprob_diff/max": 0.1, "kl/policy_generator": 1e-5}
    update |= {"time/generate": 1.0, "time/train": 9.0, "time/sync": 2.0}
    other = update | {"logprob_diff/mean": 3e-2, "time/train": 0.5}
    figures = runs.figures({"time/step": 20.0}, [update, other])
    assert (figures["updates"], figures["difference_mean"], figures["train_seconds"]) == (2, 3e-2, 0.5)
    row = TABLE["run-qwen3_0_6b"]
    assert table.verdict(row, figures) == "misses mean difference"
    assert table.verdict(row, figures | {"difference_mean": 1e-3}) == "yes"


def test_a_quotient_runs_its_two_rows_and_divides_their_speeds(folder, rows, capsys):
    quotient = TableRow(what="", num_gpus=0, at_least={"ratio": 1.2}, quotient_of=("a", "b"))
    rows({**fake_rows("a", "b"), "q": quotient})
    assert __main__.missing() == ["a", "b"]
    assert __main__.measure(["q"]) == 0
    assert ran(folder) == ["a", "b"]
    assert "q: ratio 1.000; target ≥ 1.2: misses ratio" in capsys.readouterr().out


def test_nothing_runs_if_this_machine_cannot_run_a_row_and_the_error_names_that_row(folder, rows):
    rows({**fake_rows("a"), **fake_rows("g", num_gpus=2)})
    with pytest.raises(SystemExit, match="g needs 2 GPUs; this machine has no GPU"):
        __main__.measure(["a", "g"])
    assert ran(folder) == []


def test_the_table_says_which_rows_meet_their_target_which_miss_it_and_which_were_not_run(folder, rows):
    met, missed, nan = (fake_rows(name, num_gpus=1)[name] for name in ("met", "missed", "nan"))
    for row in (met, missed, nan):
        row.at_least["ratio"] = 0.98
        row.at_least["tokens_per_second"] = 1000
    rows({"met": met, "missed": missed, "nan": nan, **fake_rows("cpu", "bare")})
    speeds = {"tokens_per_second": 1200.0}
    keep(folder, "fake", "met", "2 x NVIDIA H200", ratio=0.5, **speeds)
    keep(folder, "fake", "met", "2 x NVIDIA H200", ratio=1.2, **speeds)  # the newest result counts
    keep(folder, "fake", "met", "2 cores of x86_64", ratio=0.1, **speeds)  # a result of a CPU does not count
    keep(folder, "fake", "nan", "1 x NVIDIA H200", ratio=float("nan"), **speeds)
    keep(folder, "fake", "cpu", "2 cores of x86_64", ratio=0.3, **speeds)
    head, _, *lines = ([cell.strip() for cell in row.split("|")[1:-1]] for row in table.markdown().splitlines())
    cells = [dict(zip(head, line, strict=True)) for line in lines]
    assert [line["meets it"] for line in cells] == ["yes", "not run", "misses ratio", "", "not run"]
    assert cells[0] == {
        "row": "`met`",
        "what it measures": "fake",
        "measured": "1,200 against 1,000 tokens/s",
        "ratio": "1.200",
        "target": "≥ 0.98, tokens/s ≥ 1,000",
        "meets it": "yes",
        "device, date": "2 x NVIDIA H200, 2026-01-01",
        "command": "`make bench ROW=met`",
    }
    assert cells[1]["device, date"] == "needs 1 GPU" and cells[3]["device, date"] == "2 cores of x86_64, 2026-01-01"


def test_the_table_shows_another_kind_of_gpu_only_if_there_is_no_result_of_the_usual_kind(folder, rows):
    rows(fake_rows("a", "b", "c", num_gpus=1))
    keep(folder, "fake", "a", "1 x NVIDIA H200", "2026-01-01T00:00:00+00:00", ratio=1.2)
    for name in ("a", "b"):
        keep(folder, "fake", name, "1 x NVIDIA H100", "2026-01-02T00:00:00+00:00", ratio=1.1)
    keep(folder, "fake", "c", "2 cores of x86_64", "2026-01-02T00:00:00+00:00", ratio=1.1)
    _, _, *lines = table.markdown().splitlines()
    a, b, c = lines
    assert "1 x NVIDIA H200, 2026-01-01" in a and "1 x NVIDIA H100, 2026-01-02" in b and "not run" in c


def test_the_headline_has_only_rows_that_were_run(folder, rows, monkeypatch):
    rows(fake_rows("a", "b", "c"))
    monkeypatch.setattr(table, "HEADLINE", ("c", "b", "a"))
    keep(folder, "fake", "a", "2 cores of x86_64", ratio=1.2)
    keep(folder, "fake", "c", "2 cores of x86_64", ratio=1.2)
    _, _, *lines = table.headline().splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["`c`", "`a`"]


@pytest.mark.parametrize(
    ("page", "marks", "made"),
    [
        (table.SPEED_PAGE, table.TABLE_MARKS, table.markdown),
        (table.README, table.HEADLINE_MARKS, table.headline),
    ],
    ids=["docs/speed.md", "README.md"],
)
def test_a_page_has_the_table_that_the_results_give(monkeypatch, page, marks, made):
    monkeypatch.setattr(results, "FOLDER", ROOT / "benchmarks" / "results")
    shown = table.between(page.read_text(), marks)
    assert shown == made(), f"{page.name} has an old table; `python -m benchmarks table --write` updates it"


def test_every_result_says_how_to_repeat_its_measurement_and_no_mfu_exceeds_1():
    files = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    assert files
    for file in files:
        for line in map(json.loads, file.read_text().splitlines()):
            assert line.keys() >= {"name", "command", "date", "device", "versions"}, file
            assert (line.get("mfu") or 0) <= 1, file


def test_the_text_of_a_result_says_what_its_figures_say():
    from benchmarks import runs

    folder = ROOT / "benchmarks" / "results"
    lines = {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in folder.glob("*.jsonl")}
    for name, text in (("runs", runs.text), ("ppo_step", ppo_step.text)):
        assert [text(line) for line in lines[name]] == [line["text"] for line in lines[name]]
    for line in lines["overhead"] + lines["serve_overhead"]:
        one, other = (value for name, value in line.items() if name.endswith("_seconds"))
        assert results.milliseconds(one, other) == line["text"]
    line = lines["trainer_speed"][0]
    speeds = results.against(line["tokens_per_second"], line["reference_tokens_per_second"], "tokens/s")
    assert line["text"].split(";")[0] == speeds


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("benchmarks.overhead", "python -m benchmarks overhead training"),
        ("/checkout/benchmarks/overhead.py", "python -m benchmarks overhead training"),
        ("/checkout/tests/drills/layouts.py", "python -m tests.drills.layouts training"),
    ],
)
def test_a_result_has_its_text_and_the_command_that_repeats_it(folder, monkeypatch, program, command):
    monkeypatch.setattr(sys, "argv", [program, "training"])
    results.add("fake", "a", {"ratio": 0.5}, "1 against 2 s")
    results.add("fake", "b", {"ratio": 0.5})
    first, second = results.lines("fake")
    assert (first["text"], first["ratio"], first["command"]) == ("1 against 2 s", 0.5, command)
    assert "text" not in second


def test_a_table_is_written_between_its_marks_and_nowhere_else(tmp_path):
    page, marks = tmp_path / "page.md", table.TABLE_MARKS
    page.write_text(f"above\n{marks[0]}old\n{marks[1]}below\n")
    table.write(page, marks, "new\n")
    assert page.read_text() == f"above\n{marks[0]}new\n{marks[1]}below\n"
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="lacks the marks"):
        table.write(page, marks, "new\n")
    assert page.read_text() == "no marks"


def test_the_seconds_of_the_parts_of_a_ppo_step_are_added_up_for_each_device():
    places = {"trainer": ["GPU 0"], "reference": ["GPU 0"], "critic": ["GPU 1"], "generator": ["GPU 1"]}
    parts = {"generate": 4.0, "reference": 1.0, "values": 1.5, "policy": 3.0, "critic": 2.5, "push": 0.25, "pull": 0.5}
    assert ppo_step.seconds_by_device(parts, places) == {"GPU 0": 4.25, "GPU 1": 8.5}
    both = places | {"trainer": ["GPU 0", "GPU 1"]}
    assert ppo_step.seconds_by_device({"policy": 3.0}, both) == {"GPU 0": 3.0, "GPU 1": 3.0}


def test_the_result_of_a_ppo_step_has_the_seconds_of_its_slowest_device(monkeypatch):
    monkeypatch.setattr(ppo_step.torch.cuda, "is_available", lambda: True)
    config = ppo_step.make_config("qwen3_0_6b_ppo", samples=8, prompt_tokens=16, new_tokens=8, steps=4)
    config.validate()
    steps = [{"time/step": seconds, "tokens/s": 100.0} for seconds in (9.0, 10.0, 30.0)]
    parts = {"generate": 4.0, "reference": 1.0, "values": 1.5, "policy": 3.0, "critic": 2.5, "push": 0.25, "pull": 1.0}
    line = ppo_step.figures(config, steps, parts)
    assert line["of_devices"] == {"GPU 0": 4.25, "GPU 1": 9.0}
    assert (line["seconds"], line["slowest_seconds"], line["ratio"]) == (10.0, 9.0, 0.9)
    row = TABLE["ppo-step-0_6b"]
    assert table.misses(row, line) == [] and table.misses(row, line | {"ratio": 0.89}) == ["ratio"]
    assert ppo_step.text(line).startswith(
        "step 10 s against 9 s of GPU 1; generate 4 s; reference 1 s; values 1.5 s; policy 3 s; "
    )
