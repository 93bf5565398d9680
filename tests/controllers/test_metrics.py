"""The records of a run, on disk and on the terminal."""

import io
import json
import re

import pytest
import torch
from rich.console import Console

from controllers.observe.logger import KEYS, MetricsLogger, Timer, completions_of
from controllers.observe.run_folder import Record, RunFolder, read_jsonl, to_json


def logger(folder: RunFolder, out: io.StringIO | None = None, **options) -> MetricsLogger:
    console = Console(file=out if out is not None else io.StringIO(), width=200)
    return MetricsLogger(folder, console=console, **{"trackers": (), **options})


def group(prompt: str) -> Record:
    """A line of rollouts.jsonl, without its step."""
    return {
        "prompt": prompt,
        "answer": "2",
        "completions": ["2", "x"],
        "rewards": [1.0, 0.0],
        "advantages": [0.7, -0.7],
        "lengths": [2, 1],
    }


def record_steps(folder: RunFolder, steps, **options) -> None:
    with logger(folder, **options) as log:
        for step in steps:
            log.step(step, {"loss": step / 10}, phase="grpo")
            log.rollouts(step, [group("1+1=")])


def test_a_record_has_every_key_and_is_on_disk_before_the_next_step(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with logger(folder) as log:
        log.step(1, {"policy_version": 1, "loss": torch.tensor(0.5), "policy_lag": 0}, phase="sft")
        log.step(2, {"eval/reward": 0.25}, phase="grpo", skipped=True)
        first, second = read_jsonl(folder.metrics)
    assert set(KEYS) <= set(first) & set(second)
    assert (first["step"], first["phase"], first["loss"], first["reward/mean"]) == (1, "sft", 0.5, None)
    assert "eval/reward" not in first and "skipped" not in first
    assert (second["skipped"], second["eval/reward"]) == (True, 0.25)


def test_nan_and_infinity_become_null_and_are_named(tmp_path):
    folder = RunFolder(tmp_path)
    with logger(folder) as log:
        log.step(1, {"loss": float("nan"), "grad_norm": torch.tensor(float("inf")), "learning_rate": 0.1}, phase="grpo")
    (line,) = folder.metrics.read_text().splitlines()
    record = json.loads(line, parse_constant=pytest.fail)
    assert (record["loss"], record["grad_norm"], record["learning_rate"]) == (None, None, 0.1)
    assert record["nonfinite"] == ["loss", "grad_norm"]
    assert to_json({"a": [float("-inf"), {"b": torch.tensor([1, 2])}]}) == '{"a": [null, {"b": [1, 2]}]}'


def test_a_resumed_run_has_one_line_per_step_even_if_the_last_line_was_half_written(tmp_path):
    folder = RunFolder(tmp_path)
    record_steps(folder, range(1, 6))
    with folder.metrics.open("a") as file:
        file.write('{"step": 6, "lo')
    record_steps(folder, range(4, 7), steps_done=3)
    assert [line["step"] for line in read_jsonl(folder.metrics)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in read_jsonl(folder.rollouts)] == [1, 2, 3, 4, 5, 6]
    assert not list(tmp_path.glob("*.tmp"))


def test_the_file_is_unchanged_if_dropping_lines_fails(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    record_steps(folder, range(1, 4))
    before = folder.metrics.read_bytes()
    monkeypatch.setattr(
        "controllers.observe.run_folder.os.fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        folder.drop_after(1)
    assert folder.metrics.read_bytes() == before


def test_recording_a_step_twice_raises_an_error(tmp_path):
    with logger(RunFolder(tmp_path), steps_done=3) as log:
        log.step(4, {}, phase="grpo")
        with pytest.raises(ValueError, match="step 4 after step 4: each step is recorded once"):
            log.step(4, {}, phase="grpo")


def test_without_a_terminal_a_step_is_one_aligned_line_under_a_header(tmp_path):
    out = io.StringIO()
    with logger(RunFolder(tmp_path), out, total_steps=3) as log:
        with log.setup("starting generator"):
            pass
        log.step(1, {"loss": 2.0, "time/step": 0.5, "tokens/s": 2000.0}, phase="sft")
        log.step(2, {"reward/mean": 0.5, "eval/reward": 0.25, "policy_lag": 1, "time/step": 1}, phase="grpo")
        log.step(3, {"reward/mean": float("nan")}, phase="grpo", skipped=True)
    started, ready, header, sft, header_again, grpo, skipped = out.getvalue().splitlines()
    assert started == "starting generator ..." and re.fullmatch(r"starting generator: \d+\.\d s", ready)
    assert header == header_again
    assert len(header) == len(sft) == len(grpo) == len(skipped) - len("  skipped") <= 120
    assert sft.split()[:7] == ["1/3", "sft", "-", "-", "2", "-", "-"] and "2,000" in sft
    assert grpo.split()[:4] == ["2/3", "grpo", "0.500", "0.250"]
    assert skipped.split()[:3] == ["3/3", "grpo", "-"]
    assert "\x1b" not in out.getvalue()


def test_the_header_is_repeated_after_every_twenty_lines(tmp_path):
    out = io.StringIO()
    with logger(RunFolder(tmp_path), out) as log:
        for step in range(1, 42):
            log.step(step, {}, phase="grpo")
    assert [i for i, line in enumerate(out.getvalue().splitlines()) if "grad_norm" in line] == [0, 21, 42]


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_terminal_shows_a_live_panel_and_keeps_the_lines_of_steps_with_an_evaluation(tmp_path):
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=120, force_terminal=True, color_system=None, get_time=clock)
    with MetricsLogger(RunFolder(tmp_path), total_steps=4, console=console, trackers=()) as log:
        with log.setup("starting trainer"):
            clock.now = 7.0
            log.display._live.refresh()
        for step in (1, 2):
            clock.now += 100.0
            log.step(step, {"loss": 0.125}, phase="sft")
        log.step(3, {"loss": 0.5, "eval/reward": 0.75}, phase="grpo")
        clock.now += 3661.0
        log.step(4, {"learning_rate": 0.1}, phase="grpo")
        log.display._live.refresh()
    shown = out.getvalue()
    assert "starting trainer: 7 s" in shown and "starting trainer: 7.0 s" in shown
    (left,) = [line for line in shown.splitlines() if " 0.750 " in line and " 3/4  grpo " in line]
    assert left.split()[-2:] == ["0:03:27", "-"]  # one GRPO step is too few to estimate the time that is left
    final = shown[shown.rindex("4/4") :]
    assert "1:04:28 elapsed" in final and "0:00:00 left" in final
    assert "held out 0.750" in final and "loss 0.5" in final and "lr 1.00e-01" in final


def test_the_time_that_is_left_is_estimated_from_the_steps_of_the_phase(tmp_path):
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=200, get_time=clock)
    with MetricsLogger(RunFolder(tmp_path), total_steps=20, console=console, trackers=()) as log:
        for step in range(1, 11):
            clock.now += 1.0
            log.step(step, {}, phase="sft")
        for step in range(11, 15):
            clock.now += 60.0
            log.step(step, {}, phase="grpo")
    rows = [line.split()[-2:] for line in out.getvalue().splitlines() if line.strip()[0].isdigit()]
    assert rows[1] == ["0:00:02", "0:00:18"] and rows[9] == ["0:00:10", "0:00:10"]
    assert rows[10] == ["0:01:10", "-"] and rows[13] == ["0:04:10", "0:06:00"]


def test_a_few_evenly_spaced_groups_of_a_step_are_kept_whole(tmp_path):
    folder = RunFolder(tmp_path)
    with logger(folder, groups_per_step=3) as log:
        log.rollouts(7, [group(str(i)) for i in range(12)])
        log.rollouts(8, [group("only")])
        log.rollouts(9, [])
    kept = read_jsonl(folder.rollouts)
    assert [(line["step"], line["prompt"]) for line in kept] == [(7, "0"), (7, "4"), (7, "8"), (8, "only")]
    assert kept[0] == {"step": 7, **group("0")}


def test_a_group_has_a_row_for_each_completion():
    first, second = completions_of({"step": 7, **group("p")})
    assert first == {"step": 7, "prompt": "p", "completion": "2", "reward": 1.0, "advantage": 0.7, "length": 2}
    assert (second["completion"], second["advantage"]) == ("x", -0.7)


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "finished"), (KeyboardInterrupt(), "interrupted"), (RuntimeError("boom"), "failed")],
)
def test_outcome_json_has_the_status_and_the_error_of_the_run(tmp_path, error, status):
    folder = RunFolder(tmp_path)

    def run():
        with logger(folder, total_steps=1) as log:
            assert json.loads(folder.outcome.read_text())["status"] == "running"
            log.step(1, {}, phase="grpo")
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    outcome = json.loads(folder.outcome.read_text())
    assert outcome["status"] == status
    assert outcome["error"] == {"failed": "RuntimeError: boom", "interrupted": "KeyboardInterrupt"}.get(status)


def test_a_run_with_fewer_steps_than_planned_has_the_status_stopped_early(tmp_path):
    folder = RunFolder(tmp_path)
    record_steps(folder, range(1, 3), total_steps=3)
    outcome = json.loads(folder.outcome.read_text())
    assert (outcome["status"], outcome["step"], outcome["total_steps"]) == ("stopped early", 2, 3)


def test_a_timer_adds_up_the_times_of_a_name_and_starts_again_on_reset():
    timer = Timer()
    with timer("generate"):
        pass
    once = timer.seconds["generate"]
    with pytest.raises(KeyError), timer("generate"):
        raise KeyError
    assert timer.seconds["generate"] > once
    times = timer.reset()
    assert set(times) == {"time/generate", "time/step"} and times["time/generate"] <= times["time/step"]
    assert timer.seconds == {} and timer.reset()["time/step"] <= times["time/step"] + 1


def test_a_folder_with_a_config_holds_a_run_and_its_logs_are_in_the_folder_logs(tmp_path):
    folder = RunFolder(tmp_path)
    assert not folder.holds_run
    folder.config.write_text("{}")
    assert folder.holds_run
    assert folder.log("trainer-0") == tmp_path / "logs" / "trainer-0.log"


def test_the_error_of_a_full_disk_names_the_path_of_the_metrics(tmp_path):
    folder = RunFolder(tmp_path)
    with (
        pytest.raises(OSError, match=f"No space left on device: '{folder.metrics}'"),
        logger(folder) as log,
    ):
        folder.metrics.unlink()
        folder.metrics.symlink_to("/dev/full")
        log.step(1, {"loss": 0.5}, phase="grpo")
    assert json.loads(folder.outcome.read_text())["status"] == "failed"


def test_a_resumed_run_goes_on_if_the_metrics_are_missing_and_a_line_is_cut_off(tmp_path):
    folder = RunFolder(tmp_path)
    folder.rollouts.write_text('{"step": 2}\n{"step": 3}\n{"st')
    with logger(folder, steps_done=2) as log:
        log.step(3, {"loss": 0.5}, phase="grpo")
    assert [line["step"] for line in read_jsonl(folder.metrics)] == [3]
    assert read_jsonl(folder.rollouts) == [{"step": 2}]


def test_trackers_get_a_step_only_once_if_a_recovered_run_repeats_it(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("controllers.observe.trackers.Trackers.log", lambda _, step, values: told.append(step))
    with logger(RunFolder(tmp_path)) as log:
        for step in (1, 2, 3):
            log.step(step, {"loss": 0.5}, phase="grpo")
        log.rewind(1)
        for step in (2, 3, 4):
            log.step(step, {"loss": 0.25}, phase="grpo")
    assert told == [1, 2, 3, 4]
    assert [(line["step"], line["loss"]) for line in read_jsonl(RunFolder(tmp_path).metrics)] == [
        (1, 0.5),
        (2, 0.25),
        (3, 0.25),
        (4, 0.25),
    ]
