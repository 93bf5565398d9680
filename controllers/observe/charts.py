"""Draws the metrics of runs: charts in SVG for the HTML pages of report.py and compare.py, and the picture reward.png. PLANS lists the charts
that are drawn as curves. This module reads no file.

A record is a line of metrics.jsonl. It has the step, the phase of the run (such as "sft" or "grpo") and the metrics of the step.

A chart is drawn in the colors LIGHT. Then each color is replaced by a CSS variable, because the page has other colors in dark mode.
"""

import io
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from controllers.observe.run_folder import Record

LIGHT = {"page": "#f7f7f5", "card": "#fefefe", "ink": "#1c1f26", "muted": "#5b6577", "line": "#e4e7ec"}
LIGHT |= {"blue": "#2563c9", "orange": "#d9660c", "green": "#15803c", "gray": "#a3abb9"}
LIGHT |= {"red": "#c22f3f", "purple": "#7d3fc4", "brown": "#8a5a2b"}
DARK = {"page": "#15171c", "card": "#1e2128", "ink": "#e8e9ec", "muted": "#a3abb9", "line": "#343943"}
DARK |= {"blue": "#6ea8fe", "orange": "#ff9f4a", "green": "#4fce7d", "gray": "#5d6675"}
DARK |= {"red": "#ff7d88", "purple": "#bd94f5", "brown": "#cf9f6d"}
COLORS = ("blue", "orange", "green", "purple", "red", "brown", "gray")
SIZE = (5.2, 2.9)
"""Width and height in inches. In an SVG by matplotlib an inch is 72 units, so a chart is 374 units wide. A page shows the chart
about 420 pixels wide. So the text is only a little larger than "font.size" says."""
STYLE = {
    "svg.fonttype": "none",  # text elements instead of outlines, so that the page sets the font
    "svg.hashsalt": "report",
    "font.size": 10.5,
    "lines.linewidth": 1.7,
    "legend.handlelength": 1.4,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.labelcolor": LIGHT["muted"],
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlepad": 8,
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
    "xtick.major.pad": 6,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}
Records = Sequence[Record]
OTHER = "a phase of GRPO, PPO or of a loop of your own"
KNOWN_PHASES = ("start", "sft", "dpo")
ROLLOUT_PHASES = (OTHER,)
TRAINED_PHASES = ("sft", *ROLLOUT_PHASES, "dpo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One chart: its title, the unit of its values, and a curve for each metric."""

    title: str
    unit: str
    # {name of a metric in metrics.jsonl: name of its curve}. A comparison of runs draws only the first metric.
    # The name validation/accuracy stands for all validation metrics of completions, also in a comparison.
    metrics: dict[str, str]
    phases: tuple[str, ...] = ROLLOUT_PHASES  # the chart shows the steps of these phases of the run
    is_log: bool = False
    has_markers: bool = False
    starts_at_zero: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    name: str
    color: str
    steps: list[int]
    values: list[float]


ALL = ("start", "sft", *ROLLOUT_PHASES, "dpo")  # "start" is step 0, the validation before the first step
PLANS = (
    Plan(title="Reward, mean and standard deviation", unit="reward", metrics={"reward/mean": "reward"}),
    Plan(
        title="Validation",
        unit="reward, probability",
        metrics={"validation/accuracy": "accuracy"},
        phases=ALL,
        has_markers=True,
    ),
    Plan(
        title="Pairs with a positive margin",
        unit="share",
        metrics={"validation/dpo/accuracy": "held-out pairs", "dpo/accuracy": "pairs of the step"},
        phases=("start", "dpo"),
    ),
    Plan(title="Entropy", unit="nats a token", metrics={"entropy": "entropy"}),
    Plan(
        title="Clipped tokens",
        unit="share",
        metrics={"clip_fraction": "all", "clip_fraction/low": "low side", "clip_fraction/high": "high side"},
        starts_at_zero=True,
    ),
    Plan(
        title="KL divergence",
        unit="nats a token",
        metrics={"kl/policy_generator": "generator from trainer", "kl/reference": "policy from reference"},
    ),
    Plan(
        title="Variance that the critic explains",
        unit="share of the returns' variance",
        metrics={"critic/explained_variance": "explained variance"},
    ),
    Plan(
        title="Values and returns",
        unit="reward",
        metrics={"critic/value_mean": "value", "critic/return_mean": "return"},
    ),
    Plan(
        title="Logprob difference of trainer and generator",
        unit="nats",
        metrics={"logprob_diff/mean": "mean", "logprob_diff/max": "largest"},
        is_log=True,
    ),
    Plan(
        title="Busy",
        unit="share of the step",
        metrics={"busy/trainer": "trainer", "busy/generator": "generator", "busy/critic": "critic"},
        starts_at_zero=True,
    ),
    Plan(title="Policy lag", unit="versions", metrics={"policy_lag": "lag"}, starts_at_zero=True),
    Plan(title="Loss of the policy", unit="a token", metrics={"loss": "loss"}),
    Plan(
        title="Loss, DPO",
        unit="a pair",
        metrics={"loss": "pairs of the step", "validation/dpo/loss": "held-out pairs"},
        phases=("start", "dpo"),
    ),
    Plan(title="Loss, supervised", unit="nats a token", metrics={"loss": "loss"}, phases=("sft",)),
    Plan(title="Gradient norm, before clipping", unit="2-norm", metrics={"grad_norm": "grad_norm"}, phases=ALL),
    Plan(title="Learning rate", unit="", metrics={"learning_rate": "learning rate"}, phases=ALL),
    Plan(
        title="Completion length",
        unit="tokens",
        metrics={"completion/length_mean": "mean", "completion/length_max": "longest"},
        starts_at_zero=True,
    ),
    Plan(
        title="Completions cut off by max_tokens",
        unit="share",
        metrics={"completion/truncated": "completions cut off"},
        starts_at_zero=True,
    ),
    Plan(title="Speed", unit="trained tokens a second", metrics={"tokens/s": "tokens a second"}, phases=ALL),
    Plan(title="Model FLOPs utilization", unit="share", metrics={"mfu": "MFU"}, phases=ALL),
)


STANDARD_GROUPS = frozenset(
    (
        *("age", "answer_probability", "busy", "clip_fraction", "completion", "correction", "critic", "dpo"),
        *("entropy", "episode", "grad_norm", "groups", "kl", "learning_rate", "logprob_diff", "loss", "memory"),
        *("mfu", "nonfinite", "offload", "phase", "policy_lag", "policy_version", "problems", "ranks", "ratio"),
        *("restarts", "reward", "skipped", "sleep", "step", "tflops", "time", "tokens", "updates"),
        *("updates_skipped", "validation", "weights"),
    )
)
"""First parts of the names of the metrics that this package records; see docs/metrics.md."""


def series(records: Records, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that have a finite number at this key."""
    steps, values = [], []
    for record in records:
        value = record.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            steps.append(record["step"])
            values.append(value)
    return steps, values


def of_phases(records: Records, *phases: str) -> Records:
    """The records of these phases. OTHER stands for every phase that is not one of KNOWN_PHASES."""
    found = []
    for record in records:
        phase = record.get("phase", OTHER)
        if (phase if phase in KNOWN_PHASES else OTHER) in phases:
            found.append(record)
    return found


def own_plans(records: Records) -> list[Plan]:
    """A chart for each metric that no loop of this package records: the metrics of a loop of one's own. Names with the same part before
    the slash share a chart."""
    grouped: dict[str, dict[str, str]] = {}
    for record in records:
        for name, value in record.items():
            group = name.partition("/")[0]
            if group not in STANDARD_GROUPS and isinstance(value, int | float) and not isinstance(value, bool):
                grouped.setdefault(group, {})[name] = name
    return [Plan(title=group, unit="", metrics=metrics, phases=ALL) for group, metrics in grouped.items()]


def validation_metrics(records: Records) -> dict[str, str]:
    """The validation metrics of the records, with their names in a chart.

    {"validation/accuracy": "accuracy", "validation/hard/pass@4": "hard/pass@4"}
    """
    names = dict.fromkeys(name for record in records for name in record if name.startswith("validation/"))
    return {name: name.removeprefix("validation/") for name in names}


def metrics_of_completions(records: Records) -> dict[str, str]:
    """The validation metrics without those of held-out pairs (DPO), which have charts of their own."""
    return {key: name for key, name in validation_metrics(records).items() if "/dpo/" not in key}


def curves(plan: Plan, records: Records) -> list[Curve]:
    """The curves of a chart. A metric has a curve if at least one step has a finite number for it."""
    chosen = of_phases(records, *plan.phases)
    metrics = metrics_of_completions(records) if "validation/accuracy" in plan.metrics else plan.metrics
    colors, found = itertools.cycle(COLORS), []
    for key, name in metrics.items():
        steps, values = series(chosen, key)
        if steps:
            found.append(Curve(name=name, color=next(colors), steps=steps, values=values))
    return found


def draw_curves(axes: Axes, drawn: Sequence[Curve], plan: Plan) -> None:
    """Plot the curves. The vertical axis is logarithmic if `plan.is_log` is True and all values are positive."""
    shown = [value for curve in drawn for value in curve.values]
    for curve in drawn:
        marker = "o" if plan.has_markers or len(curve.steps) == 1 else None
        color = LIGHT[curve.color]
        axes.plot(curve.steps, curve.values, color=color, label=curve.name, marker=marker, markersize=3.6)
    if plan.is_log and min(shown) > 0:
        axes.set_yscale("log")
        axes.set_ylim(10 ** math.floor(math.log10(min(shown))), 10 ** math.ceil(math.log10(max(shown)) + 1e-9))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif plan.starts_at_zero and min(shown) >= 0:
        axes.set_ylim(0, 1.08 * max(shown) or 1)
    elif plan.has_markers and min(shown) >= 0 and max(shown) <= 1:
        axes.set_ylim(-0.03, 1.05)


def draw_spread(axes: Axes, records: Records) -> None:
    """Draw a band of one standard deviation around the mean reward."""
    steps, low, high = [], [], []
    for record in records:
        mean, std = record.get("reward/mean"), record.get("reward/std")
        if mean is not None and std is not None:
            steps.append(record["step"])
            low.append(mean - std)
            high.append(mean + std)
    axes.fill_between(steps, low, high, color=LIGHT["blue"], alpha=0.13, linewidth=0)
    rewards = series(records, "reward/mean")[1]
    if rewards and min(rewards) >= 0 and max(rewards) <= 1:
        axes.set_ylim(-0.03, 1.05)  # the mean rewards are in [0, 1]; mean ± standard deviation may go beyond


def draw_times(axes: Axes, records: Records) -> None:
    """Draw the seconds of each step as stacked areas. The topmost area, `other`, is the rest of the step's wall time."""
    edges = [record["step"] - 0.5 for record in records] + [records[-1]["step"] + 0.5]
    below = [0.0] * len(records)
    for name, color in {"generate": "blue", "train": "orange", "sync": "green", "other": "gray"}.items():
        above = []
        for bottom, record in zip(below, records, strict=True):
            top = bottom + (record.get(f"time/{name}") or 0.0)
            above.append(max(top, record["time/step"]) if name == "other" else top)
        axes.stairs(above, edges, baseline=below, fill=True, color=LIGHT[color], linewidth=0, label=name)
        below = above
    axes.set_ylim(bottom=0)


def timeline_chart(lines: Records) -> str:
    """The spans of one step as a chart in SVG; "" if there are no spans. lines: the lines of timeline.jsonl.

    A span is (actor, phase, start, end): the time in which an actor works on a phase of the step, such as "train". Start and end are
    seconds since the beginning of the step. The chart shows the step of median duration in the second half of the run.
    """
    later = sorted((line for line in lines[len(lines) // 2 :] if line["spans"]), key=lambda line: line["seconds"])
    if not later:
        return ""
    step = later[len(later) // 2]
    actors = list(dict.fromkeys(actor for actor, *_ in step["spans"]))
    colors = dict(zip(dict.fromkeys(phase for _, phase, *_ in step["spans"]), itertools.cycle(COLORS), strict=False))
    figure, axes = new_chart(f"Step {step['step']}: who works when", "")
    named = set()
    for actor, phase, start, end in step["spans"]:
        label = None if phase in named else phase
        axes.barh(actors.index(actor), end - start, left=start, height=0.55, color=LIGHT[colors[phase]], label=label)
        named.add(phase)
    axes.set_yticks(range(len(actors)), actors)
    axes.set_ylim(len(actors) - 0.5, -0.5)
    axes.set_xlim(0, step["seconds"])
    axes.set_xlabel("seconds")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.grid(axis="x")
    axes.grid(axis="y", visible=False)
    add_legend(axes, at_least=1)
    return inline_svg(figure)


def ages_chart(records: Records) -> str:
    """The number of groups of each age in every step, as a chart in SVG; "" if all groups have the age 0.

    A group is all completions of one prompt. Its age is the trainer's version when the step begins, minus the version that sampled the
    group's oldest token.
    """
    steps = [record for record in of_phases(records, *ROLLOUT_PHASES) if record.get("age/max") is not None]
    oldest = int(max((record["age/max"] for record in steps), default=0))
    if oldest == 0:
        return ""
    figure, axes = new_chart("Age of the groups", "groups")
    edges = [record["step"] - 0.5 for record in steps] + [steps[-1]["step"] + 0.5]
    below = [0.0] * len(steps)
    colors = itertools.cycle(COLORS)
    for age in range(oldest + 1):
        counts = [record.get(f"age/{age}") or 0 for record in steps]
        if any(counts):
            above = [bottom + count for bottom, count in zip(below, counts, strict=True)]
            color, label = LIGHT[next(colors)], f"{age} version{'s' * (age != 1)}"
            axes.stairs(above, edges, baseline=below, fill=True, color=color, linewidth=0, label=label)
            below = above
    axes.set_ylim(bottom=0)
    add_legend(axes, at_least=1)
    return inline_svg(figure)


def new_chart(title: str, unit: str, size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    """An empty chart whose horizontal axis shows the steps. size: width and height of the chart in inches."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="step", ylabel=unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    return figure, axes


def add_legend(axes: Axes, *, at_least: int = 2) -> None:
    """Add a legend under the chart, if at least `at_least` curves or areas have a name."""
    labels = axes.get_legend_handles_labels()[1]
    if len(labels) >= at_least:
        columns = 2 if max(map(len, labels)) > 16 else 4
        axes.figure.legend(loc="outside lower left", ncols=columns, columnspacing=1.2, borderaxespad=0.2)


def inline_svg(figure: Figure) -> str:
    """The figure as an SVG element whose colors are CSS variables of the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()[buffer.getvalue().index("<svg") :]
    text = re.sub(r'<metadata>.*?</metadata>| id="[A-Za-z0-9.]+_\d+"', "", text, flags=re.DOTALL)
    for name, light in LIGHT.items():
        text = text.replace(light, f"var(--{name})")
    return text


def chart(plan: Plan, drawn: Sequence[Curve], records: Records = ()) -> str:
    """One chart as SVG.

    records: the records of one run, if all curves belong to that run; empty if each curve belongs to a run of its own.
    With records, the chart of the reward also shows the standard deviation of the rewards, and a chart of all phases shades the
    supervised steps.
    """
    figure, axes = new_chart(plan.title, plan.unit)
    if "reward/mean" in plan.metrics and records:
        draw_spread(axes, of_phases(records, *plan.phases))
    draw_curves(axes, drawn, plan)
    supervised = of_phases(records, "sft")
    if supervised and set(plan.phases) == set(ALL) and len(supervised) < len(records):
        start, end = supervised[0]["step"], supervised[-1]["step"]
        axes.axvspan(start - 0.5, end + 0.5, color=LIGHT["gray"], alpha=0.15, linewidth=0, zorder=0)
    add_legend(axes, at_least=2 if records else 1)
    return inline_svg(figure)


def times_chart(records: Records) -> str:
    """The seconds of the steps as a chart in SVG; "" if no step has a time."""
    timed = [record for record in of_phases(records, *TRAINED_PHASES) if record.get("time/step") is not None]
    if not timed:
        return ""
    figure, axes = new_chart("Time of a step", "seconds")
    draw_times(axes, timed)
    add_legend(axes)
    return inline_svg(figure)


@matplotlib.rc_context(STYLE)
def run_charts(records: Records, timeline: Records = ()) -> list[str]:
    """All charts of one run. A chart with nothing to draw is left out. timeline: the lines of timeline.jsonl."""
    charts = []
    for plan in [*PLANS, *own_plans(records)]:
        drawn = curves(plan, records)
        if drawn:
            charts.append(chart(plan, drawn, records))
    others = [ages_chart(records), times_chart(records), timeline_chart(timeline)]
    return [*charts, *(drawn for drawn in others if drawn)]


@matplotlib.rc_context(STYLE)
def compared_charts(runs: dict[str, Records]) -> list[str]:
    """Charts with a curve for each run. They show the first metric of every plan, every validation metric of completions and the time of a step."""
    reward = Plan(title="Reward", unit="mean reward", metrics={"reward/mean": ""})
    plans = [plan for plan in PLANS[1:] if "validation/accuracy" not in plan.metrics]
    validated = dict.fromkeys(name for records in runs.values() for name in metrics_of_completions(records))
    validations = []
    for name in validated:
        title = "Validation " + name.removeprefix("validation/")
        unit = "probability" if "pass@" in name else "mean reward"
        validations.append(Plan(title=title, unit=unit, metrics={name: ""}, phases=ALL, has_markers=True))
    times = Plan(title="Time of a step", unit="seconds", metrics={"time/step": ""}, phases=TRAINED_PHASES)
    charts = []
    for plan in [reward, *validations, *plans, times]:
        drawn = []
        key = next(iter(plan.metrics))
        for (name, records), color in zip(runs.items(), itertools.cycle(COLORS), strict=False):
            steps, values = series(of_phases(records, *plan.phases), key)
            if steps:
                drawn.append(Curve(name=name, color=color, steps=steps, values=values))
        if drawn:
            charts.append(chart(plan, drawn))
    return charts


@matplotlib.rc_context(STYLE)
def save_reward_png(records: Records, file: Path) -> None:
    """Draw rewards and validation accuracies in one picture, and write it to a PNG file."""
    figure, axes = new_chart("reward and validation accuracy", "", size=(9, 3.8))
    chosen = around_rewards(records)
    draw_spread(axes, chosen)
    rewards, accuracies = series(chosen, "reward/mean"), series(chosen, "validation/accuracy")
    if not rewards[0] and not accuracies[0]:
        axes.text(0.5, 0.5, "no reward recorded", ha="center", transform=axes.transAxes)
    axes.plot(*rewards, color=LIGHT["blue"], label="reward of the batch, mean ± standard deviation")
    axes.plot(*accuracies, color=LIGHT["orange"], label="validation accuracy", marker="o", markersize=3.8)
    add_legend(axes)
    figure.savefig(file, dpi=150, metadata={"Software": None})


def around_rewards(records: Records) -> Records:
    """The records that reward.png shows. If there are GRPO or PPO steps, at most half of the records belong to other steps.

    The other steps are step 0 and the supervised steps, which come first and have no reward. If reward.png showed very many supervised
    steps, the curve of rewards would be too narrow.
    """
    num_rollout_steps = len(of_phases(records, *ROLLOUT_PHASES))
    return records[-2 * num_rollout_steps :] if num_rollout_steps else records
