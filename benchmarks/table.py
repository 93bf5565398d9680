"""The table of the README from the newest lines of benchmarks/results: every row, its target, whether it is met. Measures nothing.

TABLE is the one register of rows: `make bench` lists it, `make bench ROW=NAME` measures one, `make bench ROW=missing` the rest.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.rows import ROWS

H200 = "NVIDIA H200"
README = Path(__file__).parents[1] / "README.md"
MARKS = ("<!-- table of benchmarks: python -m benchmarks table --write -->\n", "<!-- end of the table -->\n")
HEAD = ("row", "what", "measured", "ratio", "target", "meets it", "device, date", "again")

Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """What measures it, which line of benchmarks/results holds it, what it should reach."""

    what: str
    num_gpus: int  # at least; 0: a machine without any
    command: tuple[str, ...] = ()  # of `python -m benchmarks`; the first word names the file of results, too
    argument: str = ""  # behind it; one process measures all rows of the same command
    line: str = ""
    measured: Callable[[Line], str]  # what the table says of what `newest` gives
    at_least: dict[str, float] = field(default_factory=dict)  # field of the line -> limit
    at_most: dict[str, float] = field(default_factory=dict)
    quotient_of: tuple[str, ...] = ()  # two other rows: the ratio is of their tokens/s, and there is no command

    @property
    def needs(self) -> str:
        return f"{self.num_gpus} GPU{'s' * (self.num_gpus > 1)}" if self.num_gpus else results.CPU

    def runs_here(self) -> bool:
        count = len(results.gpus())
        return 0 < self.num_gpus <= count if count else self.num_gpus == 0


def newest(row: TableRow, gpu: str, since: str = "") -> Line | None:
    """The row's newest line from this kind of device (`gpu`, or a CPU where it needs none), with the others of its file; None: not run.

    A quotient has the lines of its two rows. since: in UTC, as a line's date; older lines are not there.
    """
    if row.quotient_of:
        over, under = (newest(TABLE[name], gpu, since) for name in row.quotient_of)
        if over is None or under is None:
            return None
        older = min(over, under, key=lambda line: line["date"])
        ratio = over["tokens_per_second"] / under["tokens_per_second"]
        return {"ratio": ratio, "over": over, "under": under, "date": older["date"], "device": older["device"]}
    kind = gpu if row.num_gpus else results.CPU
    lines = [line for line in results.lines(row.command[0]) if results.kind(line) == kind and line["date"] >= since]
    by_name = {line["name"]: line for line in lines}
    return by_name[row.line] | {"file": by_name} if row.line in by_name else None


def misses(row: TableRow, line: Line) -> list[str]:
    """Fields on the wrong side of their limit; what is not a number is."""
    low = [name for name, limit in row.at_least.items() if not line[name] >= limit]
    return low + [name for name, limit in row.at_most.items() if not line[name] <= limit]


def target(row: TableRow) -> str:
    signs = (("≥", row.at_least), ("≤", row.at_most))
    limits = [(name, f"{sign} {limit:,g}") for sign, of in signs for name, limit in of.items()]
    return ", ".join(text if name == "ratio" else f"{_plain(name)} {text}" for name, text in limits)


def verdict(row: TableRow, line: Line) -> str:
    if not row.at_least and not row.at_most:
        return ""
    return "misses " + ", ".join(map(_plain, missed)) if (missed := misses(row, line)) else "yes"


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


def _plain(name: str) -> str:
    return name.replace("_per_second", "/s").replace("_", " ")


def _beside(line: Line) -> str:
    """tokens_per_second and the one other field that ends so."""
    (other,) = (value for name, value in line.items() if name.endswith("_tokens_per_second"))
    return f"{line['tokens_per_second']:,.0f} beside {other:,.0f} tokens/s"


def _training(line: Line) -> str:
    use = f"MFU {line['mfu_torchtitan']:.3f}, causal {line['mfu_causal']:.3f}; " if line["num_gpus"] else ""
    peaks = f"peak {line['peak_gib']:.1f} beside {line['reference_peak_gib']:.1f} GiB; " if line["num_gpus"] else ""
    kernels = f"{line['attention']} beside {line['reference_attention']}" if line["num_gpus"] else ""
    return f"{_beside(line)}; {use}{peaks}{kernels}".removesuffix("; ")


def _overhead(line: Line) -> str:
    return f"{line['client_seconds'] * 1e3:,.0f} beside {line['engine_seconds'] * 1e3:,.0f} ms"


def _grpo_step(line: Line) -> str:
    """Seconds of the step and of every phase, and how busy each GPU was, the trainer's first; the rest of the step it was idle."""
    model = line["name"].removesuffix("step")
    phases = [phase for name, phase in line["file"].items() if name.startswith(model) and name != line["name"]]
    named = [f"{phase['name'].removeprefix(model)} {phase['seconds']:.3g} s{_gpus(phase)}" for phase in phases]
    return "; ".join([f"step {line['seconds']:.3g} s{_gpus(line, idle=True)}", *named])


def _gpus(line: Line, *, idle: bool = False) -> str:
    busy = [line[name] for name in sorted(line) if name.endswith("_busy")]
    shares = ", ".join(f"{1 - share if idle else share:.0%}" for share in busy)
    return f" ({'idle' if idle else 'busy'} {shares})" if shares else ""


def _agreement(line: Line) -> str:
    return (
        f"mean difference {line['difference_mean']:.1e}; worst token {line['difference_max']:.1e}; KL {line['kl']:.1e}; "
        f"entropy {line['entropy'][0]:.2f} to {line['entropy'][1]:.2f} nats; {line['turns']} turns"
    )


def _quotient(line: Line) -> str:
    return f"{line['over']['tokens_per_second']:,.0f} beside {line['under']['tokens_per_second']:,.0f} tokens/s"


SPEEDS = {"0_6b-16k": 40_000, "0_6b-64k": 14_500, "0_6b-packed": 88_000, "4b-16k": 11_000}  # tokens/s
CALLERS, ONE_CALL, STEP = "32 callers, 1 prompt x 64 each", "one generate, 256 prompts x 64", "step of 1,024 samples"


def _trainer_row(name: str) -> TableRow:
    row, speed = ROWS[name], SPEEDS.get(name.removesuffix("-kept"))
    return TableRow(
        what=f"training beside torchtitan's pieces: {row.model}{', float8' * row.float8}, documents of {row.document:,} in rows of "
        f"{row.row_length:,}{', nothing computed twice' * (row.checkpointing == 'none')}",
        num_gpus=row.num_gpus,
        command=("trainer_speed", name),
        line=name,
        measured=_training,
        at_least={"ratio": 0.98} | ({"tokens_per_second": speed} if speed else {}) if row.num_gpus else {},
    )


def _generation_row(model: str, requests: int, num_gpus: int) -> TableRow:
    return TableRow(
        what=f"generation, {requests:,} requests at once, beside the bare engine",
        num_gpus=num_gpus,
        command=("generation", "--model", model, "--requests"),
        argument=str(requests),
        line=f"{model} {requests} requests",
        measured=_beside,
        at_least={"ratio": 0.95} if num_gpus else {},
    )


def _grpo_row(model: str, num_gpus: int, *arguments: str) -> TableRow:
    return TableRow(
        what="a synchronous GRPO step taken apart",
        num_gpus=num_gpus,
        command=("grpo_step", "--model", model, *arguments),
        line=f"{model} step",
        measured=_grpo_step,
    )


def _packing_row(num_gpus: int, *arguments: str) -> TableRow:
    return TableRow(
        what="samples packed beside padded to 4,096",
        num_gpus=num_gpus,
        command=("packing", *arguments),
        line="packed",
        measured=_beside,
        at_least={"ratio": 3.8} if num_gpus else {},
    )


def _agreement_row(model: str, num_gpus: int) -> TableRow:
    return TableRow(
        what="logprobs of generator and trainer in bfloat16, the worst of all turns",
        num_gpus=num_gpus,
        command=("logprob_agreement", "--model", model),
        line=f"{model} worst of all steps",
        measured=_agreement,
        at_least={"turns": 50} if num_gpus else {},
        at_most={"difference_mean": 0.02, "kl": 1e-3} if num_gpus else {},
    )


def _overhead_row(line: str, part: str, **limits: dict[str, float]) -> TableRow:
    return TableRow(
        what=f"{line}, through the client beside the engine alone",
        num_gpus=0,
        command=("overhead", "--repeats", "9"),
        argument=part,
        line=line,
        measured=_overhead,
        **limits,
    )


# In the order in which `missing` measures them.
TABLE = {
    **{name: _trainer_row(name) for name in ROWS if not name.endswith("-kept")},
    "float8-against-bf16": TableRow(
        what="training in float8 beside bfloat16",
        num_gpus=1,
        measured=_quotient,
        at_least={"ratio": 1.2},
        quotient_of=("4b-packed-float8", "4b-packed"),
    ),
    "two-gpus-against-one": TableRow(
        what="training on two GPUs beside one",
        num_gpus=2,
        measured=_quotient,
        at_least={"ratio": 1.9},
        quotient_of=("4b-packed-2gpu", "4b-packed"),
    ),
    **{f"generation-{count}": _generation_row("0_6b", count, 1) for count in (64, 256, 1024)},
    **{f"generation-{count}-cpu": _generation_row("tiny", count, 0) for count in (16, 64)},
    "packed-against-padded": _packing_row(1),
    "packed-against-padded-cpu": _packing_row(0, "--samples", "16", "--ways", "packed"),
    "grpo-step-0_6b": _grpo_row("0_6b", 2, "--steps", "2"),
    "grpo-step-1_7b": _grpo_row("1_7b", 2, "--steps", "2", "--groups", "16"),
    "grpo-step-cpu": _grpo_row("tiny", 0),
    "agreement-0_6b": _agreement_row("0_6b", 1),
    "agreement-cpu": _agreement_row("tiny", 0),
    "overhead-step-cpu": _overhead_row(STEP, "training", at_most={"ratio": 1.1}),
    "overhead-generate-cpu": _overhead_row(ONE_CALL, "generation", at_least={"ratio": 0.9}),
    "overhead-callers-cpu": _overhead_row(CALLERS, "generation", at_least={"ratio": 0.7}),
    **{name: _trainer_row(name) for name in ROWS if name.endswith("-kept")},
}


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
