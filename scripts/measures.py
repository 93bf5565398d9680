"""Prints the sizes that the project keeps small, each with its limit: lines, words, functions, imports, pages.

python scripts/measures.py
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

GENERATED = {"docs/map.md", "docs/upstream.md"}
WRITTEN_BY_PROTOC = "_pb2.py"
TABLE_BEGIN = "<!-- table of benchmarks"
TABLE_END = "<!-- end of the table"


def tracked(*folders: str, ending: str = ".py") -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    own = [name for name in sorted(set(names)) if name.endswith(ending) and not name.endswith(WRITTEN_BY_PROTOC)]
    return [ROOT / name for name in own if (ROOT / name).is_file()]


def num_lines(*folders: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in tracked(*folders))


def texts_and_code(source: str) -> tuple[int, int]:
    """(words of docstrings and comments, lines that hold other code)."""
    words, text_lines, code_lines = 0, set(), set()
    for node in ast.walk(ast.parse(source)):
        value = getattr(node, "value", None)
        if isinstance(node, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            words += len(value.value.split())
            text_lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    skipped = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            words += len(token.string.lstrip("#").split())
        elif token.type not in skipped:
            code_lines |= set(range(token.start[0], token.end[0] + 1))
    return words, len(code_lines - text_lines)


def words_per_line(folder: str) -> float:
    pairs = [texts_and_code(path.read_text()) for path in tracked(folder)]
    return sum(words for words, _ in pairs) / sum(lines for _, lines in pairs)


def functions(*folders: str) -> list[tuple[int, str]]:
    """(lines, name) of every function, shortest first."""
    found = []
    for path in tracked(*folders):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                found.append(((node.end_lineno or first) - first + 1, f"{path.relative_to(ROOT)}:{node.name}"))
    return sorted(found)


def parallel_share(*folders: str) -> float:
    """The share of assignments that assign several values to several names: a, b = c, d."""
    num_parallel = num_all = 0
    for path in tracked(*folders):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign):
                num_all += 1
                num_parallel += isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    return num_parallel / num_all


def num_lazy_imports(*folders: str) -> int:
    count = 0
    for path in tracked(*folders):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count += sum(isinstance(each, ast.Import | ast.ImportFrom) for each in ast.walk(node))
    return count


def hand_written(path: Path) -> str:
    """The text of a page without the part that a program writes."""
    if str(path.relative_to(ROOT)) in GENERATED:
        return ""
    return re.sub(f"{TABLE_BEGIN}.*?{TABLE_END}[^\n]*\n", "", path.read_text(), flags=re.DOTALL)


def num_long_lines() -> int:
    """Lines of Markdown above 200 characters, outside tables and blocks of code."""
    count = 0
    for path in tracked(ending=".md"):
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        count += sum(len(line) > 200 and not line.startswith("|") for line in text.splitlines())
    return count


def measures() -> Iterator[tuple[str, float, float]]:
    """(what is measured, its value, its limit)."""
    from test_imports import violations

    packages = ("rl_actors", "controllers", "configs")
    yield "words of docstrings and comments per code line, rl_actors", words_per_line("rl_actors"), 2.8
    yield "words of docstrings and comments per code line, controllers", words_per_line("controllers"), 2.5
    yield "bytes of README.md", (ROOT / "README.md").stat().st_size, 10_000
    pages = tracked("docs", ending=".md")
    yield "bytes of docs/*.md, without what programs write", sum(len(hand_written(p).encode()) for p in pages), 130_000
    yield "lines of Markdown above 200 characters", num_long_lines(), 0
    for folder, limit in (("rl_actors", 18_500), ("controllers", 16_000), ("benchmarks", 5_000)):
        yield f"lines of Python, {folder}", num_lines(folder), limit
    yield "modules directly in controllers/", len(list((ROOT / "controllers").glob("*.py"))), 8
    lengths = functions(*packages)
    yield "lines of a function, 99th percentile", lengths[int(0.99 * len(lengths))][0], 40
    yield f"lines of the longest function, {lengths[-1][1]}", lengths[-1][0], 60
    yield "parallel assignments, percent", 100 * parallel_share(*packages), 1
    yield "imports against the levels (tests/test_imports.py)", len(violations(ROOT)), 0
    yield "imports inside functions", num_lazy_imports(*packages), float("inf")


def main() -> None:
    for name, value, limit in measures():
        shown = f"{value:.2f}" if isinstance(value, float) else f"{value:,}"
        bound = "" if limit == float("inf") else f"  (at most {limit:,})"
        print(f"{'  ' if value <= limit else '! '}{name}: {shown}{bound}")


if __name__ == "__main__":
    main()
