"""Tests of trackers, such as TensorBoard and wandb. Metrics and rollouts are read back from the files that these two
write. Nothing uses the network.
"""

import io
import json
import struct
import sys
from pathlib import Path

import pytest
from rich.console import Console
from waiting import wait_until

from configs import CONFIGS
from controllers.observe.logger import MetricsLogger
from controllers.observe.run_folder import RunFolder
from controllers.observe.trackers import validate_trackers
from controllers.program.cli import parse

GROUP = {
    "prompt": "1+1=",
    "completions": ["2", "3"],
    "rewards": [1.0, 0.0],
    "advantages": [0.7, -0.7],
    "lengths": [2, 3],
}


def logger(path: Path, *trackers: str, **options) -> MetricsLogger:
    console = Console(file=io.StringIO())
    return MetricsLogger(RunFolder(path), trackers=trackers, console=console, project="additions", **options)


def tensorboard_scalars(path: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(RunFolder(path).tensorboard)).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def wandb_records(path: Path) -> list:
    """All records of the only offline run under this folder. wandb's own process writes the last records after the run
    has ended, so this function waits for them.
    """
    found: list = []

    def is_whole() -> bool:
        found[:] = read_wandb_file(path)
        return any(record.WhichOneof("record_type") == "exit" for record in found)

    wait_until(is_whole, "the end of wandb's file")
    return found


def read_wandb_file(path: Path) -> list:
    """The records that are in the file, as `wandb sync` would read them.

    The file has a header of 7 bytes and then LevelDB's log format, which consists of blocks of 32 KiB. A block consists
    of chunks. Every chunk has a checksum of 4 bytes, a length of 2 bytes, a kind of 1 byte and its content. Kind 1 is a
    whole record. Kinds 2, 3 and 4 are the first, a middle and the last part of a record.
    """
    from wandb.proto import wandb_internal_pb2

    [file] = path.glob("wandb/offline-run-*/run-*.wandb")
    content, position, whole, records = file.read_bytes(), 7, b"", []
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:  # no room for a chunk: zeros up to the next block
            position += left
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        if position + 7 + length > len(content):
            break  # not written yet
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            records.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return records


def wandb_history(records: list) -> list[dict]:
    history = []
    for record in records:
        items = record.history.item
        if items:
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            history.append({"_step": record.history.step.num, **row})
    return history


def test_tensorboard_reads_back_every_finite_number_of_a_record(tmp_path):
    with logger(tmp_path, "tensorboard") as log:
        log.step(1, {"loss": 0.5, "eval/pass@4": 0.25, "tokens/s": 1e6}, phase="sft")
        log.step(2, {"loss": 0.25, "grad_norm": float("nan")}, phase="grpo")
    assert tensorboard_scalars(tmp_path, "loss") == [(1, 0.5), (2, 0.25)]
    assert tensorboard_scalars(tmp_path, "eval/pass@4") == [(1, 0.25)]
    with pytest.raises(KeyError):
        tensorboard_scalars(tmp_path, "grad_norm")


def test_tensorboard_drops_the_old_values_of_steps_that_a_resumed_run_repeats(tmp_path):
    with logger(tmp_path, "tensorboard") as log:
        for step in range(1, 5):
            log.step(step, {"loss": float(step)}, phase="grpo")
    with logger(tmp_path, "tensorboard", steps_done=2) as log:
        log.step(3, {"loss": 9.0}, phase="grpo")
    assert tensorboard_scalars(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, 9.0)]


@pytest.mark.slow
def test_offline_wandb_has_the_config_and_every_number_and_the_rollouts_as_a_table(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "my-run"
    with logger(folder, "wandb", config={"seed": 7, "trainer": {"lora": {"rank": 0}}, "k": (1, 4)}) as log:
        log.step(1, {"loss": 0.5}, phase="grpo")
        log.rollouts(1, [GROUP])
        log.step(2, {"loss": 0.25, "eval/pass@4": 0.125}, phase="grpo")
    records = wandb_records(folder)
    [run] = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("additions", "my-run")
    updates = [update for record in records for update in [*record.run.config.update, *record.config.update]]
    config = {update.key or "/".join(update.nested_key): json.loads(update.value_json) for update in updates}
    assert (config["seed"], config["trainer.lora.rank"], config["k"]) == (7, 0, "(1, 4)")
    history = wandb_history(records)
    assert [(row["_step"], row["loss"]) for row in history] == [(1, 0.5), (2, 0.25)]
    assert history[1]["eval/pass@4"] == 0.125
    [table] = folder.glob("wandb/offline-run-*/files/media/table/rollouts_*.json")
    shown = json.loads(table.read_text())
    assert shown["columns"] == ["step", "prompt", "completion", "reward", "advantage", "length"]
    assert shown["data"] == [[1, "1+1=", "2", 1.0, 0.7, 2], [1, "1+1=", "3", 0.0, -0.7, 3]]
    [exit] = [record.exit for record in records if record.WhichOneof("record_type") == "exit"]
    assert exit.exit_code == 0


def test_wandb_shows_a_failed_run_as_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(RuntimeError, match="boom"), logger(tmp_path, "wandb"):
        raise RuntimeError("boom")
    [exit] = [record.exit for record in wandb_records(tmp_path) if record.WhichOneof("record_type") == "exit"]
    assert exit.exit_code == 1


def test_trackers_join_no_process_group_although_a_scheduler_has_set_rank_and_world_size(tmp_path, monkeypatch):
    from accelerate.state import PartialState

    PartialState._reset_state()
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with logger(tmp_path, "tensorboard") as log:
        log.step(1, {"loss": 0.5}, phase="sft")
    assert tensorboard_scalars(tmp_path, "loss") == [(1, 0.5)]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_without_its_package_is_refused_with_the_command_that_installs_the_package(name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    message = f"trackers has '{name}', whose package is not installed: pip install {name}"
    with pytest.raises(ValueError) as error:
        validate_trackers(["tensorboard", name])
    assert str(error.value) == message
    with pytest.raises(SystemExit) as exit:
        parse("prog", CONFIGS["controllers.grpo"], ["--trackers", "tensorboard", name, "--dry-run"])
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_a_folder_with_the_name_of_a_tracker_is_not_taken_for_a_package(tmp_path, monkeypatch):
    # Some trackers, such as wandb and dvclive, make a folder with their own name in the current directory.
    (tmp_path / "comet_ml").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="pip install comet_ml"):
        validate_trackers(["comet_ml"])


def test_an_unknown_tracker_is_refused_with_the_names_of_the_known_ones(capsys):
    with pytest.raises(SystemExit) as exit:
        parse("prog", CONFIGS["controllers.grpo"], ["--trackers", "wandbb"])
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert exit.value.code == 2 and "wandbb" in shown and "tensorboard" in shown and "trackio" in shown


def test_tensorboard_is_the_only_tracker_unless_flags_choose_trackers():
    def trackers(*flags: str) -> list[str]:
        return parse("prog", CONFIGS["controllers.grpo"], [*flags, "--dry-run"]).config.all_trackers()

    assert trackers() == ["tensorboard"]
    assert trackers("--wandb-project", "p") == ["tensorboard", "wandb"]
    assert trackers("--trackers", "wandb", "tensorboard") == ["wandb", "tensorboard"]
    assert trackers("--trackers") == []


def test_a_run_without_trackers_writes_its_own_files_only(tmp_path):
    with logger(tmp_path) as log:
        log.step(1, {"loss": 0.5}, phase="sft")
        log.rollouts(1, [GROUP])
    names = {"metrics.jsonl", "rollouts.jsonl", "evaluation.jsonl", "timeline.jsonl", "outcome.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
