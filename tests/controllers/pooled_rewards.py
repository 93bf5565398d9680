"""Rewards for the tests of RewardPool, which computes rewards in worker processes. This module imports little, because
every worker process imports it."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from controllers.environments import Problem


class OneReward:
    """Base of environments that have only a reward.

    `mark` makes a file whose name has the id of the calling process. `pids` reads these ids, so that a test sees which
    processes computed a reward.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def mark(self, name: str) -> None:
        (self.folder / f"{name}-{os.getpid()}").touch()

    def pids(self, name: str) -> list[int]:
        return [int(path.name.split("-")[1]) for path in self.folder.glob(f"{name}-*")]


class Waiting(OneReward):
    """The reward is the length of the completion. The reward function waits until the file `go` exists."""

    def reward(self, problem, completion):
        self.mark("begun")
        while not (self.folder / "go").exists():
            time.sleep(0.01)
        return {"length": len(completion), "pid": 0.0}


class FailingOnce(OneReward):
    """The first process that computes this reward starts a child process, and then hangs, crashes or ends. On a busy machine a process
    may be killed before it fails; then the next one fails.
    """

    def __init__(self, folder: Path, failure: str) -> None:
        super().__init__(folder)
        self.failure = failure

    def reward(self, problem, completion):
        if not self.pids("failed"):
            child = subprocess.Popen(["sleep", "100000"])
            (self.folder / f"child-{child.pid}").touch()
            self.mark("failed")
            {"hang": self.hang, "crash": self.crash, "end": lambda: os._exit(3)}[self.failure]()
        self.mark("answered")
        return 1.0

    def hang(self) -> None:
        threading.Event().wait()

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Group:
    """The reward of every completion is the id of the process that computes the reward."""

    def rewards(self, problem, completions):
        return [float(os.getpid()) for _ in completions]


class Raising:
    def reward(self, problem, completion):
        raise KeyError("no such answer")


class Parity:
    """The problems are additions. The reward is 1 for about half of all completions, and 0 for the others."""

    def problem(self, index: int) -> Problem:
        return Problem(prompt=f"{index % 50}+1=", answer=str(index % 50 + 1), key=str(index % 50))

    def held_out(self) -> list[Problem]:
        return [Problem(prompt=f"{index}+99=", answer=str(index + 99), key=f"{index} 99") for index in range(5)]

    def reward(self, problem, completion):
        return float(sum(map(ord, completion)) % 2)


class Locked(Parity):
    """An environment that cannot be pickled, because it has a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def unpicklable(*, seed: int, num_held_out: int) -> Locked:
    return Locked()


class Hanging(Parity):
    def __init__(self, folder: str) -> None:
        self.waiting = Waiting(Path(folder))

    def reward(self, problem, completion):
        return self.waiting.reward(problem, completion)


def hanging(*, seed: int, num_held_out: int, folder: str) -> Hanging:
    return Hanging(folder)


class Unloadable:
    """A reward that can be pickled, but only the process that made it can load the pickle."""

    def __reduce__(self):
        return importable_in, (os.getpid(),)

    def reward(self, problem, completion):
        return 1.0


def importable_in(pid: int) -> Unloadable:
    if os.getpid() != pid:
        raise ImportError("the module needs a thing that is absent")
    return Unloadable()


async def later(answer: str, completion: str) -> float:
    return float(os.getpid())


def here(answer: str, completion: str) -> float:
    return float(os.getpid())
