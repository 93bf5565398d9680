"""Print or write the tables with the newest results of the benchmarks.

A row is one measurement that register.py defines. docs/speed.md shows every row with its target, and README.md shows the headline rows.
This module measures nothing.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import results
from benchmarks.harness.register import HEADLINE, TABLE, Line, TableRow, plain

ROOT = Path(__file__).parents[2]
SPEED_PAGE = ROOT / "docs" / "speed.md"
README = ROOT / "README.md"
H200 = "NVIDIA H200"
TABLE_MARKS = ("<!-- table of benchmarks: python -m benchmarks table --write -->\n", "<!-- end of the table -->\n")
HEADLINE_MARKS = (
    "<!-- headline of benchmarks: python -m benchmarks table --write -->\n",
    "<!-- end of the headline -->\n",
)
HEAD = ("row", "what it measures", "measured", "ratio", "target", "meets it", "device, date", "command")
HEADLINE_HEAD = ("row", "what it measures", "measured", "ratio", "device, date")


def gpu_here() -> str:
    """The kind of this machine's GPUs; H200 without GPUs, so that its results are shown."""
    names = results.gpus()
    return names[0] if names else H200


def newest(row: TableRow, gpu: str) -> Line | None:
    """The row's newest result, as a line of a results file. None if the row has no result.

    gpu: a kind of GPU, such as "NVIDIA H200". A row that needs GPUs has only results of this kind,
    and a row that needs no GPU only results of CPUs. A quotient is made from its rows' newest results.
    """
    if row.quotient_of:
        # Our speeds in the two rows are divided, so the baselines do not matter.
        over, under = (newest(replace(TABLE[name], compared_fields={}), gpu) for name in row.quotient_of)
        if over is None or under is None:
            return None
        speeds = over["tokens_per_second"], under["tokens_per_second"]
        date = min(over["date"], under["date"])
        text = results.against(*speeds, "tokens/s")
        return {"ratio": speeds[0] / speeds[1], "text": text, "date": date, "device": over["device"]}
    kind = gpu if row.num_gpus else results.CPU
    lines = [line for line in results.lines(row.command[0]) if results.kind(line) == kind and row.matches(line)]
    return lines[-1] if lines else None


def shown(row: TableRow, gpu: str) -> Line | None:
    """The row's newest result from this kind of GPU. If there is none, the newest result from another kind of GPU."""
    line = newest(row, gpu)
    if line is None and row.num_gpus and row.command:
        kinds = {results.kind(other) for other in results.lines(row.command[0])} - {results.CPU}
        found = [other for kind in kinds if (other := newest(row, kind)) is not None]
        line = max(found, key=lambda other: other["date"], default=None)
    return line


def misses(row: TableRow, line: Line) -> list[str]:
    """Names of the fields that miss their limit. The comparisons are negated, so that NaN misses every limit."""
    too_low = [name for name, limit in row.at_least.items() if not line[name] >= limit]
    too_high = [name for name, limit in row.at_most.items() if not line[name] <= limit]
    return too_low + too_high


def target(row: TableRow) -> str:
    """The limits of a row: "≥ 0.98, tokens/s ≥ 40,000". A limit without a name is one of the ratio."""
    limits = [(name, "≥", limit) for name, limit in row.at_least.items()]
    limits += [(name, "≤", limit) for name, limit in row.at_most.items()]
    texts = []
    for name, sign, limit in limits:
        texts.append(f"{'' if name == 'ratio' else plain(name) + ' '}{sign} {limit:,g}")
    return ", ".join(texts)


def verdict(row: TableRow, line: Line) -> str:
    """ "yes", or "misses …" with the fields that miss their limits; "" for a row without limits."""
    if not row.at_least and not row.at_most:
        return ""
    missed = misses(row, line)
    return "misses " + ", ".join(map(plain, missed)) if missed else "yes"


def markdown(gpu: str = H200) -> str:
    """The table of all rows, in Markdown. The table includes rows that were not run.

    gpu: the kind of GPU whose results are shown. A row without such a result shows a result from another kind.
    """
    rows: list[tuple[str, ...]] = []
    for name, row in TABLE.items():
        line = shown(row, gpu)
        if line is None:
            cells = ["not run", "", target(row), "not run", f"needs {row.needs}"]
        else:
            cells = [line["text"], ratio(line), target(row), verdict(row, line), _device_and_date(line)]
        rows.append((f"`{name}`", row.what, *cells, f"`make bench ROW={name}`"))
    return _markdown(HEAD, rows)


def headline(gpu: str = H200) -> str:
    """The table of the headline rows, in Markdown. Rows that were not run are left out."""
    rows: list[tuple[str, ...]] = []
    for name in HEADLINE:
        line = shown(TABLE[name], gpu)
        if line is not None:
            cells = (TABLE[name].what, line["text"], ratio(line), _device_and_date(line))
            rows.append((f"`{name}`", *cells))
    return _markdown(HEADLINE_HEAD, rows)


def _device_and_date(line: Line) -> str:
    return f"{line['device']}, {line['date'][:10]}"


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def sentence(name: str, gpu: str) -> str:
    """One line about a row's newest result: "4b-packed: ratio 1.001; target ≥ 0.98: yes"."""
    row = TABLE[name]
    line = newest(row, gpu)
    if line is None:
        return f"{name}: not run"
    figure = f"ratio {ratio(line)}" if ratio(line) else line["text"]
    judged = f"; target {target(row)}: {verdict(row, line)}" if target(row) else ""
    return f"{name}: {figure}{judged}"


def ratio(line: Line) -> str:
    """The ratio of a result to three decimals: "1.001"; "" for a result without a ratio."""
    return f"{line['ratio']:.3f}" if "ratio" in line else ""


def between(text: str, marks: tuple[str, str]) -> str | None:
    """The part of a page between two marks; None if the page lacks a mark."""
    _, _, rest = text.partition(marks[0])
    part, end, _ = rest.partition(marks[1])
    return part if end else None


def write(page: Path, marks: tuple[str, str], table: str) -> None:
    """Replace the part of a page between two marks. Exits if the page lacks a mark."""
    text = page.read_text()
    if between(text, marks) is None:
        raise SystemExit(f"{page} lacks the marks {' and '.join(mark.strip() for mark in marks)}")
    before, _, rest = text.partition(marks[0])
    _, _, after = rest.partition(marks[1])
    page.write_text(f"{before}{marks[0]}{table}{marks[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gpu",
        default=H200,
        help="kind of GPU; a row that needs a GPU shows another kind's result only if it has no result of this kind",
    )
    parser.add_argument("--headline", action="store_true", help="print only the rows that the README shows")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write the tables for {H200} into docs/speed.md and README.md, and print nothing",
    )
    arguments = parser.parse_args()
    if arguments.write:
        write(SPEED_PAGE, TABLE_MARKS, markdown())
        write(README, HEADLINE_MARKS, headline())
    else:
        print(headline(arguments.gpu) if arguments.headline else markdown(arguments.gpu), end="")


if __name__ == "__main__":
    main()
