"""Tests of comparisons of runs: the HTML page, the table, and folders that cannot be compared."""

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console
from test_report import Nesting, Tags, charts_of, grpo_record, whole_run, write_run

from controllers.observe import compare
from controllers.observe.charts import COLORS


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory) -> list[Path]:
    """The folders of two runs. The first has ended. The second still runs. It has another config and no evaluation."""
    tmp_path = tmp_path_factory.mktemp("runs")
    first = whole_run(tmp_path / "first")
    records = [{**grpo_record(step), "reward/mean": 0.9, "eval/reward": None} for step in (1, 2)]
    second = write_run(tmp_path / "second", records, outcome={"status": "running"})
    second.config.write_text('{"seed": 7, "note": "other", "schedule": {"learning_rate": 0.5}}')
    return [first.path, second.path]


@pytest.fixture(scope="module")
def html(two_runs) -> str:
    output = two_runs[0].parent / "new" / "compare.html"
    compare.write_comparison(two_runs, output)
    return output.read_text()


def test_a_run_has_one_color_and_a_curve_in_every_chart_of_its_metrics(html):
    charts = charts_of(html)
    assert len(charts) > 25 and Nesting(html).problems == []
    assert {"Loss, sft", "Loss, grpo", "Clipped tokens: low side", "Time of a step: generate"} <= set(charts)
    curves = {title: [(curve["name"], curve["color"]) for curve in chart["curves"]] for title, chart in charts.items()}
    assert curves["Reward"] == [("first", COLORS[0]), ("second", COLORS[1])]
    # The second run has no evaluation.
    assert curves["Evaluation: hard"] == [("first", COLORS[0])]
    assert all(set(colors) <= set(curves["Reward"]) for colors in curves.values())


def test_runs_of_dpo_are_compared_by_their_pairs(tmp_path):
    folders = []
    for name, accuracies in {"one": (0.5, 0.75), "two": (0.5, 1.0)}.items():
        records = []
        for step, accuracy in enumerate(accuracies, start=1):
            held_out = {"eval/dpo/accuracy": accuracy, "eval/dpo/loss": 1 - accuracy}
            values = {"dpo/accuracy": accuracy, "loss": 1 - accuracy, **held_out}
            records.append({"step": step, "phase": "dpo", **values})
        folders.append(write_run(tmp_path / name, records).path)
    rows = dict(compare.summary(compare.read_runs(folders)))
    assert rows["steps"] == ["2", "2"]
    assert rows["Pairs with a positive margin, last step (share)"] == ["0.75", "1"]
    assert rows["eval/dpo/loss"] == ["0.250 (best 0.250)", "0.000 (best 0.000)"]
    assert not any(name.startswith("Reward") for name in rows)
    compare.write_comparison(folders, tmp_path / "compare.html")
    assert list(charts_of((tmp_path / "compare.html").read_text())) == [
        "Pairs with a positive margin: pairs of the step",
        "Pairs with a positive margin: held-out pairs",
        "Loss, dpo",
        "Loss of held-out pairs: own",
    ]


def test_the_page_has_the_results_and_the_config_fields_that_differ(html):
    shown = " ".join(Tags(html).words)
    for text in (
        "outcome finished running or killed",
        "steps 6 2",
        "eval/reward 0.750 (best 0.875) –",
        "Reward, last step (reward) 0.5 0.9",
        "time in steps 0 min 9 s 0 min 4 s",
        "trainer memory, peak (GiB) 1.5 1.5",
        "note </pre><script> other",
        "schedule.learning_rate – 0.5",
    ):
        assert text in shown, text
    assert "seed 7" not in shown


def test_the_command_prints_a_table_and_names_the_page(tmp_path, monkeypatch, capsys):
    for name, rate in (("first", 0.25), ("second", 0.5)):
        folder = write_run(tmp_path / name, [{"step": 1, "loss": 0.5, "eval/reward": 0.75}])
        folder.config.write_text(json.dumps({"schedule": {"learning_rate": rate}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "argv", ["compare", "first", "second"])
    compare.main()
    shown = capsys.readouterr().out
    assert "0.750 (best 0.750)" in shown and "config: schedule.learning_rate" in shown
    assert shown.endswith("page: compare.html\n") and (tmp_path / "compare.html").stat().st_size > 10_000


def test_runs_with_the_same_name_are_told_apart_by_their_parent_folders(tmp_path):
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        write_run(tmp_path / parent / "run", [grpo_record(1)])
    runs = compare.read_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"])
    assert list(runs) == ["a/run", "b/run"]
    out = io.StringIO()
    compare.print_table(runs, Console(file=out, width=200))
    assert "a/run" in out.getvalue() and "b/run" in out.getvalue()


def test_runs_without_a_step_can_be_compared(tmp_path):
    paths = [write_run(tmp_path / name, []).path for name in ("a", "b")]
    compare.write_comparison(paths, tmp_path / "compare.html")
    assert "no steps recorded" in Tags((tmp_path / "compare.html").read_text()).text


# {expected error text: the command's arguments that cause the error}
WRONG = {
    "is the only run; a comparison needs at least two": ["run"],
    "empty holds no run: it has neither config.json nor metrics.jsonl": ["run", "empty"],
    "nowhere holds no run": ["run", "nowhere"],
    "cut_off/config.json is not JSON: Expecting ',' delimiter": ["run", "cut_off"],
    "run is named twice; a comparison needs distinct runs": ["run", "empty/../run"],
    "8 runs are too many; a chart has colors for at most 7": [f"run{number}" for number in range(8)],
    "--output empty is a folder; it must be a file": ["run", "other", "--output", "empty"],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_refused_with_an_error_of_one_line(message, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut_off").mkdir()
    (tmp_path / "cut_off" / "config.json").write_text('{"steps": 5')
    for name in ("run", "other"):
        write_run(tmp_path / name, [grpo_record(1)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compare", *WRONG[message]])
    with pytest.raises(SystemExit) as exit:
        compare.main()
    shown = capsys.readouterr().err
    assert exit.value.code == 2 and message in shown and shown.count("\n") == 1
