"""The table of the README from the newest lines of benchmarks/results: every row, its target, whether it is met. Measures nothing."""

import argparse
from pathlib import Path

from benchmarks.harness import results
from benchmarks.harness.register import TABLE, Line, TableRow, plain

H200 = "NVIDIA H200"
README = Path(__file__).parents[2] / "README.md"
MARKS = ("<!-- table of benchmarks: python -m benchmarks table --write -->\n", "<!-- end of the table -->\n")
HEAD = ("row", "what", "measured", "ratio", "target", "meets it", "device, date", "again")


def newest(row: TableRow, gpu: str, since: str = "") -> Line | None:
    """The row's newest line from this kind of device (`gpu`, or a CPU where it needs none), with the others of its file; None: not run.

    A quotient has the lines of its two rows; a line with an error is no result. since: in UTC, as a line's date; older lines are not there.
    """
    if row.quotient_of:
        over, under = (newest(TABLE[name], gpu, since) for name in row.quotient_of)
        if over is None or under is None:
            return None
        older = min(over, under, key=lambda line: line["date"])
        ratio = over["tokens_per_second"] / under["tokens_per_second"]
        return {"ratio": ratio, "over": over, "under": under, "date": older["date"], "device": over["device"]}
    kind = gpu if row.num_gpus else results.CPU
    lines = [line for line in results.lines(row.command[0]) if results.kind(line) == kind and line["date"] >= since]
    by_name = {line["name"]: line for line in lines if "error" not in line}
    return by_name[row.line] | {"file": by_name} if row.line in by_name else None


def misses(row: TableRow, line: Line) -> list[str]:
    """Fields on the wrong side of their limit; what is not a number is."""
    low = [name for name, limit in row.at_least.items() if not line[name] >= limit]
    return low + [name for name, limit in row.at_most.items() if not line[name] <= limit]


def target(row: TableRow) -> str:
    signs = (("≥", row.at_least), ("≤", row.at_most))
    limits = [(name, limit, f"{sign} {limit:,g}") for sign, of in signs for name, limit in of.items()]
    return ", ".join(
        plain(name) if limit is True else text if name == "ratio" else f"{plain(name)} {text}"
        for name, limit, text in limits
    )


def verdict(row: TableRow, line: Line) -> str:
    if not row.at_least and not row.at_most:
        return ""
    return "misses " + ", ".join(map(plain, missed)) if (missed := misses(row, line)) else "yes"


def markdown(gpu: str = H200) -> str:
    rows = [HEAD, ("---",) * len(HEAD)]
    for name, row in TABLE.items():
        line = newest(row, gpu)
        if line is None:
            cells = ["not run", "", target(row), "not run", f"needs {row.needs}"]
        else:
            cells = [row.measured(line), ratio(line), target(row), verdict(row, line)]
            cells.append(f"{line['device']}, {line['date'][:10]}")
        rows.append((f"`{name}`", row.what, *cells, f"`make bench ROW={name}`"))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def sentence(name: str, gpu: str) -> str:
    """What a row's newest result says, in a line."""
    row = TABLE[name]
    line = newest(row, gpu)
    if line is None:
        return f"{name}: not run"
    judged = f"; target {target(row)}: {verdict(row, line)}" if target(row) else ""
    return f"{name}: {f'ratio {ratio(line)}' if ratio(line) else row.measured(line)}{judged}"


def ratio(line: Line) -> str:
    return f"{line['ratio']:.3f}" if "ratio" in line else ""


def write(readme: Path) -> None:
    """Put the table between its marks."""
    before, _, rest = readme.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    if not rest or MARKS[1] not in rest:
        raise SystemExit(f"{readme} lacks the marks of the table")
    readme.write_text(f"{before}{MARKS[0]}{markdown()}{MARKS[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default=H200, help="the kind of GPU whose results count")
    parser.add_argument("--write", action="store_true", help=f"into the README: that of an {H200}")
    arguments = parser.parse_args()
    if arguments.write:
        write(README)
    else:
        print(markdown(arguments.gpu), end="")


if __name__ == "__main__":
    main()
