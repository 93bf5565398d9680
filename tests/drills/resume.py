"""Kills runs at random moments and resumes them. A resumed run must report the same metrics as an uninterrupted run. No speed is measured.

The script first makes a short run of GRPO or PPO, with real trainers and vLLM, and lets it end. This is the uninterrupted run. Then come the
rounds. A round starts a new run with the same flags, and kills its controller or its trainer with signal 9, either up to half a second after
a random step or while a checkpoint is being written. Then the round resumes the killed run, and compares every line of its metrics.jsonl
with the same line of the uninterrupted run. Metrics of speed, memory and weight transfers are not compared.
"""

import argparse
import contextlib
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from configs import CONFIGS
from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.run import checkpoints

ROOT = Path(__file__).parents[2]
MARKER = "RL_ACTORS_RESUME_MARKER"
# Relative and absolute tolerance of a metric. The resumed run samples completions again, and may add floats in another order.
TOLERANCE = 1e-5
RUN_TIMEOUT = 600.0  # seconds; on two cores with a load average of 9 the start took more than 300 seconds
END_TIMEOUT = 60.0  # seconds that the processes of a killed run may take to end
VICTIMS, MOMENTS = ("controller", "trainer"), ("between", "writing")
SFT_STEPS, MAIN_STEPS = 3, 12
FLAGS = {
    "--steps": MAIN_STEPS,
    "--checkpoint-every": 2,
    "--evaluate-every": 3,
    "--rollouts.groups-per-step": 8,
    "--survival.max-restarts-per-hour": 0,  # so that a killed actor ends the run
}
_PARITY = {"--environment.task": "tests.fakes:parity_reward", "--environment.options": "{}"}
_MANY_GROUPS = {"--rollouts.groups-per-step": 64}  # more groups, because in PPO a group has one completion
# Config -> its flags. Each run has a task in which random weights earn a reward now and then. If no completion earned a reward, all rewards
# would be equal, and GRPO would train nothing.
FLAGS_OF_CONFIG: dict[str, dict[str, object]] = {
    "tiny": {"--sft-steps": SFT_STEPS, **_PARITY},
    "tiny_game": {"--sft-steps": 0, "--steps": SFT_STEPS + MAIN_STEPS},  # episodes of several turns
    "tiny_tool": {"--sft-steps": SFT_STEPS},
    # In PPO two steps that train only the critic come before the steps of --steps. So --steps is 2 less than in GRPO, and
    # the runs of all configs have the same number of steps.
    "tiny_ppo": {
        "--sft-steps": SFT_STEPS,
        "--steps": MAIN_STEPS - 2,
        **_PARITY,
        **_MANY_GROUPS,
    },
    "tiny_ppo_game": {"--sft-steps": 0, "--steps": SFT_STEPS + MAIN_STEPS - 2, **_MANY_GROUPS},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A process to kill and the moment to kill it."""

    victim: str  # one of VICTIMS
    # "between": `delay` seconds after `step` has appeared in metrics.jsonl. "writing": while the next checkpoint after `step` is being written.
    moment: str
    step: int
    delay: float


class Controller:
    """A run's controller in a new process group. `processes` finds the processes of the run by a mark in their environment.

    vLLM's engine core has no mark, because its process writes a title over the environment. `processes` finds this process by its parent.
    """

    def __init__(self, module: str, *arguments: object, log: Path) -> None:
        """module: controllers.grpo or controllers.ppo."""
        self.mark, self.log = uuid.uuid4().hex, log
        import_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.seen: set[psutil.Process] = set()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                cwd=ROOT,
                env={**os.environ, MARKER: self.mark, "PYTHONPATH": import_path},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """The processes of this run that have not ended. They include each process that an earlier call found, even if its parent has ended."""
        found = []
        parents = {process.pid for process in list(self.seen) if process.is_running()}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process in self.seen or process.ppid() in parents or process.environ().get(MARKER) == self.mark:
                    found.append(process)
                    self.seen.add(process)
                    parents.add(process.pid)
        return found

    def actors(self, name: str) -> list[psutil.Process]:
        """The processes of all ranks of an actor, and the processes that the ranks have started. name: the actor's name, such as "trainer"."""
        found = []
        for process in self.processes():
            try:
                actor = process.environ().get("RL_ACTORS_PROCESS", "")
            except psutil.Error:
                continue
            if actor.rpartition("-")[0] == name:
                found.append(process)
        return found

    def trainer(self) -> psutil.Process:
        return next(iter(self.actors("trainer")))

    def finish(self) -> None:
        """Wait for the end of the run. Raises RuntimeError if the run failed, and subprocess.TimeoutExpired after RUN_TIMEOUT."""
        status = self.process.wait(RUN_TIMEOUT)
        if status:
            raise RuntimeError(
                f"the run ended with exit status {status}; the end of {self.log}:\n{self.log.read_text()[-2000:]}"
            )

    def wait_until_gone(self) -> None:
        """Wait until all processes of the run have ended. Raises RuntimeError after END_TIMEOUT."""
        deadline = time.monotonic() + END_TIMEOUT
        while True:
            left = [process.pid for process in self.processes()]
            if not left:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {left} still run {END_TIMEOUT:g} s after the kill; see {self.log}")
            time.sleep(0.2)

    def __enter__(self) -> "Controller":
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes():
            process.kill()
        self.process.wait()


def draw_kill(draw: random.Random, victim: str | None, moment: str | None) -> Kill:
    """A random kill. A given victim or moment replaces the random victim or moment."""
    step = 1 + draw.randrange(SFT_STEPS + MAIN_STEPS - 5)  # early enough that the run cannot end before the kill
    drawn = Kill(victim=draw.choice(VICTIMS), moment=draw.choice(MOMENTS), step=step, delay=draw.random() / 2)
    return replace(drawn, victim=victim or drawn.victim, moment=moment or drawn.moment)


def carry_out(kill: Kill, run: Controller, folder: RunFolder) -> None:
    """Wait for the moment of the kill and kill the process. Raises RuntimeError if the moment does not come."""
    deadline = time.monotonic() + RUN_TIMEOUT

    def wait_until(condition: Callable[[], bool], pause: float) -> None:
        while not condition():
            if run.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run ended or hung before {kill}; see {run.log}")
            time.sleep(pause)

    def reached_step() -> bool:
        return any(record["step"] >= kill.step for record in read_jsonl(folder.metrics))

    wait_until(reached_step, 0.02)
    victim = run.trainer() if kill.victim == "trainer" else run.process
    if kill.moment == "writing":
        wait_until(lambda: has_partial_checkpoint(folder), 0.0005)
    else:
        time.sleep(kill.delay)
    victim.kill()
    run.process.wait(END_TIMEOUT)


def has_partial_checkpoint(folder: RunFolder) -> bool:
    """True if a checkpoint is being written, or was being written when the run was killed."""
    return any(folder.checkpoints.glob("step-*/trainer.partial"))


def run_round(
    kill: Kill, folder: RunFolder, expected: list[dict[str, Any]], module: str, arguments: list[object]
) -> str:
    """Begin a run, kill one of its processes, and resume the run. Returns a text about the round.

    Raises RuntimeError if the run fails or its metrics differ. expected: the records of the uninterrupted run, one for each step.
    """
    log = folder.path.with_suffix(".log")
    with Controller(module, *arguments, "--output-dir", folder.path, log=log) as run:
        carry_out(kill, run, folder)
        run.wait_until_gone()
    num_lines = len(read_jsonl(folder.metrics))
    was_writing = has_partial_checkpoint(folder)
    newest = checkpoints.newest(folder.checkpoints)
    with Controller(module, "--resume", folder.path, log=log) as resumed:
        resumed.finish()
    differing = differences(expected, read_jsonl(folder.metrics))
    if differing:
        raise RuntimeError(f"{len(differing)} values differ: {'; '.join(differing[:5])}")
    state = "with a checkpoint half written, " if was_writing else ""
    return f"killed after {num_lines} lines of metrics.jsonl, {state}resumed from {newest.name if newest else 'the first step'}"


def differences(expected: list[dict[str, Any]], actual: list[dict[str, Any]]) -> list[str]:
    """A text for each difference between the records of two runs. Metrics of speed, memory and weight transfers are not compared."""
    expected_steps = [record["step"] for record in expected]
    actual_steps = [record["step"] for record in actual]
    if actual_steps != expected_steps:
        return [f"steps {actual_steps} instead of {expected_steps}"]
    found = []
    for one, other in zip(expected, actual, strict=True):
        for key in sorted(one.keys() | other.keys()):
            if key.startswith(("time/", "tokens/s", "memory/", "busy/", "weights/", "mfu")) or "per_second" in key:
                continue
            if not close(one.get(key), other.get(key)):
                found.append(f"step {one['step']}: {key}={other.get(key)!r} instead of {one.get(key)!r}")
    return found


def close(one: Any, other: Any) -> bool:
    """True if two values of a metric are equal. If `one` is a float, a number within TOLERANCE of it counts as equal, too."""
    if type(one) is float and type(other) in (int, float):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return one == other


def flags(config: str, seed: int) -> list[object]:
    arguments: list[object] = ["--config", config, "--seed", seed]
    for flag, value in (FLAGS | FLAGS_OF_CONFIG[config]).items():
        arguments += [flag, value]
    return arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="number of runs that are killed and resumed")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the runs; the kill of round i is drawn with seed + i"
    )
    parser.add_argument("--config", choices=FLAGS_OF_CONFIG, default="tiny", help="config of the runs")
    parser.add_argument("--victim", choices=VICTIMS, help="kill only this process")
    parser.add_argument(
        "--moment",
        choices=MOMENTS,
        help="kill only at this moment; between: up to half a second after a random step; writing: while a checkpoint is being written",
    )
    parser.add_argument("--folder", type=Path, help="folder of the runs; default: a new temporary folder")
    args = parser.parse_args()
    base = args.folder or Path(tempfile.mkdtemp(prefix="rl_actors_resume_"))
    print(f"seed {args.seed}, runs in {base}", flush=True)
    whole = RunFolder(base / "uninterrupted")
    module = "controllers.ppo" if args.config in CONFIGS["controllers.ppo"] else "controllers.grpo"
    arguments = flags(args.config, args.seed)
    with Controller(module, *arguments, "--output-dir", whole.path, log=base / "uninterrupted.log") as run:
        run.finish()
    expected, lost = read_jsonl(whole.metrics), 0
    for index in range(args.rounds):
        kill = draw_kill(random.Random(args.seed + index), args.victim, args.moment)
        start = time.monotonic()
        try:
            outcome = "ok: " + run_round(kill, RunFolder(base / f"round-{index}"), expected, module, arguments)
        except (RuntimeError, subprocess.TimeoutExpired, StopIteration) as error:
            outcome, lost = f"LOST: {error!r}", lost + 1
        print(
            f"round {index} (seed {args.seed + index}) {kill}: {outcome} ({time.monotonic() - start:.0f} s)", flush=True
        )
    print(f"{args.rounds - lost} of {args.rounds} rounds gave the metrics of the uninterrupted run, {lost} did not")
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
