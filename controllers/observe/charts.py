"""Charts of runs as data, which templates/charts.js draws. METRICS says which metrics share one."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from controllers.observe.metric_table import METRICS, key_of, metric_of
from controllers.observe.run_folder import Record

COLORS = ("blue", "orange", "green", "purple", "red", "brown", "gray")
Records = Sequence[Record]
Chart = dict[str, Any]  # charts.js lists the entries


def series(records: Records, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that have a finite number at this key."""
    steps = []
    values = []
    for record in records:
        value = record.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            steps.append(record["step"])
            values.append(value)
    return steps, values


def values(records: Records, key: str) -> list[float]:
    return series(records, key)[1]


def in_phase(records: Records, phase: str) -> Records:
    return [record for record in records if record.get("phase") == phase]


def trained(records: Records) -> Records:
    """The records of training steps of any phase. Step 0, of the phase "start", only evaluates."""
    return [record for record in records if record.get("phase") != "start"]


def evaluation_metrics(records: Records) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record if name.startswith("eval/")))


def draw(runs: Mapping[str, Records]) -> list[Chart]:
    """Of one run, or of several: then every metric has a chart, with a curve for each run."""
    charts: dict[str, Chart] = {}
    several = len(runs) > 1
    for name in _drawn_metrics(runs):
        metric = metric_of(name)
        own_title = f"{metric.chart}: {metric.title}" if several and not _is_alone(name) else metric.chart
        for (run, records), color in zip(runs.items(), itertools.cycle(COLORS), strict=False):
            for phase, chosen in _phases(records).items() if metric.by_phase else [("", records)]:
                curve = _curve(chosen, name)
                if not curve["x"]:
                    continue
                title = f"{own_title}, {phase}" if phase else own_title
                shaded = None if several else _supervised(records)
                empty = {"title": title, "unit": metric.unit, "x": "step", "scale": metric.scale, "shaded": shaded}
                chart = charts.setdefault(title, {**empty, "legend": several, "curves": []})
                if metric.unit not in chart["unit"]:
                    chart["unit"] += f", {metric.unit}"
                if several:
                    curve |= {"name": run, "color": color, "spread": [], "stacked": False}
                else:
                    curve["color"] = COLORS[len(chart["curves"]) % len(COLORS)]
                chart["curves"].append(curve)
    return list(charts.values())


def _curve(records: Records, name: str) -> dict[str, Any]:
    metric = metric_of(name)
    steps, values = series(records, name)
    spread = dict(zip(*series(records, metric.spread), strict=True))
    return {
        "name": metric.title,
        "x": steps,
        "y": [_short(value) for value in values],
        "spread": [_short(spread.get(step, 0.0)) for step in steps] if spread else [],
        "stacked": metric.is_stacked,
    }


def _phases(records: Records) -> dict[str, list[Record]]:
    phases: dict[str, list[Record]] = {}
    for record in records:
        phases.setdefault(record.get("phase", ""), []).append(record)
    return phases


def _drawn_metrics(runs: Mapping[str, Records]) -> list[str]:
    """In the order of METRICS, then metrics of your own."""
    every = list(itertools.chain(*runs.values()))
    is_late = any(record.get("age/max") for record in every)  # without a late group their ages say nothing
    names = [name for name in dict.fromkeys(itertools.chain(*every)) if metric_of(name).chart]
    positions = {key: position for position, key in enumerate(METRICS)}
    keys = {name: key_of(name) for name in names}
    names.sort(key=lambda name: (positions.get(keys[name] or "", len(positions)), name if keys[name] else ""))
    return [name for name in names if is_late or keys[name] != "age/<n>"]


def _is_alone(name: str) -> bool:
    """True if METRICS gives the metric a chart that it shares with no other metric."""
    return key_of(name) == name and [each.chart for each in METRICS.values()].count(METRICS[name].chart) == 1


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _supervised(records: Records) -> dict[str, Any] | None:
    """The supervised steps as a shaded range, if the run also has other steps."""
    steps = [record["step"] for record in in_phase(records, "sft")]
    is_part = 0 < len(steps) < len(trained(records))
    return {"name": "supervised", "from": steps[0] - 0.5, "to": steps[-1] + 0.5} if is_part else None


def timeline_chart(lines: Records) -> Chart | None:
    """Who works when in the step of median duration of the second half of timeline.jsonl."""
    later = sorted((line for line in lines[len(lines) // 2 :] if line["spans"]), key=lambda line: line["seconds"])
    if not later:
        return None
    step = later[len(later) // 2]
    colors = dict(zip(dict.fromkeys(phase for _, phase, *_ in step["spans"]), itertools.cycle(COLORS), strict=False))
    spans = [
        {"row": actor, "name": phase, "color": colors[phase], "from": start, "to": end}
        for actor, phase, start, end in step["spans"]
    ]
    return {"title": f"Step {step['step']}: who works when", "unit": "", "x": "seconds", "curves": [], "spans": spans}


def run_charts(records: Records, timeline: Records = ()) -> list[Chart]:
    spans = timeline_chart(timeline)
    return draw({"": records}) + ([spans] if spans else [])
