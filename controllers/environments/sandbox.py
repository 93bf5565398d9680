"""A reward for Python code: 1 if the program in a completion passes the problem's tests, else 0.
Guards against mistakes, not against malice.
"""

import ast
import asyncio
import contextlib
import os
import re
import secrets
import signal
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Interval

from controllers.environments.base import Problem
from rl_actors.field_types import CountingInt

FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$", re.MULTILINE)  # group 2: the language
LANGUAGES = ("", "python", "python3", "py", "py3")
CALLABLE = re.compile(r"^(?:async\s+def|def|class)\s+(\w+)", re.MULTILINE)
ASSIGNED = re.compile(r"^(\w+)\s*(?::[^=\n]+)?=(?!=)", re.MULTILINE)
MAX_FILE_BYTES = 1 << 20
CLOCK_FACTOR = 4  # wall-clock seconds per CPU second

# Runs before the program. `unshare` takes away the network, if the system allows it. `prctl` ends
# the process with its parent; it comes after `unshare`, because a new user namespace undoes it.
# Passed tests give a secret exit status, because a program may exit with 0 before its tests.
LIMITED = """
import ctypes, os, resource, signal, sys, types
CLONE_NEWUSER, CLONE_NEWNET, PR_SET_PDEATHSIG = 0x10000000, 0x40000000, 1
libc = ctypes.CDLL(None)
libc.unshare(CLONE_NEWUSER | CLONE_NEWNET)
libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
program, tests, parent, passed, seconds, memory, file_size = *sys.argv[1:3], *map(int, sys.argv[3:])
if os.getppid() != parent:
    sys.exit(1)  # the parent ended before prctl
sys.argv[:] = [program]
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
# The program is imported, so that its own `if __name__ == "__main__"` does not run. Then the tests run as the main program.
module = sys.modules["__main__"] = sys.modules["program"] = types.ModuleType("program")
for path, name in ((program, "program"), (tests, "__main__")):
    module.__name__, module.__file__ = name, path
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec"), module.__dict__)
sys.exit(passed)
"""
PASSED_STATUSES = [*range(100, 120), *range(121, 256)]  # no Python error gives one; 120: output fails


@dataclass(kw_only=True)
class SandboxConfig:
    cpu_seconds: CountingInt = 5
    """CPU seconds of the program with its tests; the wall-clock limit is four times as long."""
    memory_mib: Annotated[int, Interval(ge=64), tyro.conf.arg(metavar="INT>=64")] = 1024
    """Largest address space of the process, in MiB."""

    @property
    def seconds(self) -> int:
        """By the wall clock."""
        return CLOCK_FACTOR * self.cpu_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    config: SandboxConfig

    async def __call__(self, problem: Problem, completion: str) -> float:
        """1.0 if the program and then the tests (the problem's answer) run without error."""
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "program.py"
            tests = Path(folder) / "tests.py"
            program.write_text(program_of(completion, problem.answer), encoding="utf-8", errors="replace")
            tests.write_text(problem.answer, encoding="utf-8", errors="replace")
            return float(await self._passes(program, tests))

    async def _passes(self, program: Path, tests: Path) -> bool:
        passed = secrets.choice(PASSED_STATUSES)
        limits = (self.config.cpu_seconds, self.config.memory_mib << 20, MAX_FILE_BYTES)
        arguments = map(str, (program, tests, os.getpid(), passed, *limits))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", LIMITED, *arguments),
            cwd=program.parent,
            env={},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return await asyncio.wait_for(process.wait(), self.config.seconds) == passed
        except TimeoutError:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                # with the processes that the program started
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def program_of(completion: str, tests: str) -> str:
    """The longest block that defines a name of the tests, as a function or class, or else by an
    assignment, which may only use the solution; else the last block; else the completion."""
    text = completion.replace("\r\n", "\n").replace("\r", "\n")
    blocks = _blocks(text)
    for named in (_used(tests), set(re.findall(r"\w+", tests))):
        for kind in (CALLABLE, ASSIGNED):
            defining = [block for block in blocks if named.intersection(kind.findall(block))]
            if defining:
                return max(defining, key=len)
    return blocks[-1] if blocks else text


def _used(tests: str) -> set[str]:
    """The names, imports and attributes that the tests use but do not define."""
    tree = _parsed(tests) or ast.Module(body=[], type_ignores=[])
    used: set[str] = set()
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name):
                used.add(name)
            case ast.Name(id=name):
                own.add(name)
            case ast.ImportFrom(names=aliases):
                used.update(alias.name for alias in aliases)
    return used - own


def _blocks(text: str) -> list[str]:
    """The text before the first fence, and the blocks of Python. The last may lack its fence."""
    blocks = []
    opening = FENCE.search(text)
    if opening and _parsed(text[: opening.start()]) is not None:  # not prose, such as "add: total = a + b"
        blocks.append(text[: opening.start()])
    while opening is not None:
        later = FENCE.finditer(text, opening.end())
        closing = next((match for match in later if match[1].startswith(opening[1]) and not match[2]), None)
        if opening[2].lower() in LANGUAGES:
            end = closing.start() if closing else len(text)
            blocks.append(textwrap.dedent(text[opening.end() : end].lstrip("\n")))
        opening = FENCE.search(text, closing.end()) if closing else None
    return blocks


def _parsed(text: str) -> ast.Module | None:
    """None if not Python. A long row of operators gives MemoryError."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
