"""What the README and docs/trainer.md print runs as it is printed, and what the README names exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rl_actors

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
AFTER = """
import sys
loaded = {"torchao", "torchtitan.models", "vllm"} & set(sys.modules)
assert not loaded, f"whoever calls actors loads none of their stack, but here is {loaded}"
"""


def block(name: str) -> str:
    pages = README + (ROOT / "docs" / "trainer.md").read_text()
    found = re.search(rf"<!-- test: {name} -->\n```python\n(.*?)```", pages, re.DOTALL)
    assert found, f"no page has a block {name!r}"
    return found[1]


@pytest.mark.parametrize("name", ["repl", "embedding", "trainer"])
def test_a_program_of_a_page_runs_as_printed(name, tmp_path):
    (tmp_path / "program.py").write_text(block(name) + AFTER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "program.py"]
    finished = subprocess.run(command, cwd=tmp_path, env=environment, timeout=180, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "Traceback" not in finished.stderr and "leaked" not in finished.stderr


def test_the_readme_lists_every_public_name_and_no_other():
    table = README.split("## The public names")[1].split("| call on")[0]
    assert set(re.findall(r"`(\w+)`", table)) - {"loss", "grad_divisor", "await"} >= set(rl_actors.__all__)
    for name in rl_actors.__all__:
        assert getattr(rl_actors, name) is not None


def test_every_make_target_of_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def mapped_files(tree: str) -> set[str]:
    """The paths of a map in which a folder's line ends its name with "/" and its files are indented below it."""
    folders: list[tuple[int, str]] = []
    paths = set()
    for line in tree.splitlines():
        found = re.match(r"( *)(\w+/|\w+\.py(?:, \w+\.py)*)(?: |$)", line)
        if not found:
            continue
        indent, name = len(found[1]), found[2]
        while folders and folders[-1][0] >= indent:
            folders.pop()
        prefix = folders[-1][1] if folders else ""
        if name.endswith("/"):
            folders.append((indent, prefix + name))
        else:
            paths.update(prefix + file for file in name.split(", "))
    return paths


def test_the_map_names_every_module_by_its_path_and_nothing_else():
    tree = README.split("## Reading order and map")[1].split("\n## ")[0]
    command = ["git", "ls-files", "rl_actors", "controllers", "configs", "benchmarks"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    modules = {
        file for file in tracked if file.endswith(".py") and Path(file).name not in ("__init__.py", "__main__.py")
    }
    assert mapped_files(tree) == modules
