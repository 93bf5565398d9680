"""Command line of the benchmarks.

python -m benchmarks                      lists rows and programs
python -m benchmarks NAME [ARGUMENT ...]  runs a row or a program
python -m benchmarks missing              runs each row that has no result from this kind of device

A row is an entry of the table in harness/register.py. A program is a file of benchmarks/,
benchmarks/harness/ or benchmarks/peers/ that defines `main()`; the list shows the first line of its docstring.
This file does not import torch, which takes seconds.
"""

import ast
import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import results
from benchmarks.harness.register import TABLE
from benchmarks.harness.table import gpu_here, newest, ratio, sentence, target, verdict

PACKAGES = ("benchmarks", "benchmarks.harness", "benchmarks.peers")
PYTHON = [sys.executable, "-m", "benchmarks"]
ROOT = Path(__file__).parents[1]


def programs() -> dict[str, tuple[str, str]]:
    """The programs: {name: (module, first line of its docstring)}, such as {"overhead": ("benchmarks.overhead", "Cost of …")}.

    The files are parsed and not imported, because importing them would import torch.
    """
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package.replace(".", "/")).glob("*.py")):
            module = ast.parse(path.read_text(), str(path))
            has_main = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body)
            if has_main and path != Path(__file__):
                first_line = (ast.get_docstring(module) or "").partition("\n")[0]
                found[path.stem] = (f"{package}.{path.stem}", first_line)
    return found


def rows() -> list[str]:
    """Lines of the printed list: a head, and a line for each row.

    The column "here" is "measured" if the row has a result from this kind of device, "missing" if it has none, and "-"
    if this machine cannot run the row. The columns after "here" describe the row's newest result and its target.
    """
    width = max(len(name) for name in TABLE)
    template = f"{{:<{width}}} {{:<7}} {{:<8}} {{:<24}} {{:<46}} {{:<24}} {{}}"
    lines = [template.format("row", "needs", "here", "ratio", "target", "meets it", "newest result")]
    for name, row in TABLE.items():
        line = newest(row, gpu_here())
        if not row.runs_here():
            here = "-"
        elif line is None:
            here = "missing"
        else:
            here = "measured"
        if line is None:
            cells = ("", target(row), "", "not run")
        else:
            figure = ratio(line) or line["text"].partition(";")[0]
            cells = (figure, target(row), verdict(row, line), f"{line['device']}, {line['date']}")
        lines.append(template.format(name, row.needs, here, *cells))
    return lines


def missing() -> list[str]:
    """The rows that this machine can run and that have no result from this kind of device.

    A quotient of two rows is never missing.
    """
    rows = ((name, row) for name, row in TABLE.items() if row.command and row.runs_here())
    return [name for name, row in rows if newest(row, gpu_here()) is None]


def measure(names: Sequence[str], arguments: Sequence[str] = ()) -> int:
    """Run the rows, one process for each command, and print a line for each row. Returns the exit status.

    A row fails if its process fails or records no result; the others still run.
    arguments: further arguments of every process.
    Exits at once if this machine cannot run one of the rows.
    """
    refused = [f"{name} needs {TABLE[name].needs}" for name in names if not TABLE[name].runs_here()]
    if refused:
        here = f"{len(results.gpus())} x {gpu_here()}" if results.gpus() else "no GPU"
        sys.exit(f"{'; '.join(refused)}; this machine has {here}")
    parts = [part for name in names for part in TABLE[name].quotient_of or (name,)]
    before = {part: newest(TABLE[part], gpu_here()) for part in parts}
    commands = dict.fromkeys(TABLE[part].command for part in parts)
    try:
        status = {command: run([*PYTHON, *command, *arguments]) for command in commands}
    except KeyboardInterrupt:
        print("interrupted; `make bench ROW=missing` runs the rows that are still missing")
        return 130
    failed = [part for part in before if status[TABLE[part].command] or newest(TABLE[part], gpu_here()) == before[part]]
    for name in names:
        print(sentence(name, gpu_here()))
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def run(command: Sequence[str]) -> int:
    """The exit status of a command. The terminal sends an interrupt to the command too, so it ends by itself."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def main() -> None:
    known = programs()
    name, *arguments = sys.argv[1:] or [""]
    if not name:
        print("make bench ROW=NAME runs a row; ROW=missing runs every row that is missing here\n")
        print("\n".join(rows()))
        print("\nPrograms with arguments of their own: python -m benchmarks NAME --help\n")
        for program, (_, first_line) in known.items():
            print(f"{program:<20} {first_line}")
        return
    if name == "missing" or name in TABLE:
        names = missing() if name == "missing" else [name]
        print(f"to run: {', '.join(names) or 'nothing'}", flush=True)
        sys.exit(measure(names, arguments))
    if name not in known:
        sys.exit(f"there is no row or program {name!r}; `make bench` lists all rows and programs")
    sys.argv = [f"benchmarks.{name}", *arguments]
    module, _ = known[name]
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
