"""Continues a run with `--hosts` by exec of a new process, after a host was lost."""

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

PROGRAM = "program"  # `restart` in restarts.jsonl for a new process


def wait(config: RunConfig, folder: RunFolder, death: StartAgainError, on_event: Callable[[str], None]) -> bool:
    """True if the run can be resumed. on_event: gets the reason if it cannot, unless the config
    forbids it (return_timeout, max_restarts_per_hour or checkpoint_every is 0).
    """
    limit = config.survival.max_restarts_per_hour
    timeout = config.hosts.return_timeout
    if not (timeout and limit and config.checkpoint_every):
        return False
    if (number := num_programs(folder) + 1) > limit:
        on_event(f"this is death {number} in the last hour, but survival.max_restarts_per_hour={limit}")
        return False
    steps = read_jsonl(folder.metrics)
    folder.add_restart(restart_line(PROGRAM, time.time(), death, after_step=steps[-1]["step"] if steps else 0))
    if death.lost and config.hosts.started_by() is None:
        starts = ", ".join(f"make worker ADDRESS={name}" for name in death.lost)
        on_event(f"{death}; the run waits up to {timeout:g} s for the lost workers. Start them again by: {starts}")
        if missing := config.hosts.wait_for_workers():
            on_event(f"no worker listens at {', '.join(missing)} after hosts.return_timeout={timeout:g} s")
            return False
    on_event(f"{death}; the run goes on in a new program (restart {number}, at most {limit} an hour)")
    return True


def num_programs(folder: RunFolder) -> int:
    """The new processes of the last hour, from restarts.jsonl."""
    begin = time.time() - HOUR
    lines = [line for line in read_jsonl(folder.restarts) if line["restart"] == PROGRAM]
    return sum(datetime.fromisoformat(line["time"]).timestamp() > begin for line in lines)


def command(flags: Sequence[str]) -> list[str]:
    """This process's, with other flags. Raises ValueError if its command line has changed."""
    given = sys.argv[1:]
    start = len(sys.orig_argv) - len(given)
    if sys.orig_argv[start:] != given:
        raise ValueError(f"{sys.argv} is not the end of {sys.orig_argv}")
    return [sys.executable, *sys.orig_argv[1:start], *flags]


def start_again(folder: RunFolder, *, verbose: bool) -> None:
    """Replace this process by one that resumes the run. Raises OSError or ValueError."""
    words = command(["--resume", str(folder.path), *(["--verbose"] if verbose else [])])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(words[0], words)
