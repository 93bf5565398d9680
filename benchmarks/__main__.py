"""List the benchmarks, or run one: `python -m benchmarks [NAME [ARGUMENT ...]]`.

A benchmark is a file beside this one that defines `main()`; the first line of its docstring is its entry in the list.
A row of trainer_speed is run by its name, too.
"""

import ast
import importlib
import sys
from pathlib import Path

from benchmarks.rows import ROWS


def benchmarks(folder: Path) -> dict[str, str]:
    """{"overhead": "What a step through TrainerClient costs over the engine alone."}; read, not imported: the list needs no torch."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        module = ast.parse(path.read_text(), str(path))
        has_main = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body)
        if has_main and path.name != "__main__.py":
            found[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def main() -> None:
    found = benchmarks(Path(__file__).parent)
    name, *arguments = sys.argv[1:] or [""]
    if not name:
        print("make bench ROW=NAME runs one of:")
        print("\n".join(f"  {name:<20} {line}" for name, line in found.items()) or "  (none yet)")
        print("or a row of trainer_speed:")
        print("\n".join(f"  {row}" for row in ROWS))
        return
    if name in ROWS:
        name, arguments = "trainer_speed", [name, *arguments]
    if name not in found:
        sys.exit(f"no benchmark {name!r}; there are: {', '.join(found) or 'none'}")
    sys.argv = [f"benchmarks.{name}", *arguments]
    importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
