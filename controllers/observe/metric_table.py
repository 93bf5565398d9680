"""METRICS: how the metrics of a step are called and drawn. docs/metrics.md says what they mean."""

import re
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    title: str  # of a column of the panel, or of a curve
    unit: str = ""
    _: KW_ONLY
    scale: Literal["linear", "log", "from zero"] = "linear"
    chart: str = ""  # metrics of one chart share its axes; empty: no chart
    format: str = ".3g"  # in the panel
    by_phase: bool = False  # a chart for each phase, because the values of the phases differ in meaning
    is_stacked: bool = False  # an area on top of the chart's other areas
    spread: str = ""  # the metric that is drawn as a band around the curve


LENGTH = "Completion length"
AGE = "Age of the groups"
STEP_TIME = "Time of a step"
CLIPPED = "Clipped tokens"
VALUES = "Values and returns"
PAIRS = "Pairs with a positive margin"
DIFFERENCE = "Logprob difference of trainer and generator"
EVALUATION = "Evaluation"
BUSY = "Share of the step in which an actor works"

METRICS = {
    "reward/mean": Metric("reward", "reward", chart="Reward", format=".3f", spread="reward/std"),
    "eval/reward": Metric("held out", "reward", chart=EVALUATION, format=".3f", scale="from zero"),
    "eval/pass@<k>": Metric("pass@<k>", "probability", chart=EVALUATION, scale="from zero"),
    "eval/<name>/reward": Metric("<name>", "reward", chart=EVALUATION, scale="from zero"),
    "eval/<name>/pass@<k>": Metric("<name>/pass@<k>", "probability", chart=EVALUATION, scale="from zero"),
    "dpo/accuracy": Metric("pairs of the step", "share", chart=PAIRS, scale="from zero"),
    "eval/dpo/accuracy": Metric("held-out pairs", "share", chart=PAIRS, scale="from zero"),
    "eval/<name>/dpo/accuracy": Metric("<name>", "share", chart=PAIRS, scale="from zero"),
    "entropy": Metric("entropy", "nats a token", chart="Entropy"),
    "entropy/exact": Metric("exact", "nats a token", chart="Entropy"),
    "clip_fraction": Metric("all", "share", chart=CLIPPED, scale="from zero"),
    "clip_fraction/low": Metric("low side", "share", chart=CLIPPED, scale="from zero"),
    "clip_fraction/high": Metric("high side", "share", chart=CLIPPED, scale="from zero"),
    "kl/policy_generator": Metric("KL", "nats a token", chart="KL divergence of the generator from the trainer"),
    "kl/reference": Metric("KL", "nats a token", chart="KL divergence of the policy from the reference"),
    "critic/explained_variance": Metric("explained", "share", chart="Variance of the returns that the critic explains"),
    "critic/value_mean": Metric("value", "reward", chart=VALUES),
    "critic/return_mean": Metric("return", "reward", chart=VALUES),
    "logprob_diff/mean": Metric("mean", "nats", chart=DIFFERENCE, scale="log"),
    "logprob_diff/max": Metric("largest", "nats", chart=DIFFERENCE, scale="log"),
    "busy/trainer": Metric("trainer", "share", chart=BUSY, format=".0%", scale="from zero"),
    "busy/generator": Metric("generator", "share", chart=BUSY, format=".0%", scale="from zero"),
    "busy/reference": Metric("reference", "share", chart=BUSY, scale="from zero"),
    "busy/critic": Metric("critic", "share", chart=BUSY, scale="from zero"),
    "policy_lag": Metric("lag", "versions", chart="Policy lag", format=".2g", scale="from zero"),
    "loss": Metric("loss", "a token; in DPO a pair", chart="Loss", by_phase=True),
    "eval/dpo/loss": Metric("own", "a pair", chart="Loss of held-out pairs"),
    "eval/<name>/dpo/loss": Metric("<name>", "a pair", chart="Loss of held-out pairs"),
    "grad_norm": Metric("grad_norm", "2-norm", chart="Gradient norm, before clipping"),
    "learning_rate": Metric("lr", chart="Learning rate", format=".2e"),
    "completion/length_mean": Metric("mean", "tokens", chart=LENGTH, scale="from zero"),
    "completion/length_max": Metric("longest", "tokens", chart=LENGTH, scale="from zero"),
    "completion/truncated": Metric("cut off", "share", chart="Completions that were cut off", scale="from zero"),
    "answer_probability": Metric("answer", "probability", chart="Probability of the answer", scale="from zero"),
    "tokens/s": Metric("tokens/s", "tokens a second", chart="Speed of training", format=",.0f", scale="from zero"),
    "mfu": Metric("MFU", "share", chart="Model FLOPs utilization", scale="from zero"),
    "age/<n>": Metric("age <n>", "groups", chart=AGE, is_stacked=True),
    "time/generate": Metric("generate", "seconds", chart=STEP_TIME, format=".2f", is_stacked=True, scale="from zero"),
    "time/train": Metric("train", "seconds", chart=STEP_TIME, format=".2f", is_stacked=True, scale="from zero"),
    "time/sync": Metric("sync", "seconds", chart=STEP_TIME, format=".2f", is_stacked=True, scale="from zero"),
    "time/step": Metric("whole step", "seconds", chart=STEP_TIME, scale="from zero"),
    "loss/<metric>": Metric("<metric>", chart="Other metrics of the loss"),
}
"""Name -> description. <n> and <k> stand for a number, <name> and <metric> for any text."""

WITHOUT_CHART = (
    ("", "phase skipped nonfinite groups/refills groups/retries ratio/mean correction/mean critic/learning_rate"),
    ("", "restarts restarts/generator ranks/slowest ranks/slowest_ratio"),
    ("steps", "step"),
    ("optimizer steps", "policy_version updates updates_skipped"),
    ("reward", "reward/std reward/<name>/mean reward/component/<name> reward/kl_penalty reward/overlong_penalty"),
    ("reward", "dpo/margin dpo/reward_chosen dpo/reward_rejected"),
    ("reward", "eval/dpo/margin eval/dpo/reward_chosen eval/dpo/reward_rejected"),
    ("reward", "eval/<name>/dpo/margin eval/<name>/dpo/reward_chosen eval/<name>/dpo/reward_rejected"),
    ("reward for each nat", "kl/coefficient"),
    ("seconds", "time/push time/pull time/evaluate time/checkpoint time/values time/critic time/reference"),
    ("seconds", "time/recovery time/sleep time/release time/wake time/offload time/onload"),
    ("tokens", "tokens/trained tokens/generated"),
    ("10^12 operations", "tflops/trained"),
    ("GiB", "memory/trainer_peak"),
    ("versions", "age/mean age/max"),
    ("groups", "groups/filtered"),
    ("share", "correction/zero critic/clip_fraction"),
    ("retries", "reward/retries"),
    ("processes", "reward/processes_replaced"),
    ("turns", "episode/turns_mean"),
    ("episodes", "episode/retries"),
    ("an action", "critic/loss"),
    ("2-norm", "critic/grad_norm"),
    ("10^9 bytes", "weights/gigabytes sleep/gigabytes wake/gigabytes offload/gigabytes onload/gigabytes"),
    ("10^9 bytes a second", "weights/push_gb_per_second weights/pull_gb_per_second"),
    ("problems", "problems/skipped"),
)
"""(unit, names) of the other metrics."""
METRICS |= {name: Metric(name, unit) for unit, names in WITHOUT_CHART for name in names.split()}

PLACEHOLDERS = {"<n>": r"(\d+)", "<k>": r"(\d+)", "<name>": "(.+)", "<metric>": "(.+)"}
# The longest key first: eval/<name>/dpo/accuracy is not an accuracy of the set "<name>/dpo".
PATTERNS = {
    key: re.compile(re.sub("<[a-z]+>", lambda found: PLACEHOLDERS[found[0]], key))
    for key in sorted(METRICS, key=len, reverse=True)
    if "<" in key
}


def key_of(name: str) -> str | None:
    """key_of("age/2") -> "age/<n>"; None for a metric of your own."""
    if name in METRICS:
        return name
    return next((key for key, pattern in PATTERNS.items() if pattern.fullmatch(name)), None)


@cache
def metric_of(name: str) -> Metric:
    """With numbers and names filled in. Your own metrics share a chart up to the first slash."""
    key = key_of(name)
    if key is None:
        return Metric(name, chart=name.partition("/")[0])
    metric = METRICS[key]
    if key in PATTERNS:
        found = PATTERNS[key].fullmatch(name)
        assert found is not None
        for placeholder, value in zip(re.findall("<[a-z]+>", key), found.groups(), strict=True):
            metric = replace(metric, title=metric.title.replace(placeholder, value))
    return metric
