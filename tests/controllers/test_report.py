"""report.html and reward.png of runs in every state."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from waiting import GUARD

from controllers.report import around_rewards, write_report
from controllers.run_folder import RunFolder

ROOT = Path(__file__).parents[2]


def grpo_record(step: int) -> dict:
    return {
        "step": step,
        "phase": "grpo",
        **{"reward/mean": 0.5, "reward/std": 0.2, "loss": -0.01 * step, "grad_norm": 1.0, "learning_rate": 1e-3},
        **{"logprob_diff/mean": 1e-6, "logprob_diff/max": 1e-5, "tokens/trained": 1000, "tokens/generated": 2000},
        **{"time/generate": 1.0, "time/train": 0.5, "time/sync": 0.1, "time/step": 2.0},
    }


def write_run(path: Path, records: list[dict], rollouts: list[dict] = (), outcome: dict | None = None) -> RunFolder:
    folder = RunFolder(path)
    folder.path.mkdir(exist_ok=True)
    folder.config.write_text(json.dumps({"seed": 7, "note": "</pre><script>"}))
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    folder.rollouts.write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
    if outcome:
        folder.outcome.write_text(json.dumps(outcome))
    return folder


class Tags(HTMLParser):
    def __init__(self, html: str):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def whole_run(path: Path) -> RunFolder:
    sft = [{"step": s, "phase": "sft", "loss": 2.0 - s, "time/step": 0.5, "tokens/trained": 500} for s in (1, 2)]
    sft[1]["validation/accuracy"] = 0.25
    grpo = [grpo_record(step) for step in range(3, 7)]
    grpo[1] |= {"skipped": True, "loss": None, "reward/std": None}
    grpo[2]["validation/accuracy"] = 0.875
    grpo[3]["validation/accuracy"] = 0.75
    rollouts = [{"step": s, "prompt": f"p{s}", "completion": f"c{s}", "reward": 1.0} for s in range(3, 7)]
    return write_run(path, sft + grpo, rollouts, {"status": "finished", "error": None, "total_steps": 6})


def test_the_report_summarizes_the_run_and_draws_every_chart(tmp_path):
    folder = whole_run(tmp_path)
    assert write_report(folder.path) == folder.report
    page = Tags(folder.report.read_text())
    for text in (
        "0.750",
        "0.250 after the supervised steps",
        "best 0.875 at step 5",
        "2 supervised, 1 skipped",
        "5,000",
    ):
        assert text in page.text
    for text in ("finished", "8,000 generated", "0 min 9 s", "loss, supervised", "loss, GRPO", "logprob difference"):
        assert text in page.text
    assert page.tags.count("svg") == 7
    assert [step for step in range(3, 7) if f"p{step}" in page.text] == [3, 5, 6]
    assert folder.reward_png.read_bytes().startswith(b"\x89PNG")


def test_the_report_needs_no_other_file_and_no_network(tmp_path):
    folder = whole_run(tmp_path)
    write_report(folder.path)
    html = folder.report.read_text()
    page = Tags(html)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert all(value.startswith("#") for name, value in page.attributes if name in ("src", "href", "xlink:href"))
    assert "@import" not in html and all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", html))


def test_the_text_of_a_model_or_a_config_is_escaped(tmp_path):
    rollout = {"step": 1, "prompt": "<script>alert(1)</script>", "completion": "a & b <img src=x>", "reward": None}
    outcome = {"status": "failed", "error": "ValueError: <b>boom</b>"}
    folder = write_run(tmp_path / "<i>run", [grpo_record(1)], [rollout], outcome)
    write_report(folder.path)
    page = Tags(folder.report.read_text())
    assert not {"script", "img", "i"} & set(page.tags) and page.tags.count("b") == 5
    for text in (rollout["prompt"], rollout["completion"], outcome["error"], "</pre><script>"):
        assert text in page.text


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_interrupted_run_of_any_length_has_a_report(tmp_path, num_steps):
    folder = write_run(
        tmp_path, [grpo_record(step) for step in range(1, num_steps + 1)], outcome={"status": "interrupted"}
    )
    with folder.metrics.open("a") as file:
        file.write('{"step": 9, "loss')
    write_report(folder.path)
    page = Tags(folder.report.read_text())
    assert "interrupted" in page.text and "not measured" in page.text and "none recorded" in page.text
    assert ("no steps recorded" in page.text) == (num_steps == 0)
    assert folder.reward_png.stat().st_size > 1000


def test_the_chart_of_rewards_shows_no_more_supervised_steps_than_others():
    for num_sft, num_grpo, first in ((10, 2, 8), (2, 10, 0), (10, 0, 0)):
        records = [{"step": s, "phase": "sft" if s < num_sft else "grpo"} for s in range(num_sft + num_grpo)]
        assert around_rewards(records) == records[first:]


def test_a_report_is_the_same_every_time(tmp_path):
    folder = whole_run(tmp_path)
    write_report(folder.path)
    before = folder.report.read_bytes(), folder.reward_png.read_bytes()
    write_report(folder.path)
    assert (folder.report.read_bytes(), folder.reward_png.read_bytes()) == before


def test_every_colour_of_a_chart_follows_dark_mode(tmp_path):
    folder = whole_run(tmp_path)
    write_report(folder.path)
    html = folder.report.read_text()
    drawn = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", html))
    assert not drawn and "prefers-color-scheme:dark" in html


def test_the_command_writes_a_report_and_refuses_a_folder_without_a_run(tmp_path):
    whole_run(tmp_path / "run")
    command = [sys.executable, "-m", "controllers.report"]
    done = subprocess.run([*command, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, timeout=GUARD)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'run' / 'report.html'}\n"), done.stderr
    empty = subprocess.run([*command, str(tmp_path / "no")], cwd=ROOT, capture_output=True, text=True, timeout=GUARD)
    assert empty.returncode == 1 and "holds no run" in empty.stderr and "Traceback" not in empty.stderr
