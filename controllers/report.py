"""Turn a run folder into report.html, one file that needs nothing else, and reward.png. Knows only what the folder holds.

python -m controllers.report RUN_FOLDER

Charts are drawn in the light colours; in the HTML each colour is a CSS variable, which dark mode sets anew.
"""

import io
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from controllers.run_folder import RunFolder, read_jsonl

LIGHT = {"page": "#f7f7f5", "card": "#fefefe", "ink": "#1c1f26", "muted": "#667085", "line": "#e4e7ec"}
LIGHT |= {"blue": "#2563c9", "orange": "#d9660c", "green": "#15803c", "gray": "#a3abb9"}
DARK = {"page": "#15171c", "card": "#1e2128", "ink": "#e8e9ec", "muted": "#9aa3b2", "line": "#343943"}
DARK |= {"blue": "#6ea8fe", "orange": "#ff9f4a", "green": "#4fce7d", "gray": "#5d6675"}
STYLE = {
    "svg.fonttype": "none",  # text stays text, in the font of the page
    "svg.hashsalt": "report",
    **{"font.size": 9.5, "lines.linewidth": 1.7, "legend.handlelength": 1.4},
    **{"axes.titlesize": 10.5, "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlepad": 10},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.axisbelow": True},
    **{"axes.grid": True, "axes.grid.axis": "y", "xtick.major.size": 0, "ytick.major.size": 0, "ytick.minor.size": 0},
    **{"axes.edgecolor": LIGHT["line"], "grid.color": LIGHT["line"], "axes.facecolor": "none"},
    **{"text.color": LIGHT["ink"], "axes.titlecolor": LIGHT["ink"], "axes.labelcolor": LIGHT["muted"]},
    **{"xtick.color": LIGHT["muted"], "ytick.color": LIGHT["muted"], "figure.facecolor": LIGHT["card"]},
    **{"legend.frameon": False, "legend.fontsize": 9, "legend.labelcolor": LIGHT["muted"]},
}
Records = Sequence[dict[str, Any]]


def series(records: Records, key: str) -> tuple[list[int], list[float]]:
    """The steps that have a finite number at the key, and the numbers."""
    points = [(r["step"], r[key]) for r in records if isinstance(r.get(key), int | float) and math.isfinite(r[key])]
    return [step for step, _ in points], [value for _, value in points]


def draw_lines(axes: Axes, records: Records, lines: dict[str, tuple[str, str]], markers: bool = False) -> None:
    """lines: {key: (label, color)}"""
    for key, (label, color) in lines.items():
        steps, values = series(records, key)
        style: dict[str, Any] = {"marker": "o", "markersize": 3.8} if markers or len(steps) == 1 else {}
        axes.plot(steps, values, color=LIGHT[color], label=label, **style)
    shown = [value for key in lines for value in series(records, key)[1]]
    if len(lines) > 1 and min(shown) > 0:
        axes.set_yscale("log")
        axes.set_ylim(10 ** math.floor(math.log10(min(shown))), 10 ** math.ceil(math.log10(max(shown))))
        axes.yaxis.set_minor_formatter(NullFormatter())


def draw_reward(axes: Axes, records: Records) -> None:
    both = [r for r in records if r.get("reward/mean") is not None and r.get("reward/std") is not None]
    low, high = ([r["reward/mean"] + sign * r["reward/std"] for r in both] for sign in (-1, 1))
    axes.fill_between([r["step"] for r in both], low, high, color=LIGHT["blue"], alpha=0.13, linewidth=0)
    draw_lines(axes, records, {"reward/mean": ("reward of the batch, mean ± std", "blue")})
    draw_lines(axes, records, {"validation/accuracy": ("validation accuracy", "orange")}, markers=True)
    shown = series(records, "reward/mean")[1] + series(records, "validation/accuracy")[1]
    if shown and min(shown) >= 0 and max(shown) <= 1:
        axes.set_ylim(-0.03, 1.05)  # a std reaches past the rewards there are


def around_rewards(records: Records) -> Records:
    """Of the supervised steps at most as many as there are others: they have no reward, and would leave its curve no room."""
    num_others = sum(r.get("phase") != "sft" for r in records)
    return records[-2 * num_others :] if num_others else records


def draw_times(axes: Axes, records: Records) -> None:
    timed = [r for r in records if r.get("time/step") is not None]
    edges = [r["step"] - 0.5 for r in timed] + [timed[-1]["step"] + 0.5]
    below = [0.0] * len(timed)
    for name, color in {"generate": "blue", "train": "orange", "sync": "green", "other": "gray"}.items():
        known = [bottom + (r.get(f"time/{name}") or 0.0) for bottom, r in zip(below, timed, strict=True)]
        above = [max(k, r["time/step"]) for k, r in zip(known, timed, strict=True)] if name == "other" else known
        axes.stairs(above, edges, baseline=below, fill=True, color=LIGHT[color], linewidth=0, label=name)
        below = above
    axes.set_ylim(bottom=0)


def chart(title: str, draw: Callable[[Axes, Records], None], records: Records, size: tuple[float, float]) -> Figure:
    """One figure against the step, inches wide and high, with the supervised phase shaded where other steps follow it."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="step")
    if not records:
        axes.text(0.5, 0.5, "no steps recorded", ha="center", transform=axes.transAxes)
        return figure
    draw(axes, records)
    phases = {r.get("phase"): r["step"] for r in records}
    if len(phases) > 1 and "sft" in phases:
        start = records[0]["step"]
        axes.axvspan(start - 0.5, phases["sft"] + 0.5, color=LIGHT["gray"], alpha=0.15, linewidth=0, zorder=0)
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
    """The cards of the page; a chart without a number is left out."""
    sft = [r for r in records if r.get("phase") == "sft"]
    rest = [r for r in records if r.get("phase") != "sft"]
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


def tiles(records: Records, outcome: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The summary: (name, value, remark)."""
    steps, scores = series(records, "validation/accuracy")
    warm_up = [r for r in records if r.get("phase") == "sft"]
    sums = {key: sum(series(records, key)[1]) for key in ("tokens/trained", "tokens/generated", "time/step")}
    remarks = [f"first {score:.3f}" for score in scores[:1]]
    remarks += [f"{score:.3f} after warm-up" for score in series(warm_up, "validation/accuracy")[1][-1:]]
    remarks += [f"best {max(scores):.3f} at step {steps[scores.index(max(scores))]}"] if scores else ["not measured"]
    skipped = sum(bool(r.get("skipped")) for r in records)
    minutes, seconds = divmod(round(sums["time/step"]), 60)
    status = str(outcome.get("status", "not recorded")).replace("running", "running or killed")
    remark = f"{outcome['total_steps']:,} steps planned" if outcome.get("total_steps") else ""
    return [
        ("validation accuracy", f"{scores[-1]:.3f}" if scores else "–", ", ".join(remarks)),
        ("steps", f"{len(records):,}", f"{len(warm_up):,} supervised, {skipped:,} skipped"),
        ("tokens trained", f"{sums['tokens/trained']:,.0f}", f"{sums['tokens/generated']:,.0f} generated"),
        ("time in steps", f"{minutes} min {seconds} s", f"{sums['time/step'] / max(1, len(records)):.2f} s a step"),
        ("outcome", status, str(outcome.get("error") or remark)),
    ]


def rollouts_table(rollouts: Records) -> str:
    """Those of the first, the middle and the last step that has any."""
    steps = sorted({r["step"] for r in rollouts})
    steps = [*steps[:1], *steps[len(steps) // 2 :][:1], *steps[-1:]]
    chosen = [r for step in dict.fromkeys(steps) for r in rollouts if r["step"] == step]
    keys = [key for key in ("step", "prompt", "completion", "answer", "reward") if any(key in r for r in chosen)]
    rows = ["".join(f"<td><pre>{escape(str(r.get(key, '')))}</pre></td>" for key in keys) for r in chosen]
    table = "</tr>\n<tr>".join(["".join(f"<th>{key}</th>" for key in keys), *rows])
    return f"<div class=scroll><table><tr>{table}</tr></table></div>" if rows else "<p class=muted>none recorded</p>"


@matplotlib.rc_context(STYLE)
def write_report(run_folder: str | Path) -> Path:
    """Write report.html and reward.png of a run: finished, interrupted or not begun. Returns the path of report.html.

    Raises ValueError when the folder holds no run.
    """
    folder = RunFolder(run_folder)
    if not folder.holds_run:
        raise ValueError(f"{folder.path} holds no run: neither {folder.config.name} nor {folder.metrics.name} is there")
    records = read_jsonl(folder.metrics)
    config = json.loads(folder.config.read_text()) if folder.config.exists() else {}
    outcome = json.loads(folder.outcome.read_text()) if folder.outcome.exists() else {}
    figure = chart("reward and validation accuracy", draw_reward, around_rewards(records), (9, 3.8))
    figure.savefig(folder.reward_png, dpi=150, metadata={"Software": None})
    light, dark = (";".join(f"--{name}:{color}" for name, color in colors.items()) for colors in (LIGHT, DARK))
    summary = "".join(
        f"<div class=tile><h3>{escape(name)}</h3><b>{escape(value)}</b><p>{escape(remark)}</p></div>"
        for name, value, remark in tiles(records, outcome)
    )
    cards = "".join(f"<figure>{card}</figure>\n" for card in charts(records))
    folder.report.write_text(
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(folder.path.resolve().name)}</title><style>:root{{color-scheme:light dark;{light}}}
@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{CSS}</style></head><body>
<h1>{escape(folder.path.resolve().name)}</h1>
<section class=tiles>{summary}</section>
<section class=charts>{cards}</section>
<h2>Sampled rollouts</h2>
{rollouts_table(read_jsonl(folder.rollouts))}
<h2>Config</h2>
<details><summary>config.json</summary><pre>{escape(json.dumps(config, indent=2, ensure_ascii=False))}</pre></details>
</body></html>
""",
        encoding="utf-8",
    )
    return folder.report


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
