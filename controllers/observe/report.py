"""Writes report.html, a page that needs no other file, from the files in a run's folder.

python -m controllers.observe.report RUN_FOLDER
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

from jinja2 import Environment, PackageLoader, StrictUndefined

from controllers.observe.charts import Records, in_phase, run_charts, series, trained, values
from controllers.observe.metric_table import metric_of
from controllers.observe.run_folder import Record, RunFolder, read_jsonl

COMPLETIONS_SHOWN = 3000
"""With more completions the page leaves out some steps, so that a browser opens it at once."""


def number(value: float | None) -> str:
    """number(0.123456) -> "0.1235", number(12345.6) -> "12,346", number(None) -> "–" """
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@cache
def _templates() -> Environment:
    loader = PackageLoader("controllers")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = number
    return environment


def page(template: str, **context: object) -> str:
    """The HTML of a template of this package, with escaped values."""
    return _templates().get_template(template).render(context)


class RunFiles:
    """The contents of a run's files. The run may be finished, running, failed or not begun."""

    def __init__(self, folder: RunFolder) -> None:
        """Raises ValueError if the folder holds no run."""
        if not folder.holds_run:
            missing = f"it has neither {folder.config.name} nor {folder.metrics.name}"
            raise ValueError(f"{folder.path} holds no run: {missing}")
        self.name = folder.path.resolve().name
        self.records: Records = read_jsonl(folder.metrics)
        self.config = _read_json(folder.config)
        self.outcome = _read_json(folder.outcome)
        self.start = _read_json(folder.start)
        self.groups: Records = [line for line in read_jsonl(folder.rollouts) if "completions" in line]
        self.samples: Records = read_jsonl(folder.evaluation)
        self.timeline: Records = read_jsonl(folder.timeline)
        self.restarts: Records = read_jsonl(folder.restarts)

    @property
    def task(self) -> str:
        """The folder's name if the config has no task."""
        environment = self.config.get("environment")
        if not isinstance(environment, dict):
            return self.name
        tasks = [part.get("task") for part in environment.get("mixture") or [environment]]
        return " + ".join(task for task in tasks if task) or self.name

    @property
    def status(self) -> str:
        """A killed run cannot write its outcome, so outcome.json still says "running"."""
        return str(self.outcome.get("status", "not recorded")).replace("running", "running or killed")


def _read_json(file: Path) -> dict[str, object]:
    """{} if there is no file. Raises ValueError naming the file if its text is not JSON."""
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
    num_skipped = sum(bool(record.get("skipped")) for record in records)
    seconds = total(training, "time/step")
    planned = f"{run.outcome['total_steps']:,} steps planned" if run.outcome.get("total_steps") else ""
    shown = [
        _held_out_tile(records),
        ("steps", f"{len(training):,}", f"{len(in_phase(records, 'sft')):,} supervised, {num_skipped:,} skipped"),
        (
            "tokens trained",
            f"{total(records, 'tokens/trained'):,.0f}",
            f"{total(records, 'tokens/generated'):,.0f} generated",
        ),
        ("time in steps", minutes_text(seconds), f"{seconds / max(1, len(training)):.2f} s a step"),
    ]
    if peaks := values(records, "memory/trainer_peak"):
        shares = values(records, "mfu")
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
    if supervised_scores := values(in_phase(records, "sft"), "eval/reward"):
        remarks.append(f"{supervised_scores[-1]:.3f} after the supervised steps")
    best = max(scores)
    remarks.append(f"best {best:.3f} at step {steps[scores.index(best)]}")
    return name, f"{scores[-1]:.3f}", ", ".join(remarks)


def total(records: Records, key: str) -> float:
    return sum(values(records, key))


def minutes_text(seconds: float) -> str:
    """minutes_text(61.7) -> "1 min 2 s" """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def shown_steps(groups: Records) -> list[int]:
    """Evenly spaced steps with at most COMPLETIONS_SHOWN completions, and always the last step."""
    num_completions: Counter[int] = Counter()
    for group in groups:
        num_completions[group["step"]] += len(group["completions"])
    steps = sorted(num_completions)
    shown = steps
    stride = 1
    while len(shown) > 1 and sum(num_completions[step] for step in shown) > COMPLETIONS_SHOWN:
        stride += 1
        shown = steps[::-stride][::-1]
    return shown


def shown_group(group: Record) -> dict[str, object]:
    """A group for the template. Conversations are empty if every episode has one turn."""
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
    """Held-out problems with their completions at the first and the last evaluation, if any."""
    if not samples:
        return {}
    first = samples[0]["step"]
    last = samples[-1]["step"]
    before = {(line["set"], line["prompt"]): line["completion"] for line in samples if line["step"] == first}
    shown = [line for line in samples if line["step"] == last]
    rows = [{**line, "before": before.get((line["set"], line["prompt"]), "")} for line in shown]
    return {
        "first": first,
        "last": last,
        "rows": rows,
        "has_passed": all("passed" in row for row in rows),
        "has_sets": any(row["set"] for row in rows),
    }


def metric_rows(records: Records) -> list[dict[str, object]]:
    """First, last, lowest and highest value of every metric with a number."""
    names = dict.fromkeys(name for record in records for name in record if name != "step")
    rows: list[dict[str, object]] = []
    for name in names:
        if numbers := values(records, name):
            row = {"name": name, "unit": metric_of(name).unit, "first": numbers[0], "last": numbers[-1]}
            rows.append(row | {"lowest": min(numbers), "highest": max(numbers)})
    return rows


def write_report(run_folder: str | Path) -> Path:
    """Write report.html of a run. Raises ValueError if the folder holds no run."""
    folder = RunFolder(run_folder)
    run = RunFiles(folder)
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
        config=json.dumps(run.config, indent=2, ensure_ascii=False),
    )
    folder.report.write_text(html, encoding="utf-8")
    return folder.report


def _groups_remark(groups: Records, steps: Sequence[int]) -> str:
    num_steps = len({group["step"] for group in groups})
    which = "all groups" if len(steps) == num_steps else f"the groups of {len(steps)} of the {num_steps} steps"
    return f"These are {which} in rollouts.jsonl, which keeps a few groups of every step."


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m controllers.observe.report RUN_FOLDER")
    try:
        print(write_report(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"error: {error}")
