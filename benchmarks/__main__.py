"""Command line of the benchmarks. `python -m benchmarks` lists rows and programs. `python -m benchmarks NAME [ARGUMENT ...]` runs a row or a program.

A row is one entry of the table in benchmarks/harness/register.py. A program is a file of benchmarks/ or benchmarks/harness/ that defines
`main()`. The list shows the first line of a program's docstring. This file does not import torch, because importing torch takes seconds.
"""

import ast
import importlib
import sys
from pathlib import Path

from benchmarks.harness import missing
from benchmarks.harness.register import TABLE
from benchmarks.harness.table import newest, ratio, target, verdict

PACKAGES = ("benchmarks", "benchmarks.harness")
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
        line = newest(row, missing.gpu_here())
        if not row.runs_here():
            here = "-"
        elif line is None:
            here = "missing"
        else:
            here = "measured"
        if line is None:
            cells = ("", target(row), "", "not run")
        else:
            figure = ratio(line) or row.measured(line).partition(";")[0]
            cells = (figure, target(row), verdict(row, line), f"{line['device']}, {line['date']}")
        lines.append(template.format(name, row.needs, here, *cells))
    return lines


def main() -> None:
    known = programs()
    name, *arguments = sys.argv[1:] or [""]
    if not name:
        print(
            "make bench ROW=NAME runs a row; ROW=missing runs every row that is missing here (ARGS=--help for options)\n"
        )
        print("\n".join(rows()))
        print("\nPrograms with arguments of their own: python -m benchmarks NAME --help\n")
        for program, (_, first_line) in known.items():
            print(f"{program:<20} {first_line}")
        return
    if name in TABLE:
        sys.exit(missing.run([name], arguments))
    if name not in known:
        sys.exit(f"there is no row or program {name!r}; `make bench` lists all rows and programs")
    sys.argv = [f"benchmarks.{name}", *arguments]
    module, _ = known[name]
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
