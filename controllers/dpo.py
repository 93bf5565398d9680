"""Direct preference optimization (DPO): the training loop and its command line.

python -m controllers.dpo --config tiny --data pairs.jsonl
"""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from controllers.algorithms.preferences import DPO, pair, to_samples
from controllers.algorithms.reference import Reference, start_reference
from controllers.algorithms.schedules import ScheduleConfig
from controllers.environments import EnvironmentConfig, Problem
from controllers.observe.run_folder import RunFolder
from controllers.program.launch import start_loop
from controllers.run import checkpoints
from controllers.run.config import RunConfig
from controllers.run.run import Run
from controllers.run.update import chunks, update
from rl_actors import Sample, metrics
from rl_actors.field_types import CountingInt, PositiveFloat

NO_PAIRS = partial(EnvironmentConfig, task="", answer_column="chosen", rejected_column="rejected")


@dataclass(kw_only=True)
class DPOConfig(RunConfig):
    environment: EnvironmentConfig = field(default_factory=NO_PAIRS)
    """Pairs, with the columns answer_column (chosen) and rejected_column."""
    beta: PositiveFloat = 0.1
    """The reward is beta * log(p_policy / p_reference). Larger: nearer to the reference."""
    pairs_per_step: CountingInt = 64
    """Pairs in one optimizer step."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate of each step."""

    short_flags: ClassVar[dict[str, str]] = RunConfig.short_flags | {
        "--data": "--environment.task",
        "--lr": "--schedule.learning-rate",
    }
    has_generator: ClassVar[bool] = False
    samples_problems: ClassVar[bool] = False

    @property
    def is_supervised(self) -> bool:
        return True

    @property
    def has_reference(self) -> bool:
        return True

    def with_all_answers(self, problem: Problem) -> list[Problem]:
        return pair(problem, self.environment.rejected_column)

    def validate(self) -> None:
        super().validate()
        self.schedule.validate()
        if self.samples_per_forward_backward % 2:
            size = self.samples_per_forward_backward
            raise ValueError(f"samples_per_forward_backward={size}; it must be even, because a pair is two samples")
        for name, value in {"environment": self.environment, **self.evaluation}.items():
            if value.rejected_column != self.environment.rejected_column or not value.rejected_column:
                raise ValueError(
                    f"{name}.rejected_column={value.rejected_column!r}; it must be the same in all sets of problems, and not empty"
                )

    def validate_resumed(self, folder: RunFolder) -> None:
        super().validate_resumed(folder)
        has_begun = checkpoints.newest(folder.checkpoints) is not None
        if has_begun and not self.trainer.hf_path and not folder.reference.is_dir():
            raise ValueError(
                f"{folder.reference} is missing, so this run cannot be resumed; "
                "it held the weights that the run began with, and DPO needs them as the reference"
            )


async def train(run: Run[DPOConfig]) -> None:
    """Take all remaining steps of the run."""
    config = run.config
    loss = DPO(beta=run.config.beta)
    run.log.display.total_steps = config.steps
    reference = await start_reference(run, has_begun=bool(run.state))
    schedule = config.schedule.build(config.steps)
    held_out = await _held_out(run, reference)
    if config.evaluate_first and not run.state:  # a resumed run has a state
        await run.log_step(0, await _evaluate(run, 0, loss, held_out), phase="start")
    cursor = run.state.get("cursor", 0)  # of the next problem
    for step in range(run.state.get("step", 0) + 1, config.steps + 1):
        indices, cursor = run.problems.take(cursor, config.pairs_per_step)
        problems = [run.environment.problem(index) for index in indices]
        samples = await reference.with_logprobs(_samples(run, problems))
        values = await train_step(run, loss, samples, schedule(step))
        is_last = step == config.steps
        if is_last or step % config.evaluate_every == 0:
            values |= await _evaluate(run, step, loss, held_out)
        await run.log_step(step, values, phase="dpo")
        await run.end_step({"step": step, "cursor": cursor}, phase_step=step, is_last=is_last)


async def train_step(run: Run[DPOConfig], loss: DPO, samples: list[Sample], learning_rate: float) -> dict[str, float]:
    """One optimizer step on the mean loss of the pairs; returns its metrics."""
    num_pairs = len(samples) // 2
    backward = partial(run.trainer.forward_backward_custom, loss=loss)
    with run.timer("train"):
        taken = await update(run.config, run.trainer, samples, backward, learning_rate, num_pairs)
    return {
        **_means(metrics.merge(output.partials for output in taken.outputs), num_pairs),
        "policy_version": taken.result.policy_version,
        "grad_norm": taken.result.grad_norm,
        "updates_skipped": int(taken.result.skipped),
        "learning_rate": learning_rate,
        **run.trained_metrics(samples),
    }


def _samples(run: Run[DPOConfig], problems: list[Problem]) -> list[Sample]:
    return to_samples(problems, run.tokenizer, run.config.environment.rejected_column)


async def _held_out(run: Run[DPOConfig], reference: Reference) -> dict[str, list[Sample]]:
    """{prefix of the set's metrics: pairs}, with the reference's logprobs, which never change."""
    return {
        one.metric("dpo/"): await reference.with_logprobs(_samples(run, one.problems)) for one in run.evaluation_sets
    }


async def _evaluate(run: Run[DPOConfig], step: int, loss: DPO, held_out: dict[str, list[Sample]]) -> dict[str, float]:
    """Loss and metrics of the held-out pairs, also printed."""
    values: dict[str, float] = {}
    with run.timer("evaluate"):
        for prefix, samples in held_out.items():
            partials = []
            for chunk in chunks(samples, run.config.samples_per_forward_backward):
                output = await run.trainer.forward(chunk)
                total, of_chunk = loss(list(chunk), output.logprobs)
                partials.append({"loss:sum": float(total), **of_chunk})
            for name, value in _means(metrics.merge(partials), len(samples) // 2).items():
                values[prefix + name.removeprefix("dpo/")] = value
    run.log.note(f"step {step}: {', '.join(f'{name} {value:.4f}' for name, value in values.items())}")
    return values


def _means(partials: metrics.Partials, num_pairs: int) -> dict[str, float]:
    """The metrics, and the mean loss over the pairs."""
    finished = metrics.finish(partials)
    values = {name.removesuffix(":mean"): value for name, value in finished.items() if name.endswith(":mean")}
    return {"loss": finished["loss:sum"] / num_pairs, **values}


if __name__ == "__main__":
    start_loop("controllers.dpo")
