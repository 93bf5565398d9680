"""Writes a run's metrics to the display, to files and to trackers.

Steps count from 1, through all phases; step 0 is the evaluation before the first.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from rich.console import Console

from controllers.observe.display import LineDisplay, LiveDisplay
from controllers.observe.run_folder import Record, RunFolder, naming, to_json, to_plain
from controllers.observe.timeline import StepTimeline, Timeline
from controllers.observe.trackers import Trackers
from rl_actors import TrainerInfo
from rl_actors.model_flops import peak_flops
from rl_actors.types import Transfer

KEYS = (
    *("policy_version", "reward/mean", "reward/std", "loss", "grad_norm", "learning_rate"),
    *("logprob_diff/mean", "logprob_diff/max", "kl/policy_generator", "groups/filtered"),
    *("completion/length_mean", "completion/length_max", "completion/truncated"),
    *("tokens/trained", "tokens/generated", "tokens/s", "tflops/trained", "memory/trainer_peak"),
    *("time/generate", "time/train", "time/sync", "time/step"),
)
"""Keys of every record, null if the step has no value."""


class Timer:
    """Seconds of each phase since the last reset: with timer("generate"): …"""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.timeline = Timeline()
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with self.timeline.span(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def reset(self) -> dict[str, float]:
        """{"time/generate": …, "time/step": wall time}, then from zero again."""
        now = time.perf_counter()
        times = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        times["time/step"] = now - self._start
        self.seconds = {}
        self._start = now
        return times


def speed_metrics(values: Mapping[str, float], infos: Sequence[TrainerInfo], *, float8: bool) -> dict[str, float]:
    """Speed of a step and memory of the trainer. infos: of each rank.

    MFU: FLOPs of matrix products and attention, forward and backward, without recomputation, over
    what all GPUs could do in time/train. Left out without training or a known peak.
    """
    found = {"memory/trainer_peak": max(info.peak_memory_bytes for info in infos) / 2**30}
    if values.get("tokens/trained") and values["time/step"]:
        found["tokens/s"] = values["tokens/trained"] / values["time/step"]
    peak = peak_flops(infos[0].device_name, float8=float8)
    if peak is not None and values.get("tflops/trained") and values.get("time/train"):
        found["mfu"] = values["tflops/trained"] * 1e12 / (values["time/train"] * peak * len(infos))
    return found


def transfers(push: Transfer | None, pull: Transfer | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, transfer in (("push", push), ("pull", pull)):
        if transfer is not None:
            found["weights/gigabytes"] = transfer.num_bytes / 1e9
            found[f"time/{name}"] = transfer.seconds
            found[f"weights/{name}_gb_per_second"] = transfer.gb_per_second
    return found


class MetricsLogger(AbstractContextManager):
    """Writes each step's metrics; at the end of `with`, the outcome of the run.

    with MetricsLogger(RunFolder(path), total_steps=200) as log:
        log.step(1, {"loss": 0.7, **timer.reset()}, phase="grpo")
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        total_steps: int | None = None,  # None: not known yet; set `log.display.total_steps` later
        steps_done: int = 0,  # a resumed run repeats later steps, so their lines are removed
        trackers: Sequence[str] = ("tensorboard",),
        project: str = "rl-actors",  # in trackers that have projects
        config: Mapping[str, object] | None = None,  # that trackers show
        groups_per_step: int = 4,  # at most, in rollouts.jsonl
        prints_lines: bool = False,  # no live panel, which log lines on the same terminal would break
        console: Console | None = None,  # None: stdout
    ):
        folder.path.mkdir(parents=True, exist_ok=True)
        # -1: a run resumed at 0 repeats step 0, too
        self._last_step = steps_done or -1
        self.folder = folder
        self._groups_per_step = groups_per_step
        folder.drop_after(self._last_step)
        for path in folder.step_files:
            path.touch()
        self._trackers = Trackers(trackers, folder, project=project, config=config or {}, steps_done=steps_done)
        self._tracked_step = self._last_step  # the last step that the trackers have
        self._tables: dict[str, int] = {}  # name of a table -> the last step whose table the trackers have
        console = console or Console()
        live = console.is_terminal and not prints_lines
        self.display: LineDisplay = (LiveDisplay if live else LineDisplay)(console, total_steps)
        self._write_outcome("running")

    @property
    def last_step(self) -> int:
        """The last step with a record, or 0."""
        return max(0, self._last_step)

    def rewind(self, steps_done: int) -> None:
        """Drop the lines of later steps, which the run repeats. Trackers keep theirs."""
        self._last_step = steps_done or -1
        self.folder.drop_after(self._last_step)

    def setup(self, label: str) -> AbstractContextManager[None]:
        return self.display.setup(label)

    def note(self, line: str) -> None:
        self.display.print(line)

    def step(self, step: int, metrics: Mapping[str, object], *, phase: str, skipped: bool = False) -> None:
        """phase: such as "sft". The record's `nonfinite` lists metrics that were NaN or infinite."""
        if step <= self._last_step:
            raise ValueError(
                f"step {step} after step {self._last_step}: each step is recorded once, in ascending order"
            )
        self._last_step = step
        record: Record = {"step": step, "phase": phase} | dict.fromkeys(KEYS) | to_plain(metrics)
        if skipped:
            record["skipped"] = True
        nonfinite = [key for key, value in metrics.items() if value is not None and record[key] is None]
        if nonfinite:
            record["nonfinite"] = nonfinite
        self._append(self.folder.metrics, [record])
        self.display.step(record)
        if step > self._tracked_step:  # False if a recovered run repeats a step: the trackers already have it
            self._tracked_step = step
            scalars = {key: value for key, value in record.items() if key != "step" and type(value) in (int, float)}
            self._trackers.log(step, scalars)

    def rollouts(self, step: int, groups: Sequence[Record]) -> None:
        """groups: {"prompt", "completions", "rewards", "advantages", "lengths"}. Some are written and shown."""
        stride = max(1, len(groups) // self._groups_per_step)
        kept = [{"step": step, **group} for group in groups[::stride][: self._groups_per_step]]
        self._append(self.folder.rollouts, kept)
        self._log_table(step, "rollouts", [row for group in kept for row in completions_of(group)])

    def evaluation(self, step: int, samples: Sequence[Record]) -> None:
        """Write completions of held-out problems to evaluation.jsonl and to trackers."""
        kept = [{"step": step, **sample} for sample in samples]
        self._append(self.folder.evaluation, kept)
        self._log_table(step, "evaluation_samples", kept)

    def timeline(self, step: int, timeline: StepTimeline) -> None:
        self._append(self.folder.timeline, [{"step": step, **timeline.record()}])

    def _log_table(self, step: int, name: str, rows: Sequence[Record]) -> None:
        """Unless the trackers have one of this name from this or a later step."""
        if self._tables.get(name, -1) < step:
            self._tables[name] = step
            self._trackers.log_table(step, name, rows)

    def _append(self, path: Path, records: Sequence[Record]) -> None:
        with naming(path), path.open("a") as file:
            file.write("".join(to_json(record) + "\n" for record in records))

    def _write_outcome(self, status: str, error: str | None = None) -> None:
        outcome = {"status": status, "error": error, "step": self.last_step, "total_steps": self.display.total_steps}
        self.folder.outcome.write_text(to_json(outcome) + "\n")

    def __exit__(self, kind, error, traceback) -> None:
        self.display.close()
        if isinstance(error, Exception):
            # an error here, such as a full disk, would hide the run's
            with suppress(OSError):
                self._write_outcome("failed", f"{kind.__name__}: {error}")
        elif error is not None:  # Interrupted, CancelledError, KeyboardInterrupt, SystemExit
            self._write_outcome("interrupted", str(error) or kind.__name__)
        else:
            whole = self._last_step >= (self.display.total_steps or 0)
            self._write_outcome("finished" if whole else "stopped early")
        self._trackers.finish(failed=error is not None)


def completions_of(group: Record) -> list[Record]:
    """A table's rows, one per completion. group: a line of rollouts.jsonl."""
    columns = {"completion": "completions", "reward": "rewards", "advantage": "advantages", "length": "lengths"}
    rows = []
    for index in range(len(group["completions"])):
        row: Record = {"step": group["step"], "prompt": group["prompt"]}
        rows.append(row | {name: group[values][index] for name, values in columns.items()})
    return rows
