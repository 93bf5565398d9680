"""Continues a run by exec of a new process, because Monarch 0.7 cannot connect to hosts a second
time after one was lost."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime

from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.run.actors import StartAgainError
from controllers.run.config import RunConfig
from controllers.run.survival import restart_line
from rl_actors.clients.replicas import HOUR

PROGRAM = "program"
"""The value of `restart` in restarts.jsonl for a new process."""


def wait(config: RunConfig, folder: RunFolder, death: StartAgainError, tell: Callable[[str], None]) -> bool:
    """True if the run can be resumed. tell: gets the reason if it cannot, unless the config forbids
    it (return_timeout, max_restarts_per_hour or checkpoint_every is 0).
    A line of restarts.jsonl comes before the wait for workers; the number of these lines in an hour
    is limited.
    """
    limit = config.survival.max_restarts_per_hour
    if not (config.hosts.return_timeout and limit and config.checkpoint_every):
        return False
    if (number := num_programs(folder) + 1) > limit:
        tell(f"this is death {number} in the last hour, but survival.max_restarts_per_hour={limit}")
        return False
    steps = read_jsonl(folder.metrics)
    last_step = steps[-1]["step"] if steps else 0
    folder.add_restart(restart_line(PROGRAM, time.time(), death, after_step=last_step))
    if death.lost and config.hosts.started_by() is None:
        starts = ", ".join(f"make worker ADDRESS={name}" for name in death.lost)
        tell(
            f"{death}; the run waits up to {config.hosts.return_timeout:g} s for the lost workers. Start them again by: {starts}"
        )
        if missing := config.hosts.wait_for_workers():
            tell(
                f"no worker listens at {', '.join(missing)} after hosts.return_timeout={config.hosts.return_timeout:g} s"
            )
            return False
    tell(f"{death}; the run goes on in a new program (restart {number}, at most {limit} an hour)")
    return True


def num_programs(folder: RunFolder) -> int:
    """The new processes of the last hour, from restarts.jsonl."""
    begin = time.time() - HOUR
    lines = [line for line in read_jsonl(folder.restarts) if line["restart"] == PROGRAM]
    return sum(datetime.fromisoformat(line["time"]).timestamp() > begin for line in lines)


def command(flags: Sequence[str]) -> list[str]:
    """The command that started this process, with other flags. Raises ValueError if the process
    changed its own command line."""
    given = sys.argv[1:]
    start = len(sys.orig_argv) - len(given)
    if sys.orig_argv[start:] != given:
        raise ValueError(f"{sys.argv} is not the end of {sys.orig_argv}")
    return [sys.executable, *sys.orig_argv[1:start], *flags]


def start_again(folder: RunFolder, *, verbose: bool) -> None:
    """Replace this process by one that resumes the run. Raises OSError, or the ValueError of
    `command`."""
    words = command(["--resume", str(folder.path), *(["--verbose"] if verbose else [])])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(words[0], words)
