"""Run, which holds the clients and the state of an open run."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Generic, TypeVar

import rl_actors
from controllers.environments import AnyEnvironment, EpisodeEnvironment, Scorer
from controllers.observe.logger import MetricsLogger, Timer, speed_metrics, transfers
from controllers.observe.run_folder import Record, RunFolder
from controllers.rollouts.episode_rollouts import EpisodeRollouts
from controllers.rollouts.episodes import Player
from controllers.rollouts.evaluation import EvaluationSet, Evaluator, Scores
from controllers.rollouts.groups import Penalty, RolloutConfig, Rollouts
from controllers.rollouts.tokenizer import Tokenizer
from controllers.run.actors import CLOSE_TIMEOUT, Actors, Setup
from controllers.run.checkpoints import Checkpoints, State, random_states
from controllers.run.colocation import Colocated, Colocation, Separate
from controllers.run.config import RunConfig
from controllers.run.gate import Gate
from controllers.run.interruption import Interruption
from controllers.run.problems import TrainingProblems
from controllers.run.supervision import Supervision
from controllers.run.survival import ReplayBuffer
from rl_actors import (
    GeneratorClient,
    Sample,
    TrainerClient,
)
from rl_actors.config import LoRAConfig
from rl_actors.model_flops import training_flops
from rl_actors.processes.output import LogRoute
from rl_actors.types import Transfer

Config = TypeVar("Config", bound=RunConfig)


@dataclass(frozen=True, kw_only=True)
class Run(Generic[Config]):
    """What a training loop uses. After the death of an actor the loop is called again with a new Run."""

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
    colocation: Colocation = field(default_factory=Separate)
    state: State = field(default_factory=dict)
    """The loop's state in the checkpoint from which the run goes on. Empty in a new run."""

    @property
    def folder(self) -> RunFolder:
        return self.supervision.folder

    @cached_property
    def problems(self) -> TrainingProblems:
        return TrainingProblems(self.config, self.tokenizer, self.environment)

    def rollouts(self, config: RolloutConfig, *, penalty: Penalty | None = None) -> Rollouts:
        """EpisodeRollouts if the run's task has episodes, otherwise Rollouts."""
        seed = self.config.seed
        timeline = self.timer.timeline
        take = self.problems.take
        if isinstance(self.environment, EpisodeEnvironment):
            return EpisodeRollouts(
                *(config, self.environment, self.generator, self.player()),
                seed=seed,
                penalty=penalty,
                timeline=timeline,
                take=take,
            )
        return Rollouts(
            config,
            self.environment,
            self.tokenizer,
            self.generator,
            max_tokens=self.config.max_tokens,
            seed=seed,
            penalty=penalty,
            scorer=self.scorer,
            timeline=timeline,
            take=take,
        )

    async def measure(self) -> Scores:
        """Score the generator's current weights on all held-out problems."""
        return await make_evaluator(self.config, self.evaluation_sets, self.generator, self.tokenizer, self.scorer)()

    def player(self) -> Player:
        """A player for the episodes of a task that takes several turns."""
        return Player(tokenizer=self.tokenizer, limits=self.config.episode_limits(), scorer=self.scorer)

    async def validate(self, step: int) -> dict[str, float]:
        """Score the generator's current weights, and write some completions to validation.jsonl. Returns the metrics of the validation."""
        with self.timer("validate"):
            scores = await self.measure()
        self.log.validation(step, scores.samples)
        return scores.metrics

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Context manager in whose body the trainer works. The seconds of the body count as time/train.

        If turns are enabled, the generator goes to sleep before the body and may lose its weights. In this case the
        generator must pull weights before it generates again.
        """
        await self.colocation.to_trainer()
        with self.timer("train"):
            yield
        await self.colocation.trained()

    def trained_metrics(self, samples: Sequence[Sample], *, num_epochs: int = 1) -> dict[str, float]:
        """Tokens and FLOPs of training on the samples, as metrics of the step."""
        lengths = [len(sample) for sample in samples]
        flops = training_flops(self.config.trainer, lengths)
        return {"tokens/trained": num_epochs * sum(lengths), "tflops/trained": num_epochs * flops / 1e12}

    async def log_step(self, step: int, values: Record, *, phase: str, skipped: bool = False) -> None:
        """Write the record of a step: its values, its times, its speed and the memory of the trainer.

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
        of_ranks, of_slow_rank = supervision.slow_rank.step([info.own_seconds_per_token for info in infos])
        of_problems, of_skipped = self.problems.report()
        values |= of_ranks | of_problems
        values |= self.colocation.metrics(infos)
        values |= supervision.recoveries.end(self.log.folder.add_restart, step)
        if self.config.has_generator:
            values |= supervision.recoveries.of_generators(self.log.folder.add_restart, self.generator.returns, step)
        self.log.step(step, values, phase=phase, skipped=skipped)
        for news in filter(None, (of_slow_rank, of_skipped)):
            self.log.note(news)
        self.log.timeline(step, timeline)
        if supervision.gate is not None:
            supervision.gate.check(step, values)

    def _new_transfers(self, push: Transfer | None) -> dict[str, float]:
        """Metrics of the last push and of the last pull. Only the first record after a push or a pull has the transfer's metrics."""
        pull = self.generator.last_pull if self.config.has_generator else None
        if pull is not None and not pull.num_bytes:  # the generator had the version already
            pull = None
        former = self.supervision.transfers
        self.supervision.transfers = (push or former[0], pull or former[1])
        return transfers(push if push != former[0] else None, pull if pull != former[1] else None)

    async def end_step(self, state: State, *, phase_step: int, is_last: bool) -> None:
        """Keep the loop's state after a step. If a checkpoint is due, begin to write it in the background.

        phase_step: number of the step in its phase.
        After a signal, raises Interrupted, except after the last step of a phase. If a checkpoint is due and the former
        one could not be written, raises RuntimeError or OSError.
        """
        # Rollouts of the next steps may draw random numbers before the checkpoint is written.
        self.supervision.last_state = state | {"config": asdict(self.config), "random": random_states()}
        if is_last or (self.config.checkpoint_every and phase_step % self.config.checkpoint_every == 0):
            await self.save()
        if not is_last:
            self.supervision.interruption.raise_if_asked()

    async def save(self) -> None:
        """Begin to write a checkpoint of the last step, unless it has one or checkpoint_every is 0."""
        supervision = self.supervision
        state = supervision.last_state
        if not self.config.checkpoint_every or not state or state["step"] == supervision.saved_step:
            return
        with self.timer("checkpoint"):
            async with self.colocation.borrowed():
                await supervision.checkpoints.save({"trainer": self.trainer, **supervision.partners}, state)
        supervision.saved_step = state["step"]


def make_evaluator(
    config: RunConfig,
    sets: Sequence[EvaluationSet],
    generator: GeneratorClient,
    tokenizer: Tokenizer,
    scorer: Scorer,
) -> Evaluator:
    """A validator of the generator's current weights, with the config's limits, seed and number of samples."""
    return Evaluator(
        sets=sets,
        generator=generator,
        tokenizer=tokenizer,
        max_tokens=config.max_tokens,
        seed=config.seed,
        pass_at_k=config.pass_at_k,
        player=Player(tokenizer=tokenizer, limits=config.episode_limits(), scorer=scorer),
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
    """Context manager. Starts transport, trainer and, if the run has one, generator. Closes everything at the end, also
    after an error."""
    actors = Actors(config, folder, tell=log.note, verbose=verbose)
    supervision = Supervision(
        folder=folder,
        checkpoints=Checkpoints(
            folder.checkpoints, keep=config.keep_checkpoints, keep_every=config.keep_checkpoint_every
        ),
        actors=actors,
        spawn_reference=actors.spawn_reference,
        spawn_critic=actors.spawn_critic,
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
    return Colocated(config.colocation, trainer, generator, timer) if config.colocation.enabled else Separate()


@contextlib.asynccontextmanager
async def open_generator(
    config: RunConfig,
    folder: RunFolder,
    model: str,
    setup: Setup,
    *,
    verbose: bool,
) -> AsyncIterator[GeneratorClient]:
    """Context manager. Starts only the generator of a run, with the weights in the directory `model`. Closes it at the
    end, even after an error."""
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
