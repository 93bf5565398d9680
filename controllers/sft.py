"""Supervised training on a task's answers: the training loop and its command line.

python -m controllers.sft --config tiny
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, ClassVar

import torch

from controllers.algorithms.schedules import ScheduleConfig
from controllers.environments import EpisodeEnvironment
from controllers.environments.scorer import together
from controllers.program.launch import start_loop
from controllers.run.checkpoints import State
from controllers.run.config import RunConfig
from controllers.run.run import Run
from controllers.run.update import sync, update
from rl_actors import CrossEntropy, Sample, num_loss_tokens
from rl_actors.field_types import CountingInt, PositiveShare


@dataclass(kw_only=True)
class SFTPhaseConfig:
    batch_size: CountingInt = 128
    """Problems in one step."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate of the supervised steps."""
    stop_at_answer_probability: PositiveShare = 1.0
    """End the phase once the answer's mean probability over stop_window steps is higher. 1: never."""
    stop_window: CountingInt = 5
    """Steps of that average. A step measures before it trains."""


@dataclass(kw_only=True)
class SFTConfig(RunConfig):
    sft: SFTPhaseConfig = field(default_factory=SFTPhaseConfig)
    """The supervised steps."""

    short_flags: ClassVar[dict[str, str]] = RunConfig.short_flags | {"--lr": "--sft.schedule.learning-rate"}
    samples_problems: ClassVar[bool] = False

    @property
    def is_supervised(self) -> bool:
        return True

    def validate(self) -> None:
        super().validate()
        self.sft.schedule.validate()


class SFTPhase:
    """Supervised steps on the training problems in order; `state()` is what a resume needs."""

    def __init__(self, run: Run[Any], config: SFTPhaseConfig, *, total_steps: int) -> None:
        self.run = run
        self.config = config
        self.schedule = config.schedule.build(total_steps)
        self.cursor: int = run.state.get("cursor", 0)  # of the next problem
        self.recent: deque[float] = deque(run.state.get("recent", ()), maxlen=config.stop_window)

    def state(self) -> State:
        return {"cursor": self.cursor, "recent": list(self.recent)}

    def should_stop(self) -> bool:
        recent = self.recent
        return len(recent) == recent.maxlen and fmean(recent) > self.config.stop_at_answer_probability

    async def train_step(self, step: int) -> dict[str, float]:
        """One optimizer step on the next problems; returns its metrics."""
        run = self.run
        samples = await self._next_samples()
        learning_rate = self.schedule(step)
        divisor = num_loss_tokens(samples)
        backward = partial(run.trainer.forward_backward, loss=CrossEntropy())
        async with run.training():
            taken = await update(run.config, run.trainer, samples, backward, learning_rate, divisor)
        logprobs = [row for output in taken.outputs for row in output.logprobs]
        self.recent.append(answer_probability(samples, logprobs))
        return {
            "policy_version": taken.result.policy_version,
            "loss": sum(output.metrics["loss:sum"] for output in taken.outputs) / divisor,
            "answer_probability": fmean(self.recent),
            "grad_norm": taken.result.grad_norm,
            "updates_skipped": int(taken.result.skipped),
            "learning_rate": learning_rate,
            **run.trained_metrics(samples),
        }

    async def _next_samples(self) -> list[Sample]:
        indices, self.cursor = self.run.problems.take(self.cursor, self.config.batch_size)
        environment = self.run.environment
        problems = [environment.problem(index) for index in indices]
        if isinstance(environment, EpisodeEnvironment):
            player = self.run.player()
            return await together(player.demonstrate(environment, problem) for problem in problems)
        return [self.run.tokenizer.to_sample(problem) for problem in problems]


def answer_probability(samples: list[Sample], logprobs: list[torch.Tensor]) -> float:
    """exp(sum of the answer's logprobs) at temperature 1, averaged over samples.

    logprobs: by sample, of every token.
    """
    pairs = zip(samples, logprobs, strict=True)
    return fmean(float((row * sample.columns["loss_weights"]).sum().exp()) for sample, row in pairs)


async def train(run: Run[SFTConfig]) -> None:
    config = run.config
    run.log.display.total_steps = config.steps
    await train_phase(run, config.sft, num_steps=config.steps, evaluate_every=config.evaluate_every)


async def train_phase(
    run: Run[Any], config: SFTPhaseConfig, *, num_steps: int, evaluate_every: int = 0
) -> tuple[int, int]:
    """Take the steps that are left, or up to `SFTPhase.should_stop`, and evaluate after the last.

    evaluate_every: 0: only then. Returns (all steps, index of the next problem).
    """
    if run.config.evaluate_first and not run.state:  # a resumed run has a state
        await sync(run)
        await run.log_step(0, await run.evaluate(0), phase="start")
    phase = SFTPhase(run, config, total_steps=num_steps)
    step = run.state.get("step", 0)
    is_last = False
    while step < num_steps and not is_last:
        step += 1
        metrics = await phase.train_step(step)
        is_last = step == num_steps or phase.should_stop()
        if is_last or (evaluate_every and step % evaluate_every == 0):
            await sync(run)
            metrics |= await run.evaluate(step)
        await run.log_step(step, metrics, phase="sft")
        # before the checkpoint: a run killed in between repeats the step and writes its record again
        state = {"step": step, **phase.state()} | ({"sft_steps": step} if is_last else {})
        await run.end_step(state, phase_step=step, is_last=is_last)
    return step, phase.cursor


if __name__ == "__main__":
    start_loop("controllers.sft")
