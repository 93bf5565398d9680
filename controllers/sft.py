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
from controllers.run.update import update
from rl_actors import CrossEntropy, Sample, num_loss_tokens


@dataclass(kw_only=True)
class SFTPhaseConfig:
    batch_size: int = 128
    """Problems in one step."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate of the supervised steps."""
    stop_at_answer_probability: float = 1.0
    """End the phase once the probability of sampling the answer, averaged over problems and the
    last stop_window steps, exceeds this. 1: never."""
    stop_window: int = 5
    """Steps of that average. A step measures before it trains."""

    def validate(self) -> None:
        if self.batch_size < 1 or self.stop_window < 1:
            raise ValueError(f"batch_size={self.batch_size}, stop_window={self.stop_window}; both must be at least 1")
        if not 0 < self.stop_at_answer_probability <= 1:
            raise ValueError(f"stop_at_answer_probability={self.stop_at_answer_probability}; it must be in (0, 1]")
        self.schedule.validate()


@dataclass(kw_only=True)
class SFTConfig(RunConfig):
    sft: SFTPhaseConfig = field(default_factory=SFTPhaseConfig)
    """The supervised steps."""

    short_flags: ClassVar[dict[str, str]] = RunConfig.short_flags | {"--lr": "--sft.schedule.learning-rate"}

    @property
    def is_supervised(self) -> bool:
        return True

    @property
    def samples_problems(self) -> bool:
        return False

    def validate(self) -> None:
        super().validate()
        self.sft.validate()


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
        return fmean(self.recent) > self.config.stop_at_answer_probability

    async def train_step(self, step: int) -> dict[str, float]:
        """One optimizer step on the next problems; returns its metrics."""
        run = self.run
        samples = await self._next_samples()
        learning_rate = self.schedule(step)
        params = run.config.optimizer.params(learning_rate=learning_rate, grad_divisor=num_loss_tokens(samples))
        backward = partial(run.trainer.forward_backward, loss=CrossEntropy())
        size = run.config.samples_per_forward_backward
        async with run.training():
            taken = await update(run.trainer, samples, params, backward, samples_per_call=size)
        outputs = taken.outputs
        result = taken.result
        logprobs = [row for output in outputs for row in output.logprobs]
        self.recent.append(answer_probability(samples, logprobs))
        return {
            "policy_version": result.policy_version,
            "loss": sum(output.metrics["loss:sum"] for output in outputs) / num_loss_tokens(samples),
            "answer_probability": fmean(self.recent),
            "grad_norm": result.grad_norm,
            "updates_skipped": int(result.skipped),
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
    """Take config.steps supervised steps, or fewer if `SFTPhase.should_stop`."""
    config = run.config
    run.log.display.total_steps = config.steps
    phase = SFTPhase(run, config.sft, total_steps=config.steps)
    if config.evaluate_first and not run.state:  # a resumed run has a state
        await run.log_step(0, await _validate(run, 0), phase="start")
    for step in range(run.state.get("step", 0) + 1, config.steps + 1):
        metrics = await phase.train_step(step)
        is_last = step == config.steps or phase.should_stop()
        if is_last or step % config.evaluate_every == 0:
            metrics |= await _validate(run, step)
        await run.log_step(step, metrics, phase="sft")
        # a run killed between record and checkpoint repeats the step; in the other order it lacks
        # the record
        await run.end_step({"step": step, **phase.state()}, phase_step=step, is_last=is_last)
        if is_last:
            return


async def _validate(run: Run[SFTConfig], step: int) -> dict[str, float]:
    """Push the weights to the generator and score them; returns the metrics."""
    with run.timer("sync"):
        await run.colocation.to_trainer()
        version = await run.trainer.push_model_state_dict()
        await run.colocation.to_generator()
        await run.generator.pull_model_state_dict(version)
    return await run.validate(step)


if __name__ == "__main__":
    start_loop("controllers.sft")
