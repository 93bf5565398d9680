"""A loop's program: command line, checks, start, end and exit status.
Status 0: trained, or --eval-only, --plan or --dry-run succeeded. 1: failed. 2: the config cannot
run. 3: the gate was missed. 130 after Ctrl-C, 143 after SIGTERM.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TextIO

from monarch.actor import shutdown_context
from rich.console import Console

from controllers import config_file
from controllers.command import started_as
from controllers.environments import (
    AnyEnvironment,
    EpisodeEnvironment,
    EpisodeError,
    RewardError,
    Scorer,
    build_environment,
)
from controllers.environments.data import DataEnvironment
from controllers.environments.held_out import HeldOut, digests_of
from controllers.environments.mixture import Excluding, MixedEnvironment
from controllers.observe.display import LineDisplay
from controllers.observe.logger import MetricsLogger
from controllers.observe.report import write_report
from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.program import cli, describe_plan
from controllers.rollouts.episodes import require_demonstrations
from controllers.rollouts.evaluation import EvaluationSet, build_sets
from controllers.rollouts.tokenizer import (
    NUM_SPECIAL_TOKENS,
    Tokenizer,
    alphabet_of,
    build_character_tokenizer,
    load_tokenizer,
)
from controllers.run import checkpoints, restart_process
from controllers.run.actors import StartAgainError
from controllers.run.config import RunConfig
from controllers.run.gate import MISSED_STATUS, GateMissedError
from controllers.run.interruption import Interrupted, Interruption
from controllers.run.problems import known_problems, require_fitting
from controllers.run.recovery import Train, train_to_end
from controllers.run.run import Run, make_evaluator, open_generator, open_run
from rl_actors import validation
from rl_actors.processes import kernel_caches
from rl_actors.processes.output import RoutedOutput, route_logs
from rl_actors.vllm.start import require_machine

SHUTDOWN_TIMEOUT = 15.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Task:
    environment: AnyEnvironment
    evaluation_sets: Sequence[EvaluationSet]
    tokenizer: Tokenizer
    scorer: Scorer


def start_loop(controller: str) -> None:
    """`main` for a loop of this package, by its module, such as "controllers.grpo"."""
    configs = import_module("configs").CONFIGS
    main(import_module(controller).train, configs[controller], others=configs)


def main(train: Train, configs: cli.Configs, *, others: Mapping[str, cli.Configs] | None = None) -> None:
    """Do what the command line of a training loop asks, and exit. Any file can be a loop:

    if __name__ == "__main__":
        main(train, {"mine": mine})

    train: the loop, a coroutine function that takes a Run. configs: name -> function that makes a
    config; the first is the default of --config. others: of other loops, for an error text.
    """
    controller = module_of(train)
    prog = started_as(controller)
    invocation = cli.parse(prog, configs, configs_by_controller=others)
    if invocation.cache_dir:
        os.environ[kernel_caches.VARIABLE] = str(invocation.cache_dir)
    try:
        if invocation.plan:
            print(describe_plan.describe(invocation.config), flush=True)
        _require_devices(invocation, controller)
        if invocation.plan:
            return
        invocation = _with_checkpoint(invocation, controller)
        config, task = _with_task(invocation.config)
        invocation = replace(invocation, config=config)
        if invocation.dry_run and config.has_generator:
            asyncio.run(_try_rewards(task))
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(2)
    if invocation.save_config:
        config_file.write(invocation.config, invocation.save_config)
    if invocation.dry_run:
        cli.print_config(invocation.config)
        return
    death: StartAgainError | None = None
    try:
        status = _run(invocation, task, train)
    except StartAgainError as error:
        death = error
    # At the interpreter's exit Monarch would wait only one second, and print a traceback.
    with contextlib.suppress(Exception, KeyboardInterrupt):
        shutdown_context().get(timeout=SHUTDOWN_TIMEOUT)
    if death is not None:
        status = _go_on_in_new_program(invocation, death)
    if status:
        print(_resume_text(prog, RunFolder(invocation.output_dir), invocation.config), end="", flush=True)
    sys.exit(status)


def module_of(train: Train) -> str:
    """The loop as it was started: "controllers.grpo", or "my_loop.py" for a script."""
    running = sys.modules["__main__"]
    if train.__module__ != "__main__":
        return train.__module__
    return running.__spec__.name if running.__spec__ is not None else sys.argv[0]


def _go_on_in_new_program(invocation: cli.Invocation, death: StartAgainError) -> int:
    """Wait for the lost workers and replace this process. Returns an exit status if the run cannot
    go on."""
    folder = RunFolder(invocation.output_dir)
    try:
        if restart_process.wait(invocation.config, folder, death, functools.partial(print, flush=True)):
            restart_process.start_again(folder, verbose=invocation.verbose)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (OSError, ValueError) as error:
        print(f"This program cannot start again: {error}", flush=True)
    print(f"The run failed: {death}.", flush=True)
    return 1


def _require_devices(invocation: cli.Invocation, controller: str) -> None:
    """Raise ValueError if the machine lacks devices or memory, or --eval-only a generator."""
    config = invocation.config
    if not invocation.eval_only and not config.hosts.addresses:
        for name, model in config.models().items():
            validation.require_gpus(model, name)
    if config.has_generator:
        num_hosts = len(config.hosts.of_generators()) if config.hosts.addresses else 1
        validation.require_gpu(config.generator, num_hosts)
        require_machine(config.generator)
    elif invocation.eval_only:
        raise ValueError(f"--eval-only scores completions, but {controller} has no generator that makes them")
    describe_plan.require_memory(config, trains=not invocation.eval_only)


def _with_checkpoint(invocation: cli.Invocation, loop: str) -> cli.Invocation:
    """With the newest checkpoint in the place of a run's folder in eval_only. Of a resumed run, sets
    damaged checkpoints aside (except in a dry run) and checks the loop and the config.
    """
    if invocation.eval_only:
        checkpoint = checkpoints.find(invocation.eval_only)
        if not invocation.dry_run:
            cli.require_writable("--eval-only", checkpoint)  # the log of the evaluation is written there
        invocation = replace(invocation, eval_only=checkpoint)
    if invocation.resume:
        folder = RunFolder(invocation.resume)
        own = json.loads(folder.start.read_text()).get("loop", loop) if folder.start.exists() else loop
        if Path(own).name != Path(loop).name:
            raise ValueError(
                f"--resume {folder.path}: this run's loop is {own}, which must continue it, and not {loop}"
            )
        if not invocation.dry_run:
            for line in checkpoints.set_aside_damaged(folder.checkpoints):
                print(line, flush=True)
        invocation.config.validate_resumed(folder)
    return invocation


def _resume_text(prog: str, folder: RunFolder, config: RunConfig) -> str:
    """A line with the command that continues the run; "" if nothing can be continued."""
    command = f"{prog} --resume {shlex.quote(str(folder.path))}"
    newest = checkpoints.newest(folder.checkpoints)
    if newest is not None:
        return f"to continue this run from step {checkpoints.read(newest)['step'] + 1}: {command}\n"
    if config.checkpoint_every and folder.config.is_file():
        return f"no checkpoint is complete; to start this run again from step 1: {command}\n"
    return ""


def _with_task(config: RunConfig) -> tuple[RunConfig, Task]:
    """The task, and the config with its alphabet. Raises ValueError if a part cannot be built."""
    environment, evaluation_sets = _environments(config)
    config = _with_alphabet(config, environment, evaluation_sets)
    tokenizer = _tokenizer(config, environment, evaluation_sets)
    rewarding: dict[str, AnyEnvironment] = {"environment": environment}
    rewarding |= {f"evaluation.{each.name}": each.environment for each in evaluation_sets if each.name}
    scorer = Scorer.of(config.environment, rewarding if config.has_generator else {})
    return config, Task(environment=environment, evaluation_sets=evaluation_sets, tokenizer=tokenizer, scorer=scorer)


def _environments(config: RunConfig) -> tuple[AnyEnvironment, list[EvaluationSet]]:
    """The environment and the held-out sets. Raises ValueError for a task that cannot be built."""
    own = replace(config.environment, seed=config.seed + config.environment.seed)
    before = config.held_out_before()
    if before is not None and own.held_out_seed is None:
        own.held_out_seed = before.seed
    environment = build_environment(own)
    if config.is_supervised:
        require_demonstrations(environment)
    if before is not None:
        print(f"held out as in the run that made {config.trainer.hf_path}", file=sys.stderr)
        if isinstance(environment, Excluding):
            environment.exclude(before.digests)
    for part in environment.environments.values() if isinstance(environment, MixedEnvironment) else [environment]:
        if isinstance(part, DataEnvironment) and part.num_excluded:
            print(f"{part.config.task}: {part.num_excluded} rows have held-out prompts; not trained", file=sys.stderr)
    return environment, build_sets(environment, config.evaluation, seed=config.seed)


def _with_alphabet(
    config: RunConfig, environment: AnyEnvironment, evaluation_sets: Sequence[EvaluationSet]
) -> RunConfig:
    """With alphabet="auto": the characters of the known problems, and the vocab_size for them."""
    if config.alphabet != "auto":
        return config
    problems = known_problems(environment, evaluation_sets)
    texts = [problem.prompt for problem in problems]
    for problem in problems:
        texts += [each.answer for each in config.with_all_answers(problem)]
    alphabet = alphabet_of(texts)
    model = replace(config.trainer.model, vocab_size=len(alphabet) + NUM_SPECIAL_TOKENS)
    return replace(config, alphabet=alphabet, trainer=replace(config.trainer, model=model))


def _tokenizer(config: RunConfig, environment: AnyEnvironment, evaluation_sets: Sequence[EvaluationSet]) -> Tokenizer:
    """Raises ValueError if it has more tokens than the model, or for a problem that is too long."""
    if config.alphabet:
        with tempfile.TemporaryDirectory() as directory:
            build_character_tokenizer(directory, config.alphabet)
            tokenizer = load_tokenizer(directory, config.chat)
    else:
        tokenizer = load_tokenizer(config.trainer.hf_path, config.chat)
    if len(tokenizer) > (rows := config.trainer.model.vocab_size):
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens but trainer.model.vocab_size={rows}")
    require_fitting(config, tokenizer, environment, evaluation_sets)
    return tokenizer


async def _try_rewards(task: Task) -> None:
    """Call every reward function on the answer of one held-out problem. Episodes have no such function.

    Raises ValueError, naming the function and the place of its error, if a function fails.
    """
    with contextlib.closing(task.scorer) as scorer:
        scorer.start()
        for each in task.evaluation_sets:
            if isinstance(each.environment, EpisodeEnvironment):
                continue
            first = {problem.source: problem for problem in reversed(each.problems)}  # of each part of a mixture
            for problem in first.values():
                print(await scorer.try_on_answer(each.environment, problem), file=sys.stderr)


def _run(invocation: cli.Invocation, task: Task, train: Train) -> int:
    """Train or evaluate. Returns the exit status; errors but StartAgainError go to terminal and log."""
    folder = RunFolder(invocation.eval_only or invocation.output_dir)
    log_file = folder.log("evaluation" if invocation.eval_only else "controller")
    quiet = contextlib.nullcontext() if invocation.verbose else RoutedOutput(log_file)
    with quiet as output, contextlib.closing(task.scorer):
        terminal = sys.stdout if output is None else output.terminal
        route_logs(log_file, label="controller", verbose=invocation.verbose)
        try:
            task.scorer.start()  # after RoutedOutput: its processes inherit this process's output
        except ValueError as error:
            print(f"error: {error}", file=terminal)
            return 2
        interruption = Interruption(on_event=functools.partial(print, file=terminal))
        work = (
            _evaluate(invocation, folder, task, terminal)
            if invocation.eval_only
            else _train(train, invocation, folder, task, terminal, interruption)
        )
        try:
            return asyncio.run(_until_signal(work, interruption))
        except GateMissedError as error:
            print(f"The run ends: {error}.", file=terminal)
            return MISSED_STATUS
        except StartAgainError as error:
            logging.getLogger(__name__).error("a process on a host has died", exc_info=error)
            raise
        except BaseException as error:
            logging.getLogger(__name__).error("the run failed", exc_info=error)
            print("".join(traceback.format_exception(error)), file=terminal)
            print(f"The run failed: {type(error).__name__}: {error}. Logs: {log_file.parent}", file=terminal)
            return 1


async def _until_signal(work: Awaitable[int], interruption: Interruption) -> int:
    """The exit status of the work, which still closes everything after a signal."""
    working = asyncio.ensure_future(work)
    interruption.watch(working)
    try:
        return await working
    except (Interrupted, asyncio.CancelledError):
        if interruption.received is None:
            raise
        return 128 + interruption.received


async def _train(
    train: Train,
    invocation: cli.Invocation,
    folder: RunFolder,
    task: Task,
    terminal: TextIO,
    interruption: Interruption,
) -> int:
    """Open the run, train to the last step, and write the report. Returns the exit status."""
    config = invocation.config
    newest = checkpoints.newest(folder.checkpoints) if invocation.resume else None
    state = checkpoints.read(newest) if newest else {}
    _prepare(folder, config, task.environment, module_of(train))
    try:
        with MetricsLogger(
            folder,
            steps_done=state.get("step", 0),
            trackers=config.all_trackers(),
            project=config.wandb_project or config.tracker_project,
            config=asdict(config),
            prints_lines=invocation.verbose,
            console=Console(file=terminal),
        ) as log:
            interruption.on_event = log.note  # a line printed in any other way would break the live panel
            log.note(f"run folder: {folder.path}")
            opening = open_run(
                config,
                folder,
                task.environment,
                task.evaluation_sets,
                task.tokenizer,
                log=log,
                scorer=task.scorer,
                interruption=interruption,
                state=state,
                verbose=invocation.verbose,
            )
            async with opening as run:
                checkpoints.seed_random(config.seed)
                if newest is not None:
                    checkpoints.restore_random_states(run.state["random"])
                    with log.setup(f"resuming from {newest}"):
                        await run.trainer.load_checkpoint(str(newest / "trainer"))
                elif invocation.resume:
                    log.note("no checkpoint of this run is complete; the run starts again from step 1")
                run.timer.reset()
                with interruption.training():
                    await _train_until_asked(run, train)
    finally:
        write_report(folder.path)
        print(f"report: {folder.report}", file=terminal)
    return 0


def _prepare(folder: RunFolder, config: RunConfig, environment: AnyEnvironment, loop: str) -> None:
    """Remove incomplete checkpoints, and write what a resumed run needs to the run's folder."""
    checkpoints.remove_incomplete(folder.checkpoints)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.config.write_text(config_file.to_json(config))
    if not folder.start.exists():  # a resumed run keeps the command that began it
        command = shlex.join([*started_as(loop).split(" "), *sys.argv[1:]])
        start = {"loop": loop, "command": command, "time": datetime.now().isoformat(timespec="minutes")}
        folder.start.write_text(json.dumps(start, indent=2))
    if not folder.held_out.exists():
        before = config.held_out_before()
        seed = config.seed + config.environment.seed
        if config.environment.held_out_seed is not None:
            seed = config.environment.held_out_seed
        elif before is not None:
            seed = before.seed
        digests = digests_of(environment.held_out())
        held_out = HeldOut(seed=seed, digests=digests | (before.digests if before else frozenset()))
        folder.held_out.write_text(held_out.to_json())
    if not folder.data.exists():
        folder.data.write_text(json.dumps(config.data_digests(), indent=2))
    if config.alphabet:
        build_character_tokenizer(folder.path / "tokenizer", config.alphabet)


async def _train_until_asked(run: Run, train: Train) -> None:
    """`train_to_end` with the gate. ValueErrors of rewards and episodes get step and environment."""
    supervision = run.supervision
    if supervision.gate is not None:
        supervision.gate.recall(read_jsonl(run.folder.metrics))
    try:
        await train_to_end(run, train)
    except (RewardError, EpisodeError) as error:
        step = (supervision.last_state or run.state).get("step", 0) + 1
        raise ValueError(f"step {step}, environment {run.config.environment.task}: {error}") from None
    if supervision.gate is not None:
        supervision.gate.end()


async def _evaluate(invocation: cli.Invocation, folder: RunFolder, task: Task, terminal: TextIO) -> int:
    """Score a checkpoint on the held-out problems. Only logs stay on disk."""
    # loads torchtitan, which a controller does not need
    from rl_actors.engine.export import export_checkpoint, policy_version

    config = invocation.config
    checkpoint = str(folder.path / "trainer")
    display = LineDisplay(Console(file=terminal), None)
    with tempfile.TemporaryDirectory(prefix="rl_actors_evaluation_") as directory:
        model = str(Path(directory) / "model")
        with display.setup("reading the checkpoint"):
            export_checkpoint(checkpoint, config.trainer, model, dtype=config.generator.dtype)
        async with open_generator(config, folder, model, display.setup, verbose=invocation.verbose) as generator:
            evaluate = make_evaluator(config, task.evaluation_sets, generator, task.tokenizer, task.scorer)
            scores = await evaluate()
    found = ", ".join(f"{name} {value:.4f}" for name, value in scores.metrics.items())
    display.print(f"{folder.path}: policy_version {policy_version(checkpoint)}, {found}")
    return 0
