"""Compares runs: one HTML page whose charts have a curve for each run, and a printed table.

python -m controllers.observe.compare RUN RUN [RUN …] [--output compare.html]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from controllers.command import started_as
from controllers.config_file import leaves
from controllers.observe.charts import COLORS, Records, draw, evaluation_metrics, trained, values
from controllers.observe.metric_table import METRICS
from controllers.observe.report import RunFiles, minutes_text, number, page, total
from controllers.observe.run_folder import RunFolder

LAST_VALUES = ("reward/mean", "dpo/accuracy", "entropy")
"""Metrics whose last value is a row of the table, if a run has one."""
Row = tuple[str, list[str]]  # a name, and a text for each run


def read_runs(folders: Sequence[Path]) -> dict[str, RunFiles]:
    """The runs by the names of their folders, with parent folders where names are equal: "a/run".

    Raises ValueError for a folder that is named twice or holds no run, for JSON that cannot be
    read, or for more runs than colors.
    """
    paths = [folder.resolve() for folder in folders]
    repeated = [str(path) for path in paths if paths.count(path) > 1]
    if repeated:
        raise ValueError(f"{repeated[0]} is named twice; a comparison needs distinct runs")
    if len(paths) > len(COLORS):
        raise ValueError(f"{len(paths)} runs are too many; a chart has colors for at most {len(COLORS)}")
    num_parts = 1
    while len({path.parts[-num_parts:] for path in paths}) < len(paths):
        num_parts += 1
    return {"/".join(path.parts[-num_parts:]): RunFiles(RunFolder(path)) for path in paths}


def summary(runs: dict[str, RunFiles]) -> list[Row]:
    records = [run.records for run in runs.values()]
    rows: list[Row] = [
        ("outcome", [run.status for run in runs.values()]),
        ("steps", [f"{len(trained(of_run)):,}" for of_run in records]),
    ]
    for name in dict.fromkeys(name for of_run in records for name in evaluation_metrics(of_run)):
        best = min if name.endswith("/loss") else max
        texts = []
        for of_run in records:
            scores = values(of_run, name)
            texts.append(f"{scores[-1]:.3f} (best {best(scores):.3f})" if scores else "–")
        rows.append((name, texts))
    for name in LAST_VALUES:
        last_values = [[None, *values(of_run, name)][-1] for of_run in records]
        if any(value is not None for value in last_values):
            label = f"{METRICS[name].chart}, last step ({METRICS[name].unit})"
            rows.append((label, [number(value) for value in last_values]))
    rows += [
        ("tokens trained", [f"{total(of_run, 'tokens/trained'):,.0f}" for of_run in records]),
        ("time in steps", [minutes_text(total(of_run, "time/step")) for of_run in records]),
        ("tokens a second", [number(_rate(of_run)) for of_run in records]),
        (
            "trainer memory, peak (GiB)",
            [number(max(values(of_run, "memory/trainer_peak"), default=None)) for of_run in records],
        ),
    ]
    return rows


def _rate(records: Records) -> float | None:
    seconds = total(records, "time/step")
    return total(records, "tokens/trained") / seconds if seconds else None


def differences(runs: dict[str, RunFiles]) -> list[Row]:
    configs = [dict(leaves(run.config)) for run in runs.values()]
    rows: list[Row] = []
    for name in dict.fromkeys(name for config in configs for name in config):
        texts = [str(config.get(name, "–")) for config in configs]
        if len(set(texts)) > 1:
            rows.append((name, texts))
    return rows


def write_comparison(folders: Sequence[Path], output: Path) -> dict[str, RunFiles]:
    """Raises the errors of `read_runs`, and ValueError if `output` is a folder."""
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder; it must be a file")
    runs = read_runs(folders)
    html = page(
        "compare.html.j2",
        title="Runs: " + ", ".join(runs),
        runs=dict(zip(runs, COLORS, strict=False)),
        charts=draw({name: run.records for name, run in runs.items()}),
        summary=summary(runs),
        differences=differences(runs),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(html, encoding="utf-8")
    return runs


def print_table(runs: dict[str, RunFiles], console: Console) -> None:
    table = Table("")
    for name in runs:
        table.add_column(name, overflow="fold")
    for name, texts in summary(runs):
        table.add_row(name, *texts)
    table.add_section()
    for name, texts in differences(runs):
        table.add_row(f"config: {name}", *texts)
    console.print(table)


def main() -> None:
    prog = started_as("controllers.observe.compare")
    about = "Compare runs: print a table, and write a page with the curves."
    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run; give at least two")
    output = "HTML file to write (default: compare.html)"
    parser.add_argument("--output", type=Path, default=Path("compare.html"), help=output)
    arguments = parser.parse_args()
    try:
        if len(arguments.runs) < 2:
            raise ValueError(f"{arguments.runs[0]} is the only run; a comparison needs at least two")
        runs = write_comparison(arguments.runs, arguments.output)
    except (ValueError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(2)
    print_table(runs, Console())
    print(f"page: {arguments.output}")


if __name__ == "__main__":
    main()
