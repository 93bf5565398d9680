"""Report of a run: report.html, which needs no other file, and reward.png. It is made from the files of the run folder only.

python -m controllers.report RUN_FOLDER

Charts are drawn in the light colours. In the HTML every colour is a CSS variable, which dark mode sets to another value.
"""

import io
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from controllers.run_folder import Record, RunFolder, read_jsonl

LIGHT = {"page": "#f7f7f5", "card": "#fefefe", "ink": "#1c1f26", "muted": "#667085", "line": "#e4e7ec"}
LIGHT |= {"blue": "#2563c9", "orange": "#d9660c", "green": "#15803c", "gray": "#a3abb9"}
DARK = {"page": "#15171c", "card": "#1e2128", "ink": "#e8e9ec", "muted": "#9aa3b2", "line": "#343943"}
DARK |= {"blue": "#6ea8fe", "orange": "#ff9f4a", "green": "#4fce7d", "gray": "#5d6675"}
STYLE = {
    "svg.fonttype": "none",  # text stays text, in the font of the page
    "svg.hashsalt": "report",
    "font.size": 9.5,
    "lines.linewidth": 1.7,
    "legend.handlelength": 1.4,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.labelcolor": LIGHT["muted"],
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "axes.titlecolor": LIGHT["ink"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.facecolor": "none",
    "axes.edgecolor": LIGHT["line"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": LIGHT["line"],
    "figure.facecolor": LIGHT["card"],
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}
Records = Sequence[Record]


def series(records: Records, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that have a finite number at this key."""
    steps, values = [], []
    for record in records:
        value = record.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            steps.append(record["step"])
            values.append(value)
    return steps, values


def draw_lines(axes: Axes, records: Records, lines: dict[str, tuple[str, str]], markers: bool = False) -> None:
    """Plot one line for each entry of `lines`, {key: (label, color)}. Several lines share a logarithmic axis if all values are positive."""
    shown: list[float] = []
    for key, (label, color) in lines.items():
        steps, values = series(records, key)
        marker = "o" if markers or len(steps) == 1 else None
        axes.plot(steps, values, color=LIGHT[color], label=label, marker=marker, markersize=3.8)
        shown += values
    if len(lines) > 1 and min(shown) > 0:
        axes.set_yscale("log")
        axes.set_ylim(10 ** math.floor(math.log10(min(shown))), 10 ** math.ceil(math.log10(max(shown))))
        axes.yaxis.set_minor_formatter(NullFormatter())


def draw_reward(axes: Axes, records: Records) -> None:
    steps, low, high = [], [], []
    for record in records:
        mean, std = record.get("reward/mean"), record.get("reward/std")
        if mean is not None and std is not None:
            steps.append(record["step"])
            low.append(mean - std)
            high.append(mean + std)
    axes.fill_between(steps, low, high, color=LIGHT["blue"], alpha=0.13, linewidth=0)
    draw_lines(axes, records, {"reward/mean": ("reward of the batch, mean ± std", "blue")})
    draw_lines(axes, records, {"validation/accuracy": ("validation accuracy", "orange")}, markers=True)
    shown = series(records, "reward/mean")[1] + series(records, "validation/accuracy")[1]
    if shown and min(shown) >= 0 and max(shown) <= 1:
        axes.set_ylim(-0.03, 1.05)  # rewards are in [0, 1] here, but mean ± std goes beyond that


def around_rewards(records: Records) -> Records:
    """The records of the reward chart: at most as many supervised steps as others.

    Supervised steps come first and have no reward; many of them would leave no room for the curve.
    """
    num_others = len(grpo_steps(records))
    return records[-2 * num_others :] if num_others else records


def draw_times(axes: Axes, records: Records) -> None:
    """Stacked seconds of each step. `other` fills the rest up to the step's wall time."""
    timed = [record for record in records if record.get("time/step") is not None]
    edges = [record["step"] - 0.5 for record in timed] + [timed[-1]["step"] + 0.5]
    below = [0.0] * len(timed)
    for name, color in {"generate": "blue", "train": "orange", "sync": "green", "other": "gray"}.items():
        above = []
        for bottom, record in zip(below, timed, strict=True):
            top = bottom + (record.get(f"time/{name}") or 0.0)
            above.append(max(top, record["time/step"]) if name == "other" else top)
        axes.stairs(above, edges, baseline=below, fill=True, color=LIGHT[color], linewidth=0, label=name)
        below = above
    axes.set_ylim(bottom=0)


def supervised_steps(records: Records) -> Records:
    return [record for record in records if record.get("phase") == "sft"]


def grpo_steps(records: Records) -> Records:
    return [record for record in records if record.get("phase") not in ("start", "sft")]


def chart(title: str, draw: Callable[[Axes, Records], None], records: Records, size: tuple[float, float]) -> Figure:
    """One figure over the steps. `size` is its width and height in inches.

    The supervised phase is shaded when steps of another phase follow it.
    """
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="step")
    if not records:
        axes.text(0.5, 0.5, "no steps recorded", ha="center", transform=axes.transAxes)
        return figure
    draw(axes, records)
    supervised = supervised_steps(records)
    if 0 < len(supervised) < len(records):
        start, end = supervised[0]["step"], supervised[-1]["step"]
        axes.axvspan(start - 0.5, end + 0.5, color=LIGHT["gray"], alpha=0.15, linewidth=0, zorder=0)
        if draw is draw_reward:
            axes.text(start, 0.97, " supervised", va="top", transform=axes.get_xaxis_transform())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1.01, 1), ncols=4, borderaxespad=0.2, columnspacing=1.2)
    return figure


def inline_svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()[buffer.getvalue().index("<svg") :]
    text = re.sub(r'<metadata>.*?</metadata>| id="[A-Za-z0-9.]+_\d+"', "", text, flags=re.DOTALL)
    for name, light in LIGHT.items():
        text = text.replace(light, f"var(--{name})")
    return text


def charts(records: Records) -> list[str]:
    """The charts of the page as SVG. A chart without a number is left out."""
    sft, rest = supervised_steps(records), grpo_steps(records)
    difference = {"logprob_diff/max": ("max", "orange"), "logprob_diff/mean": ("mean", "blue")}
    plans = [
        ("loss, supervised", sft, {"loss": ("loss", "blue")}),
        ("loss, GRPO" if sft else "loss", rest, {"loss": ("loss", "blue")}),
        ("gradient norm, before clipping", records, {"grad_norm": ("grad_norm", "blue")}),
        ("learning rate", records, {"learning_rate": ("learning rate", "blue")}),
        ("logprob difference", rest, difference),
    ]
    cards = [chart("reward and validation accuracy", draw_reward, around_rewards(records), (9.6, 3.6))]
    for title, chosen, lines in plans:
        if any(series(chosen, key)[0] for key in lines):
            cards.append(chart(title, partial(draw_lines, lines=lines), chosen, (4.7, 2.6)))
    if series(records, "time/step")[0]:
        cards.append(chart("seconds", draw_times, records, (4.7, 2.6)))
    return [inline_svg(figure) for figure in cards]


def tiles(records: Records, outcome: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """The summary: (name, value, remark) of each tile."""
    num_supervised = len(supervised_steps(records))
    num_skipped = sum(bool(record.get("skipped")) for record in records)
    trained, generated = total(records, "tokens/trained"), total(records, "tokens/generated")
    seconds = total(records, "time/step")
    status = str(outcome.get("status", "not recorded")).replace("running", "running or killed")
    planned = f"{outcome['total_steps']:,} steps planned" if outcome.get("total_steps") else ""
    return [
        accuracy_tile(records),
        (
            "steps",
            f"{num_supervised + len(grpo_steps(records)):,}",
            f"{num_supervised:,} supervised, {num_skipped:,} skipped",
        ),
        ("tokens trained", f"{trained:,.0f}", f"{generated:,.0f} generated"),
        ("time in steps", minutes_text(seconds), f"{seconds / max(1, len(records)):.2f} s a step"),
        ("outcome", status, str(outcome.get("error") or planned)),
    ]


def accuracy_tile(records: Records) -> tuple[str, str, str]:
    name = "validation accuracy"
    steps, scores = series(records, "validation/accuracy")
    if not scores:
        return name, "–", "not measured"
    remarks = [f"first {scores[0]:.3f}"]
    _, supervised_scores = series(supervised_steps(records), "validation/accuracy")
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


def rollouts_table(rollouts: Records) -> str:
    """HTML table of the rollouts of the first, the middle and the last step that has rollouts."""
    steps = sorted({rollout["step"] for rollout in rollouts})
    if not steps:
        return "<p class=muted>none recorded</p>"
    shown = {steps[0], steps[len(steps) // 2], steps[-1]}
    chosen = sorted((rollout for rollout in rollouts if rollout["step"] in shown), key=lambda rollout: rollout["step"])
    keys = []
    for key in ("step", "prompt", "completion", "answer", "reward"):
        if any(key in rollout for rollout in chosen):
            keys.append(key)
    rows = ["".join(f"<th>{key}</th>" for key in keys)]
    for rollout in chosen:
        rows.append("".join(f"<td><pre>{escape(str(rollout.get(key, '')))}</pre></td>" for key in keys))
    table = "</tr>\n<tr>".join(rows)
    return f"<div class=scroll><table><tr>{table}</tr></table></div>"


@matplotlib.rc_context(STYLE)
def write_report(run_folder: str | Path) -> Path:
    """Write report.html and reward.png of a run. The run may be finished, interrupted or not begun. Returns the path of report.html.

    Raises ValueError when the folder holds no run.
    """
    folder = RunFolder(run_folder)
    if not folder.holds_run:
        raise ValueError(f"{folder.path} holds no run: it has neither {folder.config.name} nor {folder.metrics.name}")
    records = read_jsonl(folder.metrics)
    figure = chart("reward and validation accuracy", draw_reward, around_rewards(records), (9, 3.8))
    figure.savefig(folder.reward_png, dpi=150, metadata={"Software": None})
    folder.report.write_text(page(folder, records), encoding="utf-8")
    return folder.report


def page(folder: RunFolder, records: Records) -> str:
    """The HTML of the report."""
    config, outcome = read_json(folder.config), read_json(folder.outcome)
    summary = ""
    for name, value, remark in tiles(records, outcome):
        summary += f"<div class=tile><h3>{escape(name)}</h3><b>{escape(value)}</b><p>{escape(remark)}</p></div>"
    cards = "".join(f"<figure>{card}</figure>\n" for card in charts(records))
    title = escape(folder.path.resolve().name)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>:root{{color-scheme:light dark;{css_variables(LIGHT)}}}
@media(prefers-color-scheme:dark){{:root{{{css_variables(DARK)}}}}}{CSS}</style></head><body>
<h1>{title}</h1>
<section class=tiles>{summary}</section>
<section class=charts>{cards}</section>
<h2>Sampled rollouts</h2>
{rollouts_table(read_jsonl(folder.rollouts))}
<h2>Config</h2>
<details><summary>config.json</summary><pre>{escape(json.dumps(config, indent=2, ensure_ascii=False))}</pre></details>
</body></html>
"""


def read_json(file: Path) -> dict[str, object]:
    """The object in a JSON file; empty when there is no file."""
    return json.loads(file.read_text()) if file.exists() else {}


def css_variables(colors: dict[str, str]) -> str:
    """css_variables({"page": "#fff"}) -> "--page:#fff" """
    return ";".join(f"--{name}:{color}" for name, color in colors.items())


CSS = """
body{background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:0 auto;padding:24px 16px}
h1{font-size:24px;margin:0 0 16px;overflow-wrap:anywhere} h2{font-size:17px;margin:32px 0 10px} h3{font-size:13px;margin:0}
h3,.tile p,.muted,th{color:var(--muted);font-weight:normal} .tile p{font-size:13px;margin:2px 0 0;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(180px,1fr));gap:12px} .tile b{font-size:22px;line-height:1.35}
.tile,figure,.scroll,details{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.charts{display:grid;grid-template-columns:repeat(2,1fr);gap:12px;margin-top:12px} figure{margin:0} figure:first-child{grid-column:1/-1}
svg{display:block;width:100%;height:auto} svg text{font-family:system-ui,sans-serif!important}
.scroll{overflow:auto;max-height:640px} table{border-collapse:collapse;width:100%} th{text-align:left;font-size:13px}
td,th{padding:5px 12px 5px 0;vertical-align:top;border-bottom:1px solid var(--line)} tr:last-child td{border:0}
td pre{white-space:pre-wrap} summary{cursor:pointer}
pre{font:13px/1.5 ui-monospace,monospace;margin:0;overflow-wrap:anywhere} details pre{margin-top:10px;overflow:auto}
@media(max-width:720px){.charts{grid-template-columns:1fr}}
"""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m controllers.report RUN_FOLDER")
    try:
        print(write_report(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"error: {error}")
