"""Supervised training on a task's answers: the main path and its command line.

python -m controllers.sft --config tiny
"""

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from controllers.environments import Problem
from controllers.launch import main
from controllers.run import Run, RunConfig
from controllers.schedules import ScheduleConfig
from controllers.tokenizer import encode
from rl_actors import CrossEntropy, Sample, num_loss_tokens


@dataclass(kw_only=True)
class SupervisedConfig:
    batch_size: int = 128
    """Problems of one step."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate of the supervised steps."""
    stop_at_answer_probability: float = 1.0
    """Stop once the probability that a sampled completion is the answer, averaged over the last steps, exceeds this; 1: never."""
    stop_window: int = 5
    """Steps over which that probability is averaged; it is measured on problems before they are trained on."""

    def validate(self) -> None:
        if self.batch_size < 1 or self.stop_window < 1:
            raise ValueError(f"batch_size={self.batch_size}, stop_window={self.stop_window}; both must be at least 1")
        if not 0 < self.stop_at_answer_probability <= 1:
            raise ValueError(f"stop_at_answer_probability={self.stop_at_answer_probability}; it must be in (0, 1]")
        self.schedule.validate()


@dataclass(kw_only=True)
class SFTConfig(RunConfig):
    supervised: SupervisedConfig = field(default_factory=SupervisedConfig)

    def validate(self) -> None:
        super().validate()
        self.supervised.validate()


def to_sample(tokenizer: Any, problem: Problem) -> Sample:
    """The answer and the end of the text, given the prompt."""
    completion = [*encode(tokenizer, problem.answer), tokenizer.eos_token_id]
    return Sample.from_tokens(encode(tokenizer, problem.prompt), completion)


def answer_probability(samples: list[Sample], logprobs: list[torch.Tensor]) -> float:
    """The mean over samples of exp(sum of the completion's logprobs): how often sampling at temperature 1 would be right."""
    pairs = zip(samples, logprobs, strict=True)
    return fmean(float((row * sample.columns["loss_weights"]).sum().exp()) for sample, row in pairs)


async def train_supervised(
    run: Run,
    supervised: SupervisedConfig,
    *,
    first_step: int,
    last_step: int,
    cursor: int,
    measure: Callable[[bool, int], Awaitable[dict[str, Any]]],
    save: Callable[[bool, dict[str, Any]], Awaitable[None]],
) -> tuple[int, int]:
    """Steps first_step to last_step - 1, or until the probability rule stops them; returns (next step, next problem).

    measure(is_last, step) validates when it is time and returns its metrics; save(is_last, state) writes a checkpoint
    when it is time, after the step's line: a run that is killed in between writes that line again, and loses none.
    """
    schedule = supervised.schedule.build(last_step)
    recent: deque[float] = deque(run.state.get("recent", ()), maxlen=supervised.stop_window)
    for step in range(first_step, last_step):
        problems = [run.environment.problem(cursor + i) for i in range(supervised.batch_size)]
        cursor += supervised.batch_size
        samples = [to_sample(run.tokenizer, problem) for problem in problems]
        with run.timer("train"):
            rate = schedule(step)
            update = await run.update(samples, CrossEntropy(), rate)
        outputs, result = update.outputs, update.result
        logprobs = [row for output in outputs for row in output.logprobs]
        recent.append(answer_probability(samples, logprobs))
        probability = fmean(recent)
        is_last = step + 1 == last_step or probability > supervised.stop_at_answer_probability
        metrics = {
            "policy_version": result.policy_version,
            "loss": sum(output.metrics["loss:sum"] for output in outputs) / num_loss_tokens(samples),
            "answer_probability": probability,
            "grad_norm": result.grad_norm,
            "updates_skipped": int(result.skipped),
            "learning_rate": rate,
            "tokens/trained": sum(map(len, samples)),
        }
        metrics |= await measure(is_last, step)
        run.log.step(step, metrics | run.timer.reset(), phase="sft")
        await save(is_last, {"step": step + 1, "cursor": cursor, "recent": list(recent)})
        if is_last:
            return step + 1, cursor
    return last_step, cursor


async def train(run: Run) -> None:
    """The whole supervised run: validate and save every so often."""
    config: SFTConfig = run.config
    run.log.display.total_steps = config.steps

    async def measure(is_last: bool, step: int) -> dict[str, Any]:
        if not is_last and (step + 1) % config.validate_every:
            return {}
        await run.sync()
        return {"validation/accuracy": await run.accuracy()}

    async def save(is_last: bool, state: dict[str, Any]) -> None:
        await run.checkpoint(state, done=state["step"], is_last=is_last)

    steps = {"first_step": run.state.get("step", 0), "last_step": config.steps, "cursor": run.state.get("cursor", 0)}
    await train_supervised(run, config.supervised, **steps, measure=measure, save=save)


if __name__ == "__main__":
    main("controllers.sft")
