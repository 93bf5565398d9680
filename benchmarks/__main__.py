"""List the rows of the table and the benchmarks, or run one: `python -m benchmarks [NAME [ARGUMENT ...]]`.

A row is one of benchmarks.harness.register. A benchmark is a file beside this one that defines `main()`; the first line of its docstring is its
entry in the list. Nothing here imports torch.
"""

import ast
import importlib
import sys
from pathlib import Path

from benchmarks.harness import missing
from benchmarks.harness.register import TABLE
from benchmarks.harness.table import newest, ratio, target, verdict


def benchmarks(folder: Path) -> dict[str, str]:
    """{"overhead": "What a step through TrainerClient costs over the engine alone."}; read, not imported: the list needs no torch."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        module = ast.parse(path.read_text(), str(path))
        has_main = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body)
        if has_main and path.name != "__main__.py":
            found[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def rows() -> list[str]:
    """Of every row: what it needs, whether this kind of machine has a result, and the newest ratio beside its target."""
    columns = f"{{:<{max(map(len, TABLE))}}}" + " {:<7} {:<8} {:<24} {:<46} {:<24} {}"
    found = [columns.format("row", "needs", "here", "ratio", "target", "meets it", "newest result")]
    for name, row in TABLE.items():
        line = newest(row, missing.gpu_here())
        here = ("missing" if line is None else "measured") if row.runs_here() else "-"
        cells = ("", target(row), "", "not run")
        if line is not None:
            first = ratio(line) or row.measured(line).partition(";")[0]
            cells = (first, target(row), verdict(row, line), f"{line['device']}, {line['date']}")
        found.append(columns.format(name, row.needs, here, *cells))
    return found


def main() -> None:
    found = benchmarks(Path(__file__).parent)
    tools = benchmarks(Path(__file__).parent / "harness")
    name, *arguments = sys.argv[1:] or [""]
    if not name:
        print(
            "make bench ROW=NAME runs a row, or every row that is missing here: ROW=missing (ARGS=--help says more)\n"
        )
        print("\n".join(rows()))
        print("\nThe benchmarks, with arguments of their own: python -m benchmarks NAME --help\n")
        print("\n".join(f"{name:<20} {line}" for name, line in (found | tools).items()))
        return
    if name in TABLE:
        sys.exit(missing.run([name], arguments))
    if name not in found | tools:
        sys.exit(f"no row and no benchmark {name!r}; `make bench` lists them")
    module = f"benchmarks.harness.{name}" if name in tools else f"benchmarks.{name}"
    sys.argv = [f"benchmarks.{name}", *arguments]
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
