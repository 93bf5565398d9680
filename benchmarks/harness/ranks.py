"""Processes that serve as ranks for one job after another: what they import, and what they compile, they do once. Measures nothing.

A process keeps one GPU; more processes than GPUs share them. A job that fails or is late ends its processes, and fresh ones take their places.
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
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """work(*arguments) on every one of num_ranks processes, in whose environment they are the ranks of a program of that size."""

    name: str
    work: Callable[..., Any]  # of a module, so that it is found by its name
    arguments: tuple = ()
    num_ranks: int = 1


@dataclass(slots=True, kw_only=True)
class _Process:
    process: Any
    pipe: Connection


@dataclass(slots=True, kw_only=True)
class _Running:
    job: Job
    places: list[int]
    deadline: float
    answers: dict[int, tuple[bool, Any]] = field(
        default_factory=dict
    )  # by place: whether it worked, answer or traceback


class Ranks:
    """`with Ranks(4) as ranks: for job, answers, error in ranks.run(jobs): …`"""

    def __init__(self, count: int, *, seconds: float = 300.0) -> None:
        """Start `count` processes. seconds: limit of one job."""
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
        """(job, what each rank answered, "") as they are done, or (job, [], why not). Jobs run side by side as far as there are processes."""
        waiting, running = list(jobs), []
        free = set(range(len(self.processes)))
        for job in jobs:
            if job.num_ranks > len(free):
                raise ValueError(f"{job.name} takes {job.num_ranks} ranks; there are {len(free)}")
        while waiting or running:
            while fitting := [(job, places) for job in waiting if (places := self._places(job, free))]:
                job, places = fitting[0]
                waiting.remove(job)
                free -= set(places)
                running.append(self._send(job, places))
            for done in self._some_done(running):
                running.remove(done)
                free |= set(done.places)
                failures = [answer for worked, answer in done.answers.values() if not worked]
                if len(done.answers) < len(done.places) or failures:
                    for place in done.places:
                        self._end(place)
                        self.processes[place] = self._start(place)
                    yield done.job, [], failures[0] if failures else f"no answer within {self.seconds:g} s"
                else:
                    yield done.job, [done.answers[place][1] for place in done.places], ""

    def _places(self, job: Job, free: set[int]) -> list[int]:
        """As many free ones, or none. A process has the same rank in all jobs of a size: torch remembers the shards of a mesh, not whose."""
        starts = range(0, len(self.processes) - job.num_ranks + 1, job.num_ranks)
        blocks = [list(range(start, start + job.num_ranks)) for start in starts]
        return next((block for block in blocks if free.issuperset(block)), [])

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
        """Those of which all ranks answered, or one failed, or whose time is up; waits until there is one."""
        while True:
            open_pipes = {
                self.processes[place].pipe: (each, place)
                for each in running
                for place in each.places
                if place not in each.answers
            }
            for pipe in wait(list(open_pipes), timeout=1.0):
                each, place = open_pipes[pipe]  # type: ignore[index]
                try:
                    each.answers[place] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    each.answers[place] = (False, f"the process of place {place} ended")
            done = [
                each
                for each in running
                if len(each.answers) == len(each.places)
                or any(not worked for worked, _ in each.answers.values())
                or time.monotonic() > each.deadline
            ]
            if done:
                return done

    def _start(self, place: int) -> _Process:
        here, there = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(there,), daemon=True, name=f"rank place {place}")
        process.start()
        there.close()
        return _Process(process=process, pipe=here)

    def _end(self, place: int) -> None:
        held = self.processes[place]
        held.pipe.close()
        held.process.kill()
        held.process.join()


def _serve(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        import rl_actors.engine.train_engine  # noqa: F401  while the first job is on its way

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
            torch.compiler.reset()  # of one function it keeps eight forms
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
