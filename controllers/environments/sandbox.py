"""A reward for Python code: 1 if the program of a completion passes the tests of its problem, in a process with limits.

The limits keep mistakes from harming the run: time, memory, file size and, where the system allows it, no network. They are no defence
against code that wants to do harm.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from controllers.environments.base import Problem

CODE_BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)
MAX_FILE_BYTES = 1 << 20

# Runs in the new process before the program. A network namespace of its own has no network; without the right to make one, it goes on.
LIMITED = """
import ctypes, resource, runpy, sys
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)
seconds, memory, file_size = map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@dataclass(kw_only=True)
class SandboxConfig:
    cpu_seconds: int = 5
    """Seconds of a core that program and tests may use. They may take four times as long by the clock."""
    memory_mib: int = 1024
    """Largest address space."""

    def validate(self) -> None:
        if self.cpu_seconds < 1 or self.memory_mib < 64:
            given = f"sandbox.cpu_seconds={self.cpu_seconds}, sandbox.memory_mib={self.memory_mib}"
            raise ValueError(f"{given}; they must be at least 1 and 64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    config: SandboxConfig

    async def __call__(self, problem: Problem, completion: str) -> float:
        """1.0 if the program, followed by the problem's answer, which holds tests such as assertions, ends without an error."""
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "program.py"
            program.write_text(f"{program_of(completion)}\n\n{problem.answer}\n")
            return float(await self._passes(program))

    async def _passes(self, program: Path) -> bool:
        limits = (self.config.cpu_seconds, self.config.memory_mib << 20, MAX_FILE_BYTES)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", LIMITED, str(program), *map(str, limits)),
            cwd=program.parent,
            env={},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return await asyncio.wait_for(process.wait(), 4 * self.config.cpu_seconds) == 0
        except TimeoutError:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it started
            await process.wait()


def program_of(completion: str) -> str:
    """The last block of code that is fenced by three backticks, or else the whole completion."""
    blocks = CODE_BLOCK.findall(completion)
    return blocks[-1] if blocks else completion
