"""List the rows of the table and the programs, or run one: `python -m benchmarks [NAME [ARGUMENT ...]]`.

A row is an entry of benchmarks.harness.register. A program is a file of this folder or of harness/ that defines `main()`; its entry in the
list is the first line of its docstring. Nothing here imports torch.
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
    """Benchmarks and tools: {"overhead": ("benchmarks.overhead", "Overhead of …")}. The files are read and not imported, which needs no torch."""
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
    """A line for each row: what it needs, whether this kind of machine has a result, and the newest ratio beside its target."""
    columns = f"{{:<{max(map(len, TABLE))}}}" + " {:<7} {:<8} {:<24} {:<46} {:<24} {}"
    found = [columns.format("row", "needs", "here", "ratio", "target", "meets it", "newest result")]
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
            first = ratio(line) or row.measured(line).partition(";")[0]
            cells = (first, target(row), verdict(row, line), f"{line['device']}, {line['date']}")
        found.append(columns.format(name, row.needs, here, *cells))
    return found


def main() -> None:
    known = programs()
    name, *arguments = sys.argv[1:] or [""]
    if not name:
        print("make bench ROW=NAME runs a row; ROW=missing runs every row without a result (ARGS=--help says more)\n")
        print("\n".join(rows()))
        print("\nPrograms with arguments of their own: python -m benchmarks NAME --help\n")
        for program, (_, first_line) in known.items():
            print(f"{program:<20} {first_line}")
        return
    if name in TABLE:
        sys.exit(missing.run([name], arguments))
    if name not in known:
        sys.exit(f"no row and no program {name!r}; `make bench` lists them")
    sys.argv = [f"benchmarks.{name}", *arguments]
    module, _ = known[name]
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
