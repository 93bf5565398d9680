"""The config that all runs share, and the parts of a run while it is open. Trains nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from controllers.checkpoints import Checkpoints
from controllers.environments import Environment, EnvironmentConfig, Problem
from controllers.metrics import Timer
from controllers.rollouts import greedy_accuracy
from controllers.run_folder import RunFolder
from rl_actors import (
    ForwardBackwardOutput,
    GeneratorConfig,
    OptimParams,
    OptimResult,
    Sample,
    TrainerConfig,
    num_loss_tokens,
)
from rl_actors.losses import Loss
from rl_actors.validation import validate_optim_params

CLOSE_TIMEOUT = 5.0


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
    """Its model and adapters are the trainer's."""
    optimizer: AdamConfig = field(default_factory=AdamConfig)
    transport: Literal["torchstore", "files", "memory"] = "torchstore"
    """How weights get from the trainer to the generator."""
    samples_per_forward_backward: int = 1024
    """Samples of one forward_backward call; a step makes as many calls as its batch needs."""
    validate_every: int = 10
    """Steps between two validations on the held-out problems."""
    checkpoint_every: int = 25
    """Steps between two checkpoints; the last step always writes one. 0: none is written, and the run cannot be resumed."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    keep_checkpoint_every: int = 0
    """Steps between two checkpoints that are kept for good; 0: none is."""
    wandb_project: str | None = None
    """Report to this wandb project, too."""

    def __post_init__(self) -> None:
        lora = self.trainer.lora
        base = self.generator.hf_path or (self.trainer.hf_path if lora.syncs_adapter else "")
        # Copies: the generator's config is its own.
        self.generator = replace(self.generator, model=replace(self.trainer.model), lora=replace(lora), hf_path=base)

    def validate(self) -> None:
        """Raises ValueError naming the field, its value and the limit."""
        for name in (
            "steps",
            "max_tokens",
            "samples_per_forward_backward",
            "validate_every",
            "keep_checkpoints",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; it must be at least 1")
        for name in ("checkpoint_every", "keep_checkpoint_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}; it must be at least 0")
        if not self.alphabet and not self.trainer.hf_path:
            raise ValueError("alphabet is empty and trainer.hf_path too; one of them must give a tokenizer")
        longest = {"generator.max_model_len": self.generator.max_model_len}
        longest["trainer.max_sequence_length"] = self.trainer.max_sequence_length
        for name, limit in longest.items():
            if self.max_tokens >= limit:
                raise ValueError(f"max_tokens={self.max_tokens} leaves no room for a prompt in {name}={limit}")
        if self.trainer.lora.syncs_adapter and self.generator.hf_path != self.trainer.hf_path:
            raise ValueError(
                f"generator.hf_path={self.generator.hf_path!r} is not trainer.hf_path={self.trainer.hf_path!r}, which the adapters belong to"
            )
        self.environment.validate()
        self.generator.validate()
        self.trainer.validate()
        if self.trainer.optimizer is None:
            raise ValueError("trainer.optimizer=None: a run trains")
        self.trainer.require_hf("generation")
        validate_optim_params(self.optimizer.params(learning_rate=0.0, grad_divisor=1.0))

    def validate_resumed(self, folder: RunFolder) -> None:
        """Raises ValueError naming the field for what the run in this folder cannot go on with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step and the forward_backward calls that it took."""

    outputs: list[ForwardBackwardOutput]
    result: OptimResult


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
    checkpoints: Checkpoints
    timer: Timer = field(default_factory=Timer)
    state: dict[str, Any] = field(default_factory=dict)  # of the checkpoint that is resumed; empty for a new run
    spawn_reference: Any = None  # () -> a TrainerClient as the trainer was, without an optimizer; closed with the run

    async def update(self, samples: Sequence[Sample], loss: Loss, learning_rate: float) -> Update:
        """One optimizer step with the mean gradient over the samples' tokens."""
        chunks = split(samples, self.config.samples_per_forward_backward)
        outputs = [await self.trainer.forward_backward(chunk, loss=loss) for chunk in chunks]
        params = self.config.optimizer.params(learning_rate=learning_rate, grad_divisor=num_loss_tokens(samples))
        return Update(outputs=outputs, result=await self.trainer.optim_step(params))

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

    async def checkpoint(self, state: dict[str, Any], *, done: int, is_last: bool) -> None:
        """When it is time after `done` steps, begin to write a checkpoint beside training; a failure of the one before ends the run here."""
        every = self.config.checkpoint_every
        if every and (is_last or done % every == 0):
            with self.timer("checkpoint"):
                await self.checkpoints.save(self.trainer, state | {"config": asdict(self.config)})


def split(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    """BuiltModel of `size` samples in their order; the last may be shorter."""
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


@contextlib.asynccontextmanager
async def open_run(
    config: Any, folder: RunFolder, environment: Environment, tokenizer: Any, log: Any, *, verbose: bool
) -> AsyncIterator[Run]:
    """Start transport, trainer and generator together; end them whatever happens, each with a timeout."""
    from rl_actors import GeneratorClient, TrainerClient
    from rl_actors.processes.spawn import LogRoute

    logs = LogRoute(directory=folder.path.absolute() / "logs", tee=verbose)
    transport = make_transport(config, folder)
    clients: list[Any] = []
    keep = {"keep": config.keep_checkpoints, "keep_every": config.keep_checkpoint_every}
    checkpoints = Checkpoints(folder.checkpoints, **keep)
    try:
        with log.setup("starting transport"):
            await asyncio.wait_for(transport.open(), config.trainer.setup_timeout)
        trainer_config = replace(config.trainer, seed=config.seed + config.trainer.seed)
        if config.alphabet and (tokenizer_folder := folder.path.absolute() / "tokenizer").is_dir():
            trainer_config.tokenizer_path = str(tokenizer_folder)
        generator_config = replace(config.generator, seed=config.seed + config.generator.seed)
        trainer = TrainerClient.spawn(trainer_config, transport=transport, logs=logs)
        clients.append(trainer)

        def spawn_reference() -> Any:
            infers = replace(trainer_config, optimizer=None)
            clients.append(TrainerClient.spawn(infers, transport=transport, name="reference", logs=logs))
            return clients[-1]

        if shares_gpu(config):
            with log.setup("starting trainer"):
                await trainer.ready()
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
            checkpoints=checkpoints,
            spawn_reference=spawn_reference,
        )
        await checkpoints.finish()
    finally:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(checkpoints.finish(), CLOSE_TIMEOUT)
        closing = [*(client.close() for client in clients), transport.close()]
        done = asyncio.gather(*closing, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done, CLOSE_TIMEOUT)


def shares_gpu(config: Any) -> bool:
    """Whether the generator is beside a rank of the trainer, which must not take memory while vLLM measures what is left."""
    return torch.cuda.is_available() and (config.generator.gpu or 0) < config.trainer.num_processes()


def make_transport(config: Any, folder: RunFolder):
    """The transport of the config."""
    from rl_actors import FilesTransport, MemoryTransport, TorchStoreTransport

    if config.transport == "files":
        return FilesTransport(folder.path.absolute() / "weights")
    return {"torchstore": TorchStoreTransport, "memory": MemoryTransport}[config.transport]()
