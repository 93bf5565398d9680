"""Writes report.html, the report of a run, only from the files in the run's folder. The page needs no other file.

python -m controllers.observe.report RUN_FOLDER
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from jinja2 import Environment, PackageLoader, StrictUndefined

from controllers.observe.charts import Records, in_phase, run_charts, series, trained
from controllers.observe.metric_table import metric_of
from controllers.observe.run_folder import Record, RunFolder, read_jsonl

COMPLETIONS_SHOWN = 3000
"""If rollouts.jsonl has more completions than this number, the page leaves out some steps, so that a browser opens the page at once."""


def number(value: float | None) -> str:
    """number(0.123456) -> "0.1235", number(12345.6) -> "12,346", number(None) -> "–" """
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("controllers"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    return environment


def page(template: str, **values: object) -> str:
    """The HTML of a template of this package, with escaped values."""
    return _templates().get_template(template).render(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The contents of a run's files. The run may be finished, running, failed or not begun."""

    name: str
    records: Records  # lines of metrics.jsonl
    config: dict[str, object]
    outcome: dict[str, object]
    start: dict[str, object]  # command and time of the run's start
    groups: Records  # lines of rollouts.jsonl that have completions
    samples: Records  # lines of evaluation.jsonl
    timeline: Records  # lines of timeline.jsonl
    restarts: Records  # lines of restarts.jsonl

    @classmethod
    def read(cls, folder: RunFolder) -> "RunFiles":
        """The contents of the files in a folder. Raises ValueError if the folder holds no run."""
        if not folder.holds_run:
            missing = f"it has neither {folder.config.name} nor {folder.metrics.name}"
            raise ValueError(f"{folder.path} holds no run: {missing}")
        return cls(
            name=folder.path.resolve().name,
            records=read_jsonl(folder.metrics),
            config=_read_json(folder.config),
            outcome=_read_json(folder.outcome),
            start=_read_json(folder.start),
            groups=[line for line in read_jsonl(folder.rollouts) if "completions" in line],
            samples=read_jsonl(folder.evaluation),
            timeline=read_jsonl(folder.timeline),
            restarts=read_jsonl(folder.restarts),
        )

    @property
    def task(self) -> str:
        """The name of the task, or of the folder if the config has no task."""
        environment = self.config.get("environment")
        if not isinstance(environment, dict):
            return self.name
        tasks = [part.get("task") for part in environment.get("mixture") or [environment]]
        return " + ".join(task for task in tasks if task) or self.name

    @property
    def status(self) -> str:
        """Outcome of the run for the page. A killed run cannot write its outcome, so outcome.json still says "running"."""
        return str(self.outcome.get("status", "not recorded")).replace("running", "running or killed")


def _read_json(file: Path) -> dict[str, object]:
    """The object in a JSON file. Empty if the file does not exist. Raises ValueError, naming the file, if its text is not JSON."""
    if not file.exists():
        return {}
    try:
        return json.loads(file.read_text())
    except ValueError as error:  # also for bytes that are not UTF-8
        raise ValueError(f"{file} is not JSON: {error}") from None


def tiles(run: RunFiles) -> list[tuple[str, str, str]]:
    """The tiles of the summary, each as (name, value, remark)."""
    records = run.records
    training = trained(records)
    num_supervised = len(in_phase(records, "sft"))
    num_steps = len(training)
    num_skipped = sum(bool(record.get("skipped")) for record in records)
    num_trained = total(records, "tokens/trained")
    num_generated = total(records, "tokens/generated")
    seconds = total(training, "time/step")
    planned = f"{run.outcome['total_steps']:,} steps planned" if run.outcome.get("total_steps") else ""
    shown = [
        _held_out_tile(records),
        ("steps", f"{num_steps:,}", f"{num_supervised:,} supervised, {num_skipped:,} skipped"),
        ("tokens trained", f"{num_trained:,.0f}", f"{num_generated:,.0f} generated"),
        ("time in steps", minutes_text(seconds), f"{seconds / max(1, num_steps):.2f} s a step"),
    ]
    _, peaks = series(records, "memory/trainer_peak")
    if peaks:
        _, shares = series(records, "mfu")
        remark = f"MFU {fmean(shares):.1%} on average" if shares else "peak of the rank with the most memory"
        shown.append(("trainer memory", f"{max(peaks):.2f} GiB", remark))
    shown.append(("outcome", run.status, str(run.outcome.get("error") or planned)))
    return shown


def _held_out_tile(records: Records) -> tuple[str, str, str]:
    name = "held-out reward"
    steps, scores = series(records, "eval/reward")
    if not scores:
        return name, "–", "not measured"
    remarks = [f"first {scores[0]:.3f}"]
    _, supervised_scores = series(in_phase(records, "sft"), "eval/reward")
    if supervised_scores:
        remarks.append(f"{supervised_scores[-1]:.3f} after the supervised steps")
    best = max(scores)
    remarks.append(f"best {best:.3f} at step {steps[scores.index(best)]}")
    return name, f"{scores[-1]:.3f}", ", ".join(remarks)


def total(records: Records, key: str) -> float:
    return sum(series(records, key)[1])


def minutes_text(seconds: float) -> str:
    """minutes_text(61.7) -> "1 min 2 s" """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def shown_steps(groups: Records) -> list[int]:
    """The steps whose groups are on the page. The steps are evenly spaced, and together they have at most COMPLETIONS_SHOWN completions.

    The last step is always shown, even if it has more completions than that number.
    """
    num_completions: Counter[int] = Counter()
    for group in groups:
        num_completions[group["step"]] += len(group["completions"])
    steps = sorted(num_completions)
    stride = 1
    while True:
        shown = steps[::-stride][::-1]
        if len(shown) <= 1 or sum(num_completions[step] for step in shown) <= COMPLETIONS_SHOWN:
            return shown
        stride += 1


def shown_group(group: Record) -> dict[str, object]:
    """The values of a group that the template shows. If every episode of the task has one turn, every conversation is empty."""
    rewards = group["rewards"]
    cut_off = group.get("truncated") or [False] * len(rewards)
    conversations = group.get("conversations") or [[]] * len(rewards)
    columns = zip(
        group["completions"], rewards, group["advantages"], group["lengths"], cut_off, conversations, strict=True
    )
    names = ("text", "reward", "advantage", "length", "truncated", "conversation")
    return {
        "step": group["step"],
        "prompt": group["prompt"],
        "answer": group.get("answer", ""),
        "mean": fmean(rewards),
        "rewards": "differ" if group.get("is_trained", True) else "equal",
        "completions": [dict(zip(names, row, strict=True)) for row in columns],
    }


def shown_samples(samples: Records) -> dict[str, object]:
    """Held-out problems with their completions at the first and at the last evaluation. Empty if there was no evaluation."""
    if not samples:
        return {}
    first = samples[0]["step"]
    last = samples[-1]["step"]
    before = {(line["set"], line["prompt"]): line["completion"] for line in samples if line["step"] == first}
    rows = []
    for line in samples:
        if line["step"] == last:
            rows.append({**line, "before": before.get((line["set"], line["prompt"]), "")})
    return {
        "first": first,
        "last": last,
        "rows": rows,
        "has_passed": all("passed" in row for row in rows),
        "has_sets": any(row["set"] for row in rows),
    }


def metric_rows(records: Records) -> list[dict[str, object]]:
    """First, last, lowest and highest value of every metric that has a number, in the order of metrics.jsonl."""
    names = dict.fromkeys(name for record in records for name in record if name != "step")
    rows: list[dict[str, object]] = []
    for name in names:
        _, values = series(records, name)
        if values:
            extremes = {"lowest": min(values), "highest": max(values)}
            rows.append(
                {"name": name, "unit": metric_of(name).unit, "first": values[0], "last": values[-1], **extremes}
            )
    return rows


def write_report(run_folder: str | Path) -> Path:
    """Write report.html of a run, and return its path. Raises ValueError if the folder holds no run."""
    folder = RunFolder(run_folder)
    run = RunFiles.read(folder)
    steps = shown_steps(run.groups)
    date = str(run.start.get("time", "")).replace("T", " ")
    command = str(run.start.get("command", ""))
    html = page(
        "report.html.j2",
        title=" · ".join(part for part in (run.task, date, command) if part),
        task=run.task,
        facts=" · ".join(part for part in (date, run.name) if part),
        command=command,
        tiles=tiles(run),
        charts=run_charts(run.records, run.timeline),
        steps=steps,
        groups=[shown_group(group) for group in run.groups if group["step"] in set(steps)],
        has_conversations=any("conversations" in group for group in run.groups),
        groups_remark=_groups_remark(run.groups, steps),
        samples=shown_samples(run.samples),
        metrics=metric_rows(run.records),
        restarts=run.restarts,
        config=_pretty(run.config),
    )
    folder.report.write_text(html, encoding="utf-8")
    return folder.report


def _groups_remark(groups: Records, steps: Sequence[int]) -> str:
    num_steps = len({group["step"] for group in groups})
    if len(steps) == num_steps:
        return "These are all groups in rollouts.jsonl, which keeps a few groups of every step."
    return f"These are the groups of {len(steps)} of the {num_steps} steps in rollouts.jsonl, which keeps a few groups of every step."


def _pretty(config: Mapping[str, object]) -> str:
    return json.dumps(config, indent=2, ensure_ascii=False)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m controllers.observe.report RUN_FOLDER")
    try:
        print(write_report(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"error: {error}")
