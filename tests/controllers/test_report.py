"""The report of a run, for runs that have finished, failed, were interrupted or are still going on."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from waiting import GUARD

from controllers.observe.metric_table import METRICS
from controllers.observe.report import metric_rows, shown_steps, write_report
from controllers.observe.run_folder import RunFolder

ROOT = Path(__file__).parents[2]


def grpo_record(step: int) -> dict:
    record = {"step": step, "phase": "grpo"}
    record |= {"reward/mean": 0.5, "reward/std": 0.2, "loss": -0.01 * step, "grad_norm": 1.0, "learning_rate": 1e-3}
    record |= {
        "loss/advantage/max": 1.0,
        "logprob_diff/mean": 1e-6,
        "logprob_diff/max": 1e-5,
        "tokens/trained": 1000,
        "tokens/generated": 2000,
    }
    record |= {"time/generate": 1.0, "time/train": 0.5, "time/sync": 0.1, "time/step": 2.0, "tokens/s": 500.0}
    record |= {"entropy": 0.4, "kl/policy_generator": 1e-9, "kl/reference": 1e-3, "policy_lag": 2}
    record |= {"age/max": 2, "age/mean": 1.5, "age/1": 2, "age/2": 2, "busy/trainer": 0.5, "busy/generator": 0.9}
    # Only PPO has the critic's metrics. They are in this GRPO record so that the report of one run has the charts of PPO, too.
    record |= {"critic/explained_variance": 0.2, "critic/value_mean": 0.4, "critic/return_mean": 0.5}
    record |= {"clip_fraction": 0.3, "clip_fraction/low": 0.1, "clip_fraction/high": 0.2}
    record |= {"completion/length_mean": 2.5, "completion/length_max": 3, "completion/truncated": 0.1}
    return record | {"memory/trainer_peak": 1.5, "mfu": 0.25, "eval/reward": 0.125 * step}


def small_record(step: int) -> dict:
    """A record for which the report draws only one chart. This saves time in tests that do not test charts."""
    return {"step": step, "phase": "grpo", "loss": 0.5}


def group(step: int, is_trained: bool = True) -> dict:
    return {
        "step": step,
        "prompt": f"p{step}",
        "answer": f"a{step}",
        "completions": [f"c{step}", f"d{step}"],
        "rewards": [1.0, 0.0],
        "advantages": [0.7, -0.7],
        "lengths": [4, 8],
        "truncated": [False, True],
        "is_trained": is_trained,
    }


def sample(step: int, name: str, completion: str) -> dict:
    prompt, answer, passed = ("12+34=", "46", 4) if name else ("1+1=", "2", 3)
    line = {"step": step, "set": name, "prompt": prompt, "answer": answer, "completion": completion}
    return line | {"reward": float(completion == answer), "passed": passed, "samples": 4}


def write_run(
    path: Path,
    records: list[dict],
    rollouts: list[dict] = (),
    outcome: dict | None = None,
    samples: list[dict] = (),
) -> RunFolder:
    folder = RunFolder(path)
    folder.path.mkdir(exist_ok=True)
    folder.config.write_text(json.dumps({"seed": 7, "note": "</pre><script>"}))
    spans = [["trainer", "train", 0.0, 0.5], ["generator", "generating", 0.2, 1.5]]
    timeline = [{"step": record["step"], "seconds": 2.0, "spans": spans} for record in records if "time/step" in record]
    files = {folder.metrics: records, folder.rollouts: rollouts, folder.evaluation: samples, folder.timeline: timeline}
    for file, lines in files.items():
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if outcome:
        folder.outcome.write_text(json.dumps(outcome))
    return folder


class Tags(HTMLParser):
    def __init__(self, html: str):
        super().__init__()
        self.tags, self.attributes, self.text, self.words = [], [], "", []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data
        self.words += data.split()


def charts_of(html: str) -> dict[str, dict]:
    """The charts of a page by title."""
    [text] = re.findall(r'<script type="application/json" id="chart-data">(.*?)</script>', html)
    return {chart["title"]: chart for chart in json.loads(text)}


class Nesting(HTMLParser):
    """Finds tags that are closed in the wrong place or never."""

    EMPTY = {"meta", "link", "input", "br"}

    def __init__(self, html: str):
        super().__init__()
        self.open, self.problems = [], []
        self.feed(html)
        self.problems += [f"{tag} is never closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.problems.append(f"</{tag}> in {self.open[-3:]} at line {self.getpos()[0]}")


def episodes(step: int) -> dict:
    """A group of two episodes. In the first episode the policy has two turns, in the second it has one."""
    first = [("environment", "?", None), ("policy", "5", 0.0), ("environment", "+", None), ("policy", "<7>", 1.0)]
    second = [("environment", "?", None), ("policy", "", -0.5)]
    conversations = []
    for lines in (first, second):
        conversations.append([{"role": role, "text": text, "reward": reward} for role, text, reward in lines])
    return group(step) | {"prompt": "?", "rewards": [1.0, -0.5], "conversations": conversations}


def whole_run(path: Path) -> RunFolder:
    start = {"step": 0, "phase": "start", "eval/reward": 0.0}
    sft = [{"step": s, "phase": "sft", "loss": 2.0 - s, "time/step": 0.5, "tokens/trained": 500} for s in (1, 2)]
    sft[1]["eval/reward"] = 0.25
    grpo = [grpo_record(step) for step in range(3, 7)]
    for record, accuracy in zip(grpo, (None, None, 0.875, 0.75), strict=True):
        record["eval/reward"] = accuracy
    grpo[1] |= {"skipped": True, "loss": None, "reward/std": None}
    grpo[3] |= {"eval/hard/reward": 0.5, "eval/pass@4": 0.9}
    groups = [group(step, is_trained=step != 4) for step in range(3, 7)]
    samples = [sample(0, "", "7"), sample(0, "hard", "0"), sample(5, "", "2"), sample(5, "hard", "46")]
    outcome = {"status": "finished", "error": None, "total_steps": 6}
    return write_run(path, [start, *sft, *grpo], groups, outcome, samples)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> RunFolder:
    """A run with a report."""
    folder = whole_run(tmp_path_factory.mktemp("report") / "run")
    assert write_report(folder.path) == folder.report
    return folder


def test_an_episode_is_shown_as_a_conversation_and_each_turn_of_the_policy_has_its_reward(tmp_path):
    folder = write_run(tmp_path / "run", [small_record(1)], [episodes(1), group(1)])
    write_report(folder.path)
    html = folder.report.read_text()
    found = re.findall(r'<div class="turn (\w+)">(?:<b class="(\w*)">(.*?)</b>)?<span>(.*?)</span></div>', html)
    assert found == [
        ("environment", "", "", "?"),
        ("policy", "", "0", "5"),
        ("environment", "", "", "+"),
        ("policy", "up", "1", "&lt;7&gt;"),
        ("environment", "", "", "?"),
        ("policy", "down", "-0.5", ""),
    ]
    assert Nesting(html).problems == []
    assert html.count("<th>episode</th>") == 1 and html.count("<th>completion</th>") == 1
    assert "In an episode the turns of the policy stand at the right" in html


@pytest.fixture(scope="module")
def html(written) -> str:
    return written.report.read_text()


def test_the_report_summarizes_the_run_and_draws_every_chart(written, html):
    page = Tags(html)
    for text in (
        "0.750",
        "0.250 after the supervised steps",
        "best 0.875 at step 5",
        "2 supervised, 1 skipped",
        "5,000",
        "1.50 GiB",
        "MFU 25.0% on average",
        "finished",
        "8,000 generated",
        "0 min 9 s",
    ):
        assert text in page.text, text
    charts = charts_of(html)
    titles = {metric.chart for metric in METRICS.values() if not metric.by_phase} - {""}
    titles -= {"Pairs with a positive margin", "Loss of held-out pairs", "Probability of the answer"}
    assert set(charts) == titles | {"Loss, sft", "Loss, grpo", "Step 5: who works when"}
    curves = {curve["name"] for chart in charts.values() for curve in chart["curves"]}
    assert {"pass@4", "hard", "low side", "longest", "generate", "age 2"} <= curves
    assert charts["Entropy"]["curves"][0]["x"] == [3, 4, 5, 6]
    assert charts["Entropy"]["shaded"] == {"name": "supervised", "from": 0.5, "to": 2.5}
    assert charts["Reward"]["curves"][0]["spread"] == [0.2, 0.0, 0.2, 0.2]


def test_a_chart_of_a_kl_divergence_says_of_what_from_what(html):
    titles = [title for title in charts_of(html) if "KL" in title]
    assert titles == [
        "KL divergence of the generator from the trainer",
        "KL divergence of the policy from the reference",
    ]


def test_the_title_has_the_task_the_date_and_the_command_of_the_run(tmp_path):
    folder = write_run(tmp_path / "run", [small_record(1)])
    folder.config.write_text(json.dumps({"environment": {"task": "chain_sum"}}))
    folder.start.write_text(json.dumps({"command": "rl-actors grpo --config 'a b'", "time": "2026-11-25T14:03"}))
    write_report(folder.path)
    title, heading = re.findall(r"<title>(.*?)</title>.*<header>(.*?)</header>", folder.report.read_text(), re.DOTALL)[
        0
    ]
    assert Tags(title).text == "chain_sum · 2026-11-25 14:03 · rl-actors grpo --config 'a b'"
    assert Tags(heading).words[:4] == ["chain_sum", "2026-11-25", "14:03", "·"]
    assert "rl-actors grpo --config 'a b'" in Tags(heading).text


def test_a_mixture_is_named_by_its_tasks_and_a_run_without_a_task_by_its_folder(tmp_path):
    folder = write_run(tmp_path / "run", [small_record(1)])
    for environment, name in (({"mixture": [{"task": "a"}, {"task": "b"}]}, "a + b"), ({"task": ""}, "run")):
        folder.config.write_text(json.dumps({"environment": environment}))
        write_report(folder.path)
        assert f"<title>{name}</title>" in folder.report.read_text()


def test_a_chart_without_a_number_is_left_out(tmp_path):
    folder = write_run(tmp_path, [{"step": 1, "phase": "sft", "loss": 1.0, "entropy": None}])
    write_report(folder.path)
    assert list(charts_of(folder.report.read_text())) == ["Loss, sft"]


def test_groups_are_shown_with_their_rewards_advantages_and_lengths(html):
    page = Tags(html)
    assert re.findall(r'data-step="(\d+)" data-rewards="(\w+)"', html) == [
        *(("3", "differ"), ("4", "equal"), ("5", "differ"), ("6", "differ"))
    ]
    shown = " ".join(page.words)
    assert (
        "step 3 mean reward 0.5 answer a3 p3 completion reward advantage tokens c3 1 +0.700 4 d3 0 -0.700 8 (cut off)"
        in shown
    )
    assert page.tags.count("option") == 1 + 4 + 3 and "<option selected>6</option>" in html


def test_held_out_problems_are_shown_with_the_completions_of_the_first_and_the_last_evaluation(html):
    shown = " ".join(Tags(html).words)
    assert "set prompt answer step 0 step 5 reward passed own 1+1= 2 7 2 1 3 of 4 hard 12+34= 46 0 46 1 4 of 4" in shown


def test_the_table_has_every_metric_with_its_unit():
    records = [
        {"step": 1, "phase": "sft", "loss": 2.0},
        {"step": 2, "loss": 1.0, "time/step": 0.5, "kl/reference": 1e-3},
    ]
    assert metric_rows(records) == [
        {"name": "loss", "unit": "a token; in DPO a pair", "first": 2.0, "last": 1.0, "lowest": 1.0, "highest": 2.0},
        {"name": "time/step", "unit": "seconds", "first": 0.5, "last": 0.5, "lowest": 0.5, "highest": 0.5},
        {"name": "kl/reference", "unit": "nats a token", "first": 1e-3, "last": 1e-3, "lowest": 1e-3, "highest": 1e-3},
    ]


def test_the_report_of_a_long_run_shows_the_groups_of_evenly_spaced_steps_and_of_the_last_step(monkeypatch):
    groups = [{"step": step, "completions": ["x"] * 4} for step in range(1, 101)]
    assert shown_steps(groups) == list(range(1, 101))
    monkeypatch.setattr("controllers.observe.report.COMPLETIONS_SHOWN", 50)
    # The groups of every eighth step would have 52 completions, which is more than 50. So every ninth step is shown.
    assert shown_steps(groups) == [1, 10, 19, 28, 37, 46, 55, 64, 73, 82, 91, 100]


def test_steps_of_different_sizes_stay_within_the_limit_and_the_last_step_is_always_shown(monkeypatch):
    monkeypatch.setattr("controllers.observe.report.COMPLETIONS_SHOWN", 50)
    sizes = {1: 40, 2: 1, 3: 40, 4: 1, 5: 9}
    groups = [{"step": step, "completions": ["x"] * size} for step, size in sizes.items()]
    assert shown_steps(groups) == [2, 5]
    groups.append({"step": 6, "completions": ["x"] * 51})
    assert shown_steps(groups) == [6]
    assert shown_steps([]) == []


def test_the_report_needs_no_other_file_and_no_network(html):
    page = Tags(html)
    assert not {"img", "iframe"} & set(page.tags) and page.tags.count("link") == 1
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value.startswith(("#", "data:"))
    assert "@import" not in html and all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", html))
    assert "fetch(" not in html and "XMLHttp" not in html


def test_every_tag_of_the_report_is_closed_where_it_belongs(html):
    assert Nesting(html).problems == []


def test_the_text_of_a_model_or_a_config_is_escaped(tmp_path):
    wrong = "<script>alert(1)</script>"
    rollout = group(1) | {"prompt": wrong, "completions": ["a & b <img src=x>", "</div>"]}
    sample = {"step": 0, "set": "", "prompt": wrong, "answer": "<i>", "completion": "<u>", "reward": 0.0}
    outcome = {"status": "failed", "error": "ValueError: <b>boom</b>"}
    folder = write_run(tmp_path / "<i>run", [small_record(1)], [rollout], outcome, [sample])
    write_report(folder.path)
    page = Tags(folder.report.read_text())
    assert not {"img", "i", "u"} & set(page.tags) and page.tags.count("b") == 5 and page.tags.count("script") == 4
    for text in (wrong, "a & b <img src=x>", outcome["error"], "</pre><script>"):
        assert text in page.text


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_interrupted_run_of_any_length_has_a_report(tmp_path, num_steps):
    folder = write_run(
        tmp_path, [small_record(step) for step in range(1, num_steps + 1)], outcome={"status": "interrupted"}
    )
    with folder.metrics.open("a") as file:
        file.write('{"step": 9, "loss')
    write_report(folder.path)
    page = Tags(folder.report.read_text())
    assert "interrupted" in page.text and "none recorded" in page.text
    assert ("no steps recorded" in page.text) == (num_steps == 0)


def test_a_run_under_way_and_a_failed_run_have_a_report(tmp_path):
    for status, error, shown in (("running", None, "running or killed"), ("failed", "OSError: disk full", "disk full")):
        folder = write_run(tmp_path, [small_record(1)], outcome={"status": status, "error": error, "total_steps": 9})
        write_report(folder.path)
        assert shown in Tags(folder.report.read_text()).text


def test_the_restarts_of_a_run_are_shown_in_a_table(tmp_path):
    folder = write_run(tmp_path, [small_record(1)])
    cut_short = {"restart": 1, "time": "2026-11-23T20:00:00", "after_step": 4, "cause": "trainer: <rank 1> ended"}
    lines = [cut_short | {"first_step": None, "seconds": None}, cut_short | {"first_step": 3, "seconds": 12.5}]
    folder.restarts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(folder.path)
    html = folder.report.read_text()
    assert "Restarts after deaths of actors" in Tags(html).text and not Nesting(html).problems
    assert html.count("trainer: &lt;rank 1&gt; ended") == 2
    assert '<td class="number">3</td><td class="number">12.5</td>' in html


def test_a_report_is_the_same_every_time(written):
    before = written.report.read_bytes()
    write_report(written.path)
    assert written.report.read_bytes() == before


def test_every_color_of_a_chart_follows_dark_mode(html):
    light, dark = re.findall(r":root\{(.*?)\}", html, re.DOTALL)
    names = set(re.findall(r"--(\w+):", light))
    assert names == set(re.findall(r"--(\w+):", dark)) and set(re.findall(r"var\(--(\w+)\)", html)) <= names
    assert {curve["color"] for chart in charts_of(html).values() for curve in chart["curves"]} <= names


def test_the_command_writes_a_report_and_refuses_a_folder_without_a_run(tmp_path):
    write_run(tmp_path / "run", [small_record(1)])
    command = [sys.executable, "-m", "controllers.observe.report"]
    done = subprocess.run([*command, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, timeout=GUARD)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'run' / 'report.html'}\n"), done.stderr
    empty = subprocess.run([*command, str(tmp_path / "no")], cwd=ROOT, capture_output=True, text=True, timeout=GUARD)
    assert empty.returncode == 1 and "holds no run" in empty.stderr and "Traceback" not in empty.stderr
