"""Runs whose processes are killed or stopped at random moments. Each run must recover by itself and end like the undisturbed run.

A round starts a short run of GRPO or PPO with the tiny model, synchronous or asynchronous. The round sends SIGKILL or SIGSTOP to a process of
this run at a random moment. The round's number decides the kind of this process, such as trainer or generator. In about half of the rounds a
second process is killed up to 12 seconds later. The undisturbed run has the same flags, but none of its processes is killed or stopped.

The run of a round must end with status 0, with all steps, and at the same position in the data as the undisturbed run. The run must have
trained on the same number of problems as the undisturbed run, and on no problem twice. A synchronous run must have trained on exactly the
problems of the undisturbed run. No process and no shared memory may be left.

The program also measures the seconds from the first signal to the record of the next step after the recovery, and the seconds from the command to
the first step of the same run, the start. In rounds that send only one signal, after the actors have started, the recovery has a limit, the bar:
the median must not be above the multiple of the start in BARS, and the longest must not be above twice that. The `--silent-after` seconds after
a SIGSTOP do not count. The exit status is 1 if a round has a fault. It is also 1 if a limit is exceeded, unless `--without-bars` is given.

Every finished round writes a line to drills.jsonl in the folder that `--folder` names. If the program is interrupted, the same command runs the
rounds that have no line yet.
"""

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil

from controllers.observe.run_folder import Record, RunFolder, read_jsonl
from controllers.run import checkpoints
from tests.drills import shared_memory
from tests.drills.resume import RUN_TIMEOUT, Controller

SFT_STEPS, STEPS = 2, 8
KINDS = ("trainer", "critic", "reference", "generator", "engine", "store")
"""Kinds of processes that are killed or stopped. "critic": PPO's value model. "engine": vLLM's engine core, in runs that give it a process of its
own. "store": the process in which the memory transport keeps the published weights."""
LOOPS, MODES = ("grpo", "ppo"), ("sync", "async")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
PROCESS_NAMES = {"store": "memory"}
"""Kind -> the name of the processes of this kind. A kind that is missing here is itself the name."""
BARS = dict.fromkeys(KINDS, 1.0) | {"store": 1.5}
"""Kind -> limit of the median seconds from a kill to the next step, as a multiple of the start of the same run. The longest time may be twice
this limit. After the death of the store all actors start again, also reference and critic, for which the start does not wait."""
CIRCUMSTANCES = ("one death", "two deaths", "start")
"""The circumstances of a round. A SIGSTOP counts as a death, too. Only "one death" rounds have limits. In a "start" round the only death happens
while the actors start. Such a round has no limit, because its seconds include the rest of the start."""
LOOK_PAUSE = 0.25
"""Seconds between two checks of the shared memory and the steps of a run."""
LONGEST_DELAY = 1.5  # largest number of seconds between the record of a step and the first death
# Seconds between the end of a run and the check of its shared memory. A new semaphore has a file in /dev/shm for a moment. This file is no leak.
SHARED_MEMORY_PAUSE = 2.0
# Largest number of seconds from the start of a run to a death during the start. A run takes at least 13 s, so it is still running at the death.
LONGEST_START = 8.0
LONGEST_RECOVERY = 12.0  # largest number of seconds between the first and the second death


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The run of a round, and the signals that the round sends. The round's number and the flags of the command determine all fields."""

    number: int
    kind: str  # kind of the process that gets the first signal
    sent: str  # the first signal: "kill" or "stop"
    loop: str
    mode: str
    after_step: int  # the first signal comes after the record of this step; -1: while the actors start
    delay: float  # seconds from the record of this step, or from the start of the run, to the first signal
    second: str = ""  # kind of the second process, which is always killed; "" if there is only one signal
    second_delay: float = 0.0  # seconds from the first signal to the second

    @property
    def variant(self) -> str:
        """The name of the undisturbed run that this round's run is compared with."""
        place = {"store": "-memory", "engine": "-engine"}
        return f"{self.loop}-{self.mode}{place.get(self.kind, '')}"


def draw_round(number: int, seed: int, kinds: Sequence[str], loops: Sequence[str], modes: Sequence[str]) -> Round:
    draw = random.Random(f"{seed} {number}")
    kind, sent = kinds[number % len(kinds)], draw.choice(list(SIGNALS))
    loop = "ppo" if kind == "critic" else draw.choice(list(loops))
    possible = [each for each in kinds if each in ("trainer", "reference", "generator") or each == kind]
    has_second, at_start = draw.random() < 0.5, draw.random() < 0.1
    return Round(
        number=number,
        kind=kind,
        sent=sent,
        loop=loop,
        mode=draw.choice(list(modes)),
        after_step=-1 if at_start else draw.randrange(SFT_STEPS + STEPS - 2),
        delay=draw.random() * (LONGEST_START if at_start else LONGEST_DELAY),
        second=draw.choice(possible) if has_second else "",
        second_delay=draw.random() * LONGEST_RECOVERY,
    )


def flags(loop: str, mode: str, kind: str, args: argparse.Namespace) -> list[object]:
    values: dict[str, object] = {
        "--config": "tiny" if loop == "grpo" else "tiny_ppo",
        "--seed": args.seed,
        "--steps": STEPS,
        "--sft-steps": SFT_STEPS,
        "--checkpoint-every": 3,
        "--evaluate-every": 4,
        "--updates-per-step": 1,
        "--epochs-per-step": 1,
        # `problems` needs all groups of a step. The logger keeps four groups of a step in rollouts.jsonl, and a step of these runs has only four.
        # A group whose rewards are all equal is not trained on. The rewards of 32 completions are almost never all equal, so almost every step
        # trains on four groups.
        "--rollouts.groups-per-step": 4,
        "--rollouts.group-size": 32,
        "--rollouts.dynamic-sampling-rounds": 0,
        "--rollouts.max-staleness": 0 if mode == "sync" else 2,
        "--environment.task": "tests.fakes:parity_reward",
        "--environment.options": "{}",
        "--reference-kl": 0.01,
        "--survival.silent-after": args.silent_after,
    }
    if kind == "store":
        values["--transport"] = "memory"
    if loop == "ppo":
        values["--critic.warmup-steps"] = 0
    arguments: list[object] = []
    for flag, value in values.items():
        arguments += [flag, value]
    if kind == "engine":
        arguments += ["--generator.own-process", True]
    if args.ranks > 1:
        arguments += ["--trainer.parallelism.data-parallel-shard-degree", args.ranks]
    return arguments


def victims(run: Controller, kind: str) -> list[psutil.Process]:
    """The processes of a kind, without the child processes that these processes have started."""
    if kind == "engine":
        return [process for process in run.processes() if "EngineCore" in _name(process)]
    found = run.actors(PROCESS_NAMES.get(kind, kind))
    pids = {process.pid for process in found}
    return [process for process in found if process.ppid() not in pids]


def _name(process: psutil.Process) -> str:
    """The name of a process, or "" if it has ended."""
    try:
        return process.name()
    except psutil.Error:
        return ""


def wait_until(condition: Callable[[], object], run: Controller, what: str, pause: float = 0.02) -> None:
    """Wait until the condition holds. Raises RuntimeError if the run ends first, or if the wait takes RUN_TIMEOUT seconds.

    what: the awaited event, as a noun for the error text.
    """
    deadline = time.monotonic() + RUN_TIMEOUT
    while not condition():
        if run.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run ended or hung before {what}; see {run.log}")
        time.sleep(pause)


class Watch:
    """A thread that notes which shared memory the processes of a run use, and when the run records a step."""

    def __init__(self, run: Controller, folder: RunFolder) -> None:
        self.run, self.folder = run, folder
        self.segments: set[shared_memory.Inode] = set()  # the shared memory that the run has used so far
        self.steps: list[tuple[float, int]] = []  # (seconds since 1970 when the step was seen, its number)
        self._before = set(shared_memory.segments().values())
        self._last = -1
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_again_and_again, daemon=True)

    def look(self) -> None:
        """Note the shared memory that is used now, and the step that was recorded last."""
        self.segments |= shared_memory.used_by(self.run.processes()) - self._before
        lines = read_jsonl(self.folder.metrics)
        last = lines[-1]["step"] if lines else -1
        if last > self._last and lines[-1]["phase"] != "start":
            self.steps.append((time.time(), last))
        self._last = last  # lower than before if a recovery has removed the lines of steps that it repeats

    def _look_again_and_again(self) -> None:
        while not self._ended.wait(LOOK_PAUSE):
            self.look()

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join(RUN_TIMEOUT)


def strike(watch: Watch, kind: str, sent: str, draw: random.Random) -> float:
    """Wait until there is a process of this kind, and send the signal to a random one. Returns the signal's time, in seconds since 1970."""
    run = watch.run
    wait_until(lambda: victims(run, kind), run, f"the start of a process of the kind {kind}", pause=0.05)
    watch.segments |= shared_memory.used_by(victims(run, kind))
    draw.choice(victims(run, kind)).send_signal(SIGNALS[sent])
    return time.time()


def carry_out(drawn: Round, watch: Watch) -> float:
    """Wait for the moments of the round and send its signals. Returns the time of the first signal, in seconds since 1970."""
    draw, metrics = random.Random(drawn.number), watch.folder.metrics
    if drawn.after_step >= 0:
        wait_until(
            lambda: any(line["step"] >= drawn.after_step for line in read_jsonl(metrics)),
            watch.run,
            f"step {drawn.after_step}",
        )
    time.sleep(drawn.delay)
    moment = strike(watch, drawn.kind, drawn.sent, draw)
    if drawn.second:
        time.sleep(drawn.second_delay)
        with contextlib.suppress(RuntimeError, psutil.Error):  # the run may have ended before the second signal
            strike(watch, drawn.second, "kill", draw)
    return moment


def problems(folder: RunFolder) -> Counter[str]:
    """The prompts that the run has trained on, and how often it has trained on each."""
    return Counter(line["prompt"] for line in read_jsonl(folder.rollouts))


def cursor(folder: RunFolder) -> int:
    """The run's position in the data: the index of the next problem, from the newest checkpoint."""
    newest = checkpoints.newest(folder.checkpoints)
    if newest is None:
        raise RuntimeError(f"{folder.path} has no checkpoint")
    return checkpoints.read(newest)["cursor"]


def seconds_to_next_step(restarts: Sequence[Record], steps: Sequence[tuple[float, int]], moment: float) -> float | None:
    """Seconds from a death to the record of the first step after its recovery. None if no step came.

    restarts: lines of restarts.jsonl. steps: see Watch.steps. moment: the time of the death, in seconds since 1970.

    If the death has no line in restarts.jsonl, the seconds end at the next recorded step. The death of the trainer or of the store has no line if it
    comes before trainer and generator are ready for the first time. The death of a generator gets its line at the end of the first step after
    the generator's return. If no step after the death needs the generator, the run may end before this return, and then the death has no line.
    """
    for line in restarts:
        noticed = datetime.fromisoformat(line["time"]).timestamp()
        if noticed >= moment - 0.1 and line["seconds"] is not None:
            return noticed + line["seconds"] - moment
    later = [seen - moment for seen, _ in steps if seen >= moment]
    return later[0] if later else None


def faults(folder: RunFolder, whole: RunFolder, mode: str) -> list[str]:
    """The differences between a run and the undisturbed run, as texts. whole: the folder of the undisturbed run."""
    found = []
    steps = [line["step"] for line in read_jsonl(folder.metrics)]
    expected = [line["step"] for line in read_jsonl(whole.metrics)]
    if steps != expected:
        found.append(f"steps {steps} instead of {expected}")
    if cursor(folder) != cursor(whole):
        found.append(f"data position {cursor(folder)} instead of {cursor(whole)}")
    trained, wanted = problems(folder), problems(whole)
    if mode == "sync" and trained != wanted:
        found.append(f"{sum((wanted - trained).values())} problems lost, {sum((trained - wanted).values())} too many")
    twice = sum(count > 1 for count in trained.values())
    if twice:
        found.append(f"{twice} problems trained twice")
    if sum(trained.values()) != sum(wanted.values()):
        found.append(f"{sum(trained.values())} problems trained instead of {sum(wanted.values())}")
    return found


def run_round(drawn: Round, base: Path, args: argparse.Namespace) -> Record:
    """Carry out the round. Returns the round's line for drills.jsonl."""
    whole = undisturbed(drawn, base, args)
    folder = RunFolder(base / f"round-{drawn.number}")
    begin = time.monotonic()
    arguments = flags(drawn.loop, drawn.mode, drawn.kind, args)
    log, module = base / f"round-{drawn.number}.log", f"controllers.{drawn.loop}"
    found: list[str] = []
    seconds = None
    started = time.time()
    with Controller(module, *arguments, "--output-dir", folder.path, log=log) as run, Watch(run, folder) as watch:
        try:
            moment = carry_out(drawn, watch)
            run.finish()
            watch.look()
            found += faults(folder, whole, drawn.mode)
            seconds = seconds_to_next_step(read_jsonl(folder.restarts), watch.steps, moment)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        try:
            run.wait_until_gone()
        except RuntimeError as error:
            found.append(f"orphans: {error}")
    time.sleep(SHARED_MEMORY_PAUSE)
    if left := shared_memory.left_behind(watch.segments):
        found.append(f"left in /dev/shm: {left}")
    causes = [line["cause"] for line in read_jsonl(folder.restarts)]
    return {
        **asdict(drawn),
        "faults": found,
        "seconds": seconds,
        "start": watch.steps[0][0] - started if watch.steps else None,
        "wall": time.monotonic() - begin,
        "causes": causes,
    }


def undisturbed(drawn: Round, base: Path, args: argparse.Namespace) -> RunFolder:
    """The folder of the undisturbed run of this variant. If this run is not finished, the function first starts or continues it."""
    folder = RunFolder(base / f"undisturbed-{drawn.variant}")
    if folder.outcome.exists() and json.loads(folder.outcome.read_text())["status"] == "finished":
        return folder
    again = ["--resume", folder.path] if folder.config.exists() else None
    arguments = again or [*flags(drawn.loop, drawn.mode, drawn.kind, args), "--output-dir", folder.path]
    log = base / f"undisturbed-{drawn.variant}.log"
    with Controller(f"controllers.{drawn.loop}", *arguments, log=log) as run:
        run.finish()
        run.wait_until_gone()
    return folder


def recovered(lines: Sequence[Record], kind: str, sent: str, circumstances: str) -> list[Record]:
    """The rounds with this kind, this signal, these circumstances (one of CIRCUMSTANCES) and a step after the first signal."""
    wanted = (kind, sent, circumstances)
    chosen = [line for line in lines if (line["kind"], line["sent"], circumstances_of(line)) == wanted]
    return [line for line in chosen if line["seconds"] is not None]


def circumstances_of(line: Record) -> str:
    if line["second"]:
        return "two deaths"
    return "start" if line["after_step"] < 0 else "one death"


def shares_of_start(lines: Sequence[Record], kind: str, sent: str, silent_after: float) -> list[float]:
    """Seconds to the next step over the start of the same run, of each round with this kind and signal and with one death.

    The seconds of silence after which a stopped process counts as dead are left out.
    """
    silence = silent_after if sent == "stop" else 0.0
    return [(line["seconds"] - silence) / line["start"] for line in recovered(lines, kind, sent, "one death")]


def missed_bars(lines: Sequence[Record], silent_after: float) -> list[str]:
    """A text for every limit that the rounds with one death exceed."""
    missed = []
    for kind in KINDS:
        for sent in SIGNALS:
            shares = shares_of_start(lines, kind, sent, silent_after)
            if not shares:
                continue
            bar = BARS[kind]
            for name, share, limit in (("median", statistics.median(shares), bar), ("worst", max(shares), 2 * bar)):
                if share > limit:
                    missed.append(f"{kind} {sent}: the {name} is {share:.2f} of the start, the bar {limit:.2f}")
    return missed


def table(lines: Sequence[Record], silent_after: float) -> str:
    """The results as a table with a row for each kind and signal.

    The column "rounds" has the number of rounds, and "whole" the number of rounds without a fault. The other columns
    have a median and a longest value: of the rounds with one death as multiples of the start, without the silence, which have limits (BARS);
    then the seconds to the next step in rounds with one death, with two deaths, and with a death during the start.
    """
    circumstances = "".join(f"   {each:>12}" for each in CIRCUMSTANCES)
    rows = [f"{'process':<12} {'signal':<6} {'rounds':>6} {'whole':>6}   {'of the start':>12}{circumstances}"]
    for kind in KINDS:
        for sent in SIGNALS:
            of_kind = [line for line in lines if (line["kind"], line["sent"]) == (kind, sent)]
            if not of_kind:
                continue
            whole = sum(not line["faults"] for line in of_kind)
            row = f"{kind:<12} {sent:<6} {len(of_kind):>6} {whole:>6}"
            row += f"   {_median_and_worst(shares_of_start(lines, kind, sent, silent_after), 2):>12}"
            for each in CIRCUMSTANCES:
                seconds = [line["seconds"] for line in recovered(lines, kind, sent, each)]
                row += f"   {_median_and_worst(seconds, 1):>12}"
            rows.append(row)
    return "\n".join(rows)


def _median_and_worst(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f}, {max(values):.{digits}f}" if values else "-, -"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="number of rounds")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of processes that die, separated by commas")
    parser.add_argument("--loops", default=",".join(LOOPS), help="training loops of the runs, separated by commas")
    parser.add_argument("--modes", default=",".join(MODES), help="sync, async or both, separated by a comma")
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs, and of the random choices in the rounds")
    parser.add_argument(
        "--ranks", type=int, default=1, help="number of ranks over which FSDP shards the trainer's weights"
    )
    parser.add_argument(
        "--silent-after",
        type=float,
        default=20.0,
        help="survival.silent_after of the runs: seconds of silence after which a process is killed",
    )
    parser.add_argument(
        "--without-bars",
        action="store_true",
        help="a missed bar does not change the exit status; for a machine that does other work at the same time",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/drills"), help="folder of the runs and of drills.jsonl"
    )
    args = parser.parse_args()
    kinds, loops, modes = (text.split(",") for text in (args.kinds, args.loops, args.modes))
    unknown = (set(kinds) - set(KINDS)) | (set(loops) - set(LOOPS)) | (set(modes) - set(MODES))
    if unknown:
        parser.error(
            f"unknown: {', '.join(sorted(unknown))}. The kinds are {', '.join(KINDS)}, the loops {', '.join(LOOPS)}, the modes {', '.join(MODES)}"
        )
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.folder / "drills.jsonl"
    done = {line["number"] for line in read_jsonl(file)}
    for number in range(args.rounds):
        if number in done:
            continue
        drawn = draw_round(number, args.seed, kinds, loops, modes)
        leftover = RunFolder(args.folder / f"round-{number}")
        if leftover.path.exists():  # an interrupted command left it
            leftover.path.rename(args.folder / f"broken-off-{number}-{time.time():.0f}")
        line = run_round(drawn, args.folder, args)
        with file.open("a") as output:
            output.write(json.dumps(line) + "\n")
        outcome = "; ".join(line["faults"]) or "whole"
        took = "" if line["seconds"] is None else f", {line['seconds']:.1f} s to the next step"
        print(f"round {number} {drawn.variant} {drawn}: {outcome}{took} ({line['wall']:.0f} s)", flush=True)
    lines = [line for line in read_jsonl(file) if line["number"] < args.rounds]
    print(
        "median and longest: of the recovery as a multiple of the start, and in seconds from the signal to the next step"
    )
    print(table(lines, args.silent_after))
    missed = missed_bars(lines, args.silent_after)
    for text in missed:
        print(f"missed: {text}")
    fails = any(line["faults"] for line in lines) or (missed and not args.without_bars)
    sys.exit(1 if fails else 0)


if __name__ == "__main__":
    main()
