"""Run, which a training loop uses, and what keeps it going."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Generic, TypeVar

import rl_actors
from controllers.environments import AnyEnvironment, Scorer
from controllers.observe.logger import MetricsLogger, Timer, speed_metrics, transfers
from controllers.observe.run_folder import Record, RunFolder
from controllers.rollouts.episodes import Player
from controllers.rollouts.evaluation import EvaluationSet, Evaluator
from controllers.rollouts.groups import Penalty, RolloutConfig, Rollouts
from controllers.rollouts.tokenizer import Tokenizer
from controllers.run.actors import CLOSE_TIMEOUT, Actors, Setup
from controllers.run.checkpoints import Checkpoints, State, random_states, require_state
from controllers.run.colocation import Colocated, Colocation
from controllers.run.config import RunConfig
from controllers.run.gate import Gate
from controllers.run.interruption import Interruption
from controllers.run.problems import TrainingProblems
from controllers.run.slow_rank import SlowRank
from controllers.run.survival import Recoveries, ReplayBuffer
from rl_actors import GeneratorClient, Sample, TrainerClient
from rl_actors.config import LoRAConfig
from rl_actors.model_flops import training_flops
from rl_actors.processes.output import LogRoute
from rl_actors.types import Transfer

Config = TypeVar("Config", bound=RunConfig)


@dataclass(kw_only=True)
class Supervision:
    """What keeps a run going and what ends it. It stays when a recovery makes a new Run."""

    folder: RunFolder
    checkpoints: Checkpoints
    actors: Actors | None = None  # None: the death of an actor ends the run
    interruption: Interruption = field(default_factory=Interruption)
    gate: Gate | None = None
    replay_buffer: ReplayBuffer = field(default_factory=ReplayBuffer)
    recoveries: Recoveries = field(default_factory=Recoveries)
    slow_rank: SlowRank = field(default_factory=SlowRank)
    # other trainers whose state belongs to a checkpoint, by the name of their folder in it
    partners: dict[str, TrainerClient] = field(default_factory=dict)
    # after the newest finished step; empty before the first, and after a death until a step has ended
    last_state: State = field(default_factory=dict)
    saved_step: int = 0  # of the last checkpoint
    transfers: tuple[Transfer | None, Transfer | None] = (None, None)  # newest push and pull on record


@dataclass(frozen=True, kw_only=True)
class Run(Generic[Config]):
    """What a training loop uses. After a death the loop is called again with a new Run."""

    config: Config
    environment: AnyEnvironment
    tokenizer: Tokenizer
    trainer: TrainerClient
    generator: GeneratorClient  # not used if the config has no generator
    log: MetricsLogger
    supervision: Supervision
    evaluation_sets: Sequence[EvaluationSet] = ()
    scorer: Scorer = field(default_factory=Scorer)
    timer: Timer = field(default_factory=Timer)
    colocation: Colocation = field(default_factory=Colocation)
    state: State = field(default_factory=dict)  # in the checkpoint from which the run goes on; {} in a new run

    @property
    def folder(self) -> RunFolder:
        return self.supervision.folder

    @cached_property
    def problems(self) -> TrainingProblems:
        return TrainingProblems(self.config, self.tokenizer, self.environment)

    def rollouts(self, config: RolloutConfig, *, penalty: Penalty | None = None) -> Rollouts:
        return Rollouts(
            config,
            self.environment,
            self.tokenizer,
            self.generator,
            limits=self.config.episode_limits(),
            seed=self.config.seed,
            penalty=penalty,
            scorer=self.scorer,
            timeline=self.timer.timeline,
            take=self.problems.take,
        )

    def player(self) -> Player:
        return Player(tokenizer=self.tokenizer, limits=self.config.episode_limits(), scorer=self.scorer)

    async def evaluate(self, step: int) -> dict[str, float]:
        """Score the generator's weights, and write some completions to evaluation.jsonl."""
        evaluator = make_evaluator(self.config, self.evaluation_sets, self.generator, self.tokenizer, self.scorer)
        with self.timer("evaluate"):
            scores = await evaluator()
        self.log.evaluation(step, scores.samples)
        return scores.metrics

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Context in which the trainer works, as time/train.

        A colocated generator may lose its weights, so a pull must follow.
        """
        await self.colocation.to_trainer()
        with self.timer("train"):
            yield
        await self.colocation.trained()

    def trained_metrics(self, samples: Sequence[Sample], *, num_epochs: int = 1) -> dict[str, float]:
        """Tokens and FLOPs of training on the samples."""
        lengths = [len(sample) for sample in samples]
        flops = training_flops(self.config.trainer, lengths)
        return {"tokens/trained": num_epochs * sum(lengths), "tflops/trained": num_epochs * flops / 1e12}

    async def log_step(self, step: int, values: Record, *, phase: str, skipped: bool = False) -> None:
        """Write the record of a step, with its times, speed and memory.

        Raises GateMissedError if the values miss the run's gate.
        """
        supervision = self.supervision
        infos = await self.trainer.info()
        values = values | self.timer.reset()
        timeline = self.timer.timeline.end_step()
        values |= {f"busy/{actor}": share for actor, share in timeline.busy().items()}
        values |= speed_metrics(values, infos, float8=self.config.trainer.float8)
        if self.scorer.num_replaced:
            values["reward/processes_replaced"] = self.scorer.num_replaced
        values |= self._new_transfers(infos[0].last_push)
        of_ranks, slow_rank = supervision.slow_rank.step([info.own_seconds_per_token for info in infos])
        of_problems, skipped_problem = self.problems.report()
        values |= of_ranks | of_problems | self.colocation.metrics(infos)
        returns = self.generator.returns if self.config.has_generator else ()
        values |= supervision.recoveries.end(self.log.folder.add_restart, step, returns)
        self.log.step(step, values, phase=phase, skipped=skipped)
        for news in filter(None, (slow_rank, skipped_problem)):
            self.log.note(news)
        self.log.timeline(step, timeline)
        if supervision.gate is not None:
            supervision.gate.check(step, values)

    def _new_transfers(self, push: Transfer | None) -> dict[str, float]:
        """Metrics of the last push and pull, if no record has them yet."""
        pull = self.generator.last_pull if self.config.has_generator else None
        if pull is not None and not pull.num_bytes:  # the generator had the version already
            pull = None
        former = self.supervision.transfers
        self.supervision.transfers = (push or former[0], pull or former[1])
        return transfers(push if push != former[0] else None, pull if pull != former[1] else None)

    async def end_step(self, state: State, *, phase_step: int, is_last: bool) -> None:
        """Keep the loop's state after a step, and begin to write a checkpoint if one is due.

        state: JSON, with "step". phase_step: the step's number in its phase. Raises Interrupted after a
        signal, but after a phase's last step, and the error of the former checkpoint's writing.
        """
        require_state(state)
        # Rollouts of the next steps may draw random numbers before the checkpoint is written.
        self.supervision.last_state = state | {"config": asdict(self.config), "random": random_states()}
        if is_last or (self.config.checkpoint_every and phase_step % self.config.checkpoint_every == 0):
            await self.save()
        if not is_last:
            self.supervision.interruption.raise_if_asked()

    async def save(self) -> None:
        """Begin to write the last step's checkpoint, unless it has one or checkpoint_every is 0."""
        supervision = self.supervision
        state = supervision.last_state
        if not self.config.checkpoint_every or not state or state["step"] == supervision.saved_step:
            return
        with self.timer("checkpoint"):
            async with self.colocation.borrowed():
                await supervision.checkpoints.save({"trainer": self.trainer, **supervision.partners}, state)
        supervision.saved_step = state["step"]


def make_evaluator(
    config: RunConfig, sets: Sequence[EvaluationSet], generator: GeneratorClient, tokenizer: Tokenizer, scorer: Scorer
) -> Evaluator:
    return Evaluator(
        sets=sets,
        generator=generator,
        tokenizer=tokenizer,
        limits=config.episode_limits(),
        seed=config.seed,
        pass_at_k=config.pass_at_k,
        scorer=scorer,
    )


@contextlib.asynccontextmanager
async def open_run(
    config: Config,
    folder: RunFolder,
    environment: AnyEnvironment,
    evaluation_sets: Sequence[EvaluationSet],
    tokenizer: Tokenizer,
    *,
    log: MetricsLogger,
    scorer: Scorer | None = None,
    interruption: Interruption | None = None,
    state: State | None = None,
    verbose: bool = False,
) -> AsyncIterator[Run[Config]]:
    """Context in which transport, trainer and, if the run has one, generator run."""
    actors = Actors(config, folder, on_event=log.note, verbose=verbose)
    supervision = Supervision(
        folder=folder,
        checkpoints=Checkpoints(
            folder.checkpoints, keep=config.keep_checkpoints, keep_every=config.keep_checkpoint_every
        ),
        actors=actors,
        interruption=interruption or Interruption(),
        gate=Gate.parse(config.gate) if config.gate else None,
        replay_buffer=ReplayBuffer(config.survival.recorded_gigabytes * 1e9),
    )
    try:
        trainer, generator = await actors.start_with_retries(log.setup)
        timer = Timer()
        yield Run(
            config=config,
            environment=environment,
            tokenizer=tokenizer,
            trainer=trainer,
            generator=generator,
            log=log,
            supervision=supervision,
            evaluation_sets=evaluation_sets,
            scorer=scorer or Scorer(),
            timer=timer,
            colocation=make_colocation(config, trainer, generator, timer),
            state=state or {},
        )
    finally:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(supervision.checkpoints.finish(), CLOSE_TIMEOUT)
        await actors.close()


def make_colocation(config: RunConfig, trainer: TrainerClient, generator: GeneratorClient, timer: Timer) -> Colocation:
    return Colocated(config.colocation, trainer, generator, timer) if config.colocation.enabled else Colocation()


@contextlib.asynccontextmanager
async def open_generator(
    config: RunConfig, folder: RunFolder, model: str, setup: Setup, *, verbose: bool
) -> AsyncIterator[GeneratorClient]:
    """Context in which only the generator runs, with the weights in the directory `model`."""
    logs = LogRoute(directory=folder.path.absolute() / "logs", tee=verbose)
    seed = config.seed + config.generator.seed
    generator = rl_actors.GeneratorClient.spawn(
        replace(config.generator, hf_path=model, lora=LoRAConfig(), seed=seed), logs=logs
    )
    try:
        with setup("starting generator"):
            await generator.ready()
        yield generator
    finally:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(generator.close(), CLOSE_TIMEOUT)
