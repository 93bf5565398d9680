"""What every controller does around its main path: config, actors, folders, signals, exit status. Trains nothing.

The exit status is 0 only when the run reached its last step, 2 for a config that cannot run, 130 and 143 for Ctrl-C and SIGTERM.
"""

import asyncio
import contextlib
import functools
import logging
import signal
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import Any, Literal, TextIO

import torch
from rich.console import Console

from controllers import checkpoints, cli
from controllers.display import LineDisplay
from controllers.environments import Environment, EnvironmentConfig, Problem, build_environment
from controllers.metrics import MetricsLogger, RunFolder, Timer
from controllers.report import write_report
from controllers.rollouts import greedy_accuracy
from controllers.tokenizer import build_character_tokenizer, encode, load_tokenizer
from rl_actors import GeneratorConfig, OptimParams, TrainerConfig
from rl_actors.logs import route_logs, route_process_output

CLOSE_TIMEOUT = 10.0


@dataclass(kw_only=True)
class AdamConfig:
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    grad_clip_norm: float | None = 1.0
    """Largest gradient norm; None does not clip."""

    def params(self, *, learning_rate: float, grad_divisor: float) -> OptimParams:
        return OptimParams(learning_rate=learning_rate, grad_divisor=grad_divisor, **asdict(self))


@dataclass(kw_only=True)
class RunConfig:
    """What all runs share."""

    steps: int = 100
    """Training steps of the main phase."""
    seed: int = 0
    """Of weights, problems and sampling; the seeds of the parts are added to it."""
    max_tokens: int = 128
    """Longest completion in tokens, in training and in validation."""
    alphabet: str = ""
    """Characters of a character-level tokenizer made for the run; empty: the tokenizer of trainer.hf_path."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """Its model is the trainer's."""
    optimizer: AdamConfig = field(default_factory=AdamConfig)
    transport: Literal["torchstore", "files", "memory"] = "torchstore"
    """How weights get from the trainer to the generator."""
    samples_per_forward_backward: int = 1024
    """Samples of one forward_backward call; a step makes as many calls as its batch needs."""
    validate_every: int = 10
    """Steps between two validations on the held-out problems."""
    checkpoint_every: int = 25
    """Steps between two checkpoints; the last step always writes one."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    wandb_project: str | None = None
    """Report to this wandb project, too."""

    def validate(self) -> None:
        """Raises ValueError naming the field, its value and the limit."""
        for name in (
            "steps",
            "max_tokens",
            "samples_per_forward_backward",
            "validate_every",
            "checkpoint_every",
            "keep_checkpoints",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; it must be at least 1")
        if not self.alphabet and not self.trainer.hf_path:
            raise ValueError("alphabet is empty and trainer.hf_path too; one of them must give a tokenizer")
        longest = {"generator.max_model_len": self.generator.max_model_len}
        longest["trainer.max_sequence_length"] = self.trainer.max_sequence_length
        for name, limit in longest.items():
            if self.max_tokens >= limit:
                raise ValueError(f"max_tokens={self.max_tokens} leaves no room for a prompt in {name}={limit}")
        self.environment.validate()
        self.trainer.validate()
        self.optimizer.params(learning_rate=0.0, grad_divisor=1.0)


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts of a run while it is open."""

    config: Any
    folder: RunFolder
    environment: Environment
    held_out: list[Problem]
    tokenizer: Any
    trainer: Any
    generator: Any
    log: Any  # a MetricsLogger, or for an evaluation a display
    timer: Timer = field(default_factory=Timer)
    state: dict[str, Any] = field(default_factory=dict)  # of the checkpoint that is resumed; empty for a new run

    async def sync(self) -> int:
        """Publish the weights and replace the generator's by them."""
        with self.timer("sync"):
            version = await self.trainer.push_model_state_dict()
            return await self.generator.pull_model_state_dict(version)

    async def accuracy(self) -> float:
        """Greedy accuracy on the held-out problems, with the weights the generator has."""
        with self.timer("validate"):
            return await greedy_accuracy(
                self.generator, self.environment, self.tokenizer, self.held_out, self.config.max_tokens
            )

    async def checkpoint(self, state: dict[str, Any]) -> None:
        with self.timer("checkpoint"):
            keep = self.config.keep_checkpoints
            await checkpoints.save(self.trainer, self.folder.checkpoints, state, keep=keep)


Train = Callable[[Run], Awaitable[None]]


def main(controller: str) -> None:
    """Parse the command line of a controller module, do what it asks with the module's `train`, and exit.

    The package `configs` imports the controllers, so they look it up by name when a command line names one of its configs.
    """
    prog = f"python -m {controller}"
    invocation = cli.parse(prog, import_module("configs").CONFIGS[controller])
    train: Train = import_module(controller).train
    if invocation.dry_run:
        cli.print_config(invocation.config)
        return
    try:
        if invocation.resume:
            checkpoints.newest(RunFolder(invocation.output_dir).checkpoints)
        if invocation.eval_only:
            checkpoints.read(invocation.eval_only)
        environment, tokenizer = _environment_and_tokenizer(invocation.config)
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(_run(invocation, environment, tokenizer, train))


def _environment_and_tokenizer(config: Any) -> tuple[Environment, Any]:
    """Raises ValueError for a task that cannot be built and for prompts that the tokenizer or the generator cannot take."""
    environment = build_environment(replace(config.environment, seed=config.seed + config.environment.seed))
    if config.alphabet:
        with tempfile.TemporaryDirectory() as directory:
            build_character_tokenizer(directory, config.alphabet)
            tokenizer = load_tokenizer(directory)
    else:
        tokenizer = load_tokenizer(config.trainer.hf_path)
    limit = min(config.generator.max_model_len, config.trainer.max_sequence_length) - config.max_tokens
    for problem in environment.held_out():
        if (length := len(encode(tokenizer, problem.prompt))) > limit:
            room = f"{limit} are left beside max_tokens={config.max_tokens}"
            raise ValueError(f"the prompt {problem.prompt[:80]!r} has {length} tokens, but {room}")
    return environment, tokenizer


def _run(invocation: cli.Invocation, environment: Environment, tokenizer: Any, train: Train) -> int:
    folder = RunFolder(invocation.eval_only or invocation.output_dir)
    log_file = folder.log("evaluation" if invocation.eval_only else "controller")
    quiet = contextlib.nullcontext() if invocation.verbose else route_process_output(log_file)
    with quiet as output:
        terminal = sys.stdout if output is None else output.terminal
        route_logs(log_file, label="controller", verbose=invocation.verbose)
        begin = _evaluate if invocation.eval_only else functools.partial(_train, train)
        work = begin(invocation, folder, environment, tokenizer, terminal)
        try:
            return asyncio.run(_until_signal(work, terminal))
        except BaseException as error:
            # The message, with its note of actor and rank, for the person; the rest is in the log as well.
            logging.getLogger(__name__).error("the run failed", exc_info=error)
            print("".join(traceback.format_exception(error)), file=terminal)
            print(f"The run failed: {type(error).__name__}: {error}. Logs: {log_file.parent}", file=terminal)
            return 1


async def _until_signal(work: Awaitable[int], terminal: TextIO) -> int:
    """Run to the end, or until Ctrl-C or SIGTERM; either way everything is closed when this returns."""
    task = asyncio.ensure_future(work)
    received: list[int] = []

    def stop(number: int) -> None:
        if not received:
            print(f"{signal.Signals(number).name}: stopping; the run can be resumed", file=terminal)
        received.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]


async def _train(
    train: Train,
    invocation: cli.Invocation,
    folder: RunFolder,
    environment: Environment,
    tokenizer: Any,
    terminal: TextIO,
) -> int:
    config = invocation.config
    state: dict[str, Any] = {}
    if invocation.resume:
        newest = checkpoints.newest(folder.checkpoints)
        state = checkpoints.read(newest)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.config.write_text(cli.config_to_json(config))
    if config.alphabet:
        build_character_tokenizer(folder.path / "tokenizer", config.alphabet)
    try:
        with MetricsLogger(
            folder,
            first_step=state.get("step", 0),
            wandb_project=config.wandb_project,
            config=asdict(config),
            lines=invocation.verbose,
            console=Console(file=terminal),
        ) as log:
            log.note(f"run folder: {folder.path}")
            async with open_run(config, folder, environment, tokenizer, log, verbose=invocation.verbose) as run:
                if state:
                    with log.setup(f"resuming from {newest}"):
                        await run.trainer.load_checkpoint(str(newest / "trainer"))
                run.state = state
                run.timer.reset()
                await train(run)
    finally:
        write_report(folder.path)
    print(f"report: {folder.report}", file=terminal)
    return 0


async def _evaluate(
    invocation: cli.Invocation, folder: RunFolder, environment: Environment, tokenizer: Any, terminal: TextIO
) -> int:
    """Score a checkpoint on the held-out problems; leaves nothing but a log."""
    config, checkpoint = invocation.config, folder.path
    display = LineDisplay(Console(file=terminal), None)
    async with open_run(config, folder, environment, tokenizer, display, verbose=invocation.verbose) as run:
        version = await run.trainer.load_checkpoint(str(checkpoint / "trainer"))
        await run.sync()
        accuracy = await run.accuracy()
    display.print(f"{checkpoint}: policy_version {version}, validation/accuracy {accuracy:.4f}")
    return 0


@contextlib.asynccontextmanager
async def open_run(
    config: Any, folder: RunFolder, environment: Environment, tokenizer: Any, log: Any, *, verbose: bool
) -> AsyncIterator[Run]:
    """Start transport, trainer and generator together; end them whatever happens, each with a timeout."""
    from rl_actors import GeneratorClient, TrainerClient
    from rl_actors.meshes import LogRoute

    logs = LogRoute(directory=folder.path.absolute() / "logs", tee=verbose)
    transport = make_transport(config, folder)
    clients: list[Any] = []
    try:
        with log.setup("starting transport"):
            await asyncio.wait_for(transport.open(), config.trainer.setup_timeout)
        trainer_config = replace(config.trainer, seed=config.seed + config.trainer.seed)
        generator_config = replace(
            config.generator, model=config.trainer.model, seed=config.seed + config.generator.seed
        )
        trainer = TrainerClient.spawn(trainer_config, transport=transport, logs=logs)
        clients.append(trainer)
        generator = GeneratorClient.spawn(generator_config, transport=transport, logs=logs)
        clients.append(generator)
        with log.setup("starting trainer and generator"):
            await asyncio.gather(trainer.ready(), generator.ready())
        yield Run(
            config=config,
            folder=folder,
            environment=environment,
            held_out=environment.held_out(),
            tokenizer=tokenizer,
            trainer=trainer,
            generator=generator,
            log=log,
        )
    finally:
        closing = [client.close() for client in clients]
        done = asyncio.gather(*closing, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done, CLOSE_TIMEOUT)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(transport.close(), CLOSE_TIMEOUT)


def make_transport(config: Any, folder: RunFolder):
    """The transport of the config, sending in the generator's dtype."""
    from rl_actors import FilesTransport, MemoryTransport, TorchStoreTransport

    dtype = getattr(torch, config.generator.dtype)
    if config.transport == "files":
        return FilesTransport(folder.path.absolute() / "weights", dtype=dtype)
    return {"torchstore": TorchStoreTransport, "memory": MemoryTransport}[config.transport](dtype=dtype)
