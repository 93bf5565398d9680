"""Runs jobs of one or several ranks in processes that stay alive between jobs, so that each process imports torch only once.

A process uses the same GPU for all its jobs. If there are more processes than GPUs, several processes share a GPU. If a job fails or takes
too long, its processes are killed and new processes are started. This module measures nothing.
"""

import contextlib
import gc
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A call work(*arguments) in each of num_ranks processes. The environment variables RANK, WORLD_SIZE and so on join the
    processes into one distributed program.
    """

    name: str
    work: Callable[..., Any]  # must be defined at the top level of a module, because it is pickled by name
    arguments: tuple = ()
    num_ranks: int = 1


@dataclass(slots=True, kw_only=True)
class _Process:
    process: BaseProcess
    pipe: Connection


@dataclass(slots=True, kw_only=True)
class _Running:
    job: Job
    places: list[int]  # index of each rank's process in Ranks.processes; such an index is called a place
    deadline: float  # in the time of time.monotonic()
    answers: dict[int, tuple[bool, Any]] = field(default_factory=dict)  # place -> (success, answer or traceback)

    def is_done(self) -> bool:
        """True if all ranks have answered, a rank has failed, or the deadline has passed."""
        all_answered = len(self.answers) == len(self.places)
        return all_answered or bool(self.failures()) or time.monotonic() > self.deadline

    def failures(self) -> list[str]:
        """Tracebacks of the ranks that failed."""
        return [answer for success, answer in self.answers.values() if not success]


class Ranks:
    """Processes that run jobs: `with Ranks(4) as ranks: for job, answers, error in ranks.run(jobs): …`"""

    def __init__(self, count: int, *, seconds: float = 300.0) -> None:
        """Start `count` processes. seconds: the time limit of a job."""
        self.seconds = seconds
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
        self.context = multiprocessing.get_context("spawn")
        self.processes = [self._start(place) for place in range(count)]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for place in range(len(self.processes)):
            self._end(place)

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, list[Any], str]]:
        """Run the jobs, several at the same time if there are enough processes. Yields a triple for each job when the job ends.

        The triple of a finished job is (job, [answer of each rank], ""). The triple of a failed job is (job, [], reason). Raises ValueError
        if a job needs more ranks than there are processes.
        """
        waiting, running = list(jobs), []
        free = set(range(len(self.processes)))
        for job in jobs:
            if job.num_ranks > len(free):
                raise ValueError(f"{job.name} needs {job.num_ranks} ranks, but there are only {len(free)} processes")
        while waiting or running:
            running += self._send_fitting(waiting, free)
            for done in self._some_done(running):
                running.remove(done)
                free |= set(done.places)
                failures = done.failures()
                if len(done.answers) < len(done.places) or failures:
                    for place in done.places:
                        self._end(place)
                        self.processes[place] = self._start(place)
                    yield done.job, [], failures[0] if failures else f"no answer within {self.seconds:g} s"
                else:
                    yield done.job, [done.answers[place][1] for place in done.places], ""

    def _send_fitting(self, waiting: list[Job], free: set[int]) -> list[_Running]:
        """Start the waiting jobs for which `_places` finds free places. Removes these jobs from `waiting` and their places from `free`."""
        started = []
        for job in list(waiting):
            places = self._places(job, free)
            if places:
                waiting.remove(job)
                free -= set(places)
                started.append(self._send(job, places))
        return started

    def _places(self, job: Job, free: set[int]) -> list[int]:
        """Consecutive free places for a job's ranks; an empty list if there are none.

        torch caches the sizes of a rank's shards, and the key of this cache lacks the rank. Suppose that a process was rank 0 in one job, and
        is rank 1 in a later job with the same number of ranks. In the later job it would compute with the shard sizes of rank 0. The first
        place is therefore a multiple of num_ranks: a process then has the same rank in all jobs with the same number of ranks.
        """
        for start in range(0, len(self.processes) - job.num_ranks + 1, job.num_ranks):
            block = list(range(start, start + job.num_ranks))
            if free.issuperset(block):
                return block
        return []

    def _send(self, job: Job, places: Sequence[int]) -> _Running:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        num_devices = torch.cuda.device_count() or len(self.processes)
        for rank, place in enumerate(places):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(place % num_devices),
                "WORLD_SIZE": str(job.num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            self.processes[place].pipe.send((job.work, job.arguments, environment))
        return _Running(job=job, places=list(places), deadline=time.monotonic() + self.seconds)

    def _some_done(self, running: Sequence[_Running]) -> list[_Running]:
        """Wait until at least one job is done, and return all that are done."""
        while True:
            done = [each for each in running if each.is_done()]
            if done:
                return done
            self._receive(running)

    def _receive(self, running: Sequence[_Running]) -> None:
        """Wait for answers, at most a second, and store each in `answers` of its job. A process that has ended counts as a failed rank."""
        expected: dict[Any, tuple[_Running, int]] = {}  # pipe -> (job, place) of the answer that comes through it
        for each in running:
            for place in each.places:
                if place not in each.answers:
                    expected[self.processes[place].pipe] = (each, place)
        for pipe in wait(list(expected), timeout=1.0):
            each, place = expected[pipe]
            try:
                each.answers[place] = self.processes[place].pipe.recv()
            except (EOFError, OSError):
                each.answers[place] = (False, f"the process with index {place} ended without an answer")

    def _start(self, place: int) -> _Process:
        here, there = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(there,), daemon=True, name=f"rank place {place}")
        process.start()
        there.close()
        return _Process(process=process, pipe=here)

    def _end(self, place: int) -> None:
        ending = self.processes[place]
        ending.pipe.close()
        ending.process.kill()
        ending.process.join()


def _serve(pipe: Connection) -> None:
    """The program of a process: run every (work, arguments, environment) that arrives, and send back (success, answer or traceback)."""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        import rl_actors.engine.train_engine  # noqa: F401  This import takes seconds, so it comes before the first job.

        while True:
            work, arguments, environment = pipe.recv()
            os.environ.update(environment)
            try:
                answer = (True, work(*arguments))
            except BaseException:
                answer = (False, traceback.format_exc())
            pipe.send(answer)
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            # torch compiles at most eight versions of a function. The reset discards this job's versions, so they do not count in the next job.
            torch.compiler.reset()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
