"""Writes docs/map.md: every module with the first sentence of its docstring.

python scripts/map.py [--check]
"""

import argparse
import ast
import subprocess
import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/map.md"
PACKAGES = ("rl_actors", "controllers", "configs", "benchmarks")


def first_sentence(path: Path) -> str:
    """The first sentence of the module's docstring on one line, "" if there is none."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    end = next(
        (i + 1 for i, c in enumerate(text) if c == "." and text[i + 1 : i + 3].lstrip()[:1].isupper()), len(text)
    )
    return text[:end].removesuffix(".")


def modules() -> list[Path]:
    """The modules that git knows or would add, without __init__.py and __main__.py."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    paths = [Path(name) for name in sorted(set(names)) if name.endswith(".py") and (ROOT / name).exists()]
    return [path for path in paths if path.name not in ("__init__.py", "__main__.py")]


def _order(path: Path) -> tuple[int, Path, str]:
    return PACKAGES.index(path.parts[0]), path.parent, path.name


def page() -> str:
    lines = [
        "# Map",
        "",
        "Every module with the first sentence of its docstring. `python scripts/map.py` writes this page.",
    ]
    for folder, paths in groupby(sorted(modules(), key=_order), lambda path: path.parent):
        package = ROOT / folder / "__init__.py"
        lines += ["", f"## {folder}", ""]
        if package.is_file() and (text := first_sentence(package)):
            lines += [f"{text}.", ""]
        lines += ["| module | |", "|---|---|"]
        lines += [f"| `{path.name}` | {first_sentence(ROOT / path).replace('|', chr(92) + '|')} |" for path in paths]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with status 1 if the page is old")
    if parser.parse_args().check:
        sys.exit(PAGE.read_text() != page())
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
