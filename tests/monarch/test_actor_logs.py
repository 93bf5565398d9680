"""The output and the log lines of each rank of a trainer go to a file.

With tee=True they also appear on the terminal of the process that spawned the ranks. Each line then begins with the
trainer's name and the rank.
"""

import asyncio
import logging
import os
import sys

import psutil
import pytest
import support
from monarch.actor import endpoint
from waiting import GUARD

from rl_actors.processes.output import LogRoute
from rl_actors.processes.spawn import spawn_processes


class TalkingTrainer(support.TestTrainer):
    """A trainer that can log and print without building an engine."""

    @endpoint
    async def talk(self) -> None:
        logging.getLogger("user.loss").info("an info line of rank %s", os.environ["RANK"])
        logging.getLogger("user.loss").debug("a debug line")
        print("printed", file=sys.stderr)


@pytest.mark.slow
def test_every_rank_of_a_trainer_logs_to_its_file_and_with_tee_to_the_terminal(tmp_path, capfd):
    pieces = []

    def last_lines_are_shown() -> bool:
        pieces.append(capfd.readouterr().err)
        return all(f"[trainer {rank}] printed" in "".join(pieces) for rank in (0, 1))

    processes = asyncio.run(spawn_processes("trainer", 2, logs=LogRoute(directory=tmp_path, tee=True)))
    trainers = processes.mesh.spawn("trainer", TalkingTrainer, support.trainer_config())
    trainers.talk.call().get(timeout=GUARD)
    support.wait_until(last_lines_are_shown)
    asyncio.run(processes.stop())
    shown = "".join(pieces).splitlines()
    for rank in (0, 1):
        [line] = [line for line in shown if f"an info line of rank {rank}" in line]
        assert line.startswith(f"[trainer {rank}] ") and "INFO user.loss: " in line
        assert f"[trainer {rank}] printed" in shown
        filed = (tmp_path / f"trainer-{rank}.log").read_text()
        assert f"an info line of rank {rank}" in filed and f"an info line of rank {1 - rank}" not in filed
    assert not [line for line in shown if "a debug line" in line]


def test_every_rank_has_its_name_in_ps_and_keeps_its_environment(tmp_path):
    processes = asyncio.run(spawn_processes("trainer", 2, logs=LogRoute(directory=tmp_path)))
    ranks = [psutil.Process(process.pid) for process in processes.processes]
    assert [rank.cmdline()[0] for rank in ranks] == ["rl_actors trainer-0", "rl_actors trainer-1"]
    assert [rank.environ()["RL_ACTORS_PROCESS"] for rank in ranks] == ["trainer-0", "trainer-1"]
    asyncio.run(processes.stop())
