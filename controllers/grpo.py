"""Group-relative policy optimization: the main path and its command line.

python -m controllers.grpo --config tiny
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from controllers.main import main
from controllers.rollouts import Batch, RolloutConfig, Rollouts
from controllers.run import Run, RunConfig
from controllers.schedules import ScheduleConfig
from controllers.sft import SupervisedConfig, train_supervised
from rl_actors import PPO, ForwardBackwardOutput, OptimResult, Sample, metrics, num_loss_tokens

REPORTED = {
    "logprob_diff:mean": "logprob_diff/mean",
    "logprob_diff:max": "logprob_diff/max",
    "kl_policy_generator:mean": "kl/policy_generator",
    "ratio:mean": "ratio/mean",
    "clip_fraction:mean": "clip_fraction",
    "entropy_estimate:mean": "entropy",
}


@dataclass(kw_only=True)
class GRPOConfig(RunConfig):
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    updates_per_step: int = 1
    """Optimizer steps that a step's batch is divided among."""
    ratio_low: float = 0.8
    """Lower bound of the probability ratio in the loss."""
    ratio_high: float = 1.28
    """Upper bound of the probability ratio in the loss."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate by GRPO step."""
    warmup: SupervisedConfig = field(default_factory=SupervisedConfig)
    """Supervised steps before the first GRPO step, for a policy that starts from random weights."""
    max_warmup_steps: int = 0
    """Most supervised steps; 0: none."""

    def validate(self) -> None:
        super().validate()
        self.rollouts.validate()
        self.schedule.validate()
        self.warmup.validate()
        self.loss()
        if self.max_warmup_steps < 0:
            raise ValueError(f"max_warmup_steps={self.max_warmup_steps}; it must be at least 0")

    def loss(self) -> PPO:
        return PPO(ratio_low=self.ratio_low, ratio_high=self.ratio_high)


async def train_step(run: Run, batch: Batch, learning_rate: float) -> tuple[list[ForwardBackwardOutput], OptimResult]:
    """updates_per_step optimizer steps on equal parts of the batch; returns the outputs of the first, whose weights sampled."""
    config: GRPOConfig = run.config
    first: list[ForwardBackwardOutput] = []
    with run.timer("train"):
        for part in split(batch.samples, -(-len(batch.samples) // config.updates_per_step)):
            outputs = [
                await run.trainer.forward_backward(chunk, loss=config.loss())
                for chunk in split(part, config.samples_per_forward_backward)
            ]
            params = config.optimizer.params(learning_rate=learning_rate, grad_divisor=num_loss_tokens(part))
            result = await run.trainer.optim_step(params)
            first = first or outputs
    return first, result


async def train(run: Run) -> None:
    """Supervised warm-up until the policy is worth sampling, then GRPO: generate, train, sync."""
    config: GRPOConfig = run.config
    warmup_steps, cursor = await warm_up(run)
    rollouts = Rollouts(
        config.rollouts,
        run.environment,
        run.tokenizer,
        run.generator,
        max_tokens=config.max_tokens,
        seed=config.seed,
        cursor=cursor,
    )
    schedule = config.schedule.build(config.steps)
    first_step = max(run.state.get("step", 0), warmup_steps)
    last_step = warmup_steps + config.steps
    run.log.display.total_steps = last_step
    await run.sync()
    for step in range(first_step, last_step):
        with run.timer("generate"):
            batch = await rollouts.next_batch()
        values = batch.metrics()
        if not batch.samples:  # nothing with a signal: no gradient, so no step of the optimizer
            run.log.step(step, values | run.timer.reset(), phase="grpo", skipped=True)
            continue
        rate = schedule(step - warmup_steps)
        outputs, result = await train_step(run, batch, rate)
        await run.sync()
        values |= report(batch, outputs, result) | {"learning_rate": rate}
        done, is_last = step + 1 - warmup_steps, step + 1 == last_step
        if is_last or done % config.validate_every == 0:
            values["validation/accuracy"] = await run.accuracy()
        if is_last or done % config.checkpoint_every == 0:
            state = {"step": step + 1, "cursor": rollouts.cursor, "warmup_steps": warmup_steps}
            await run.checkpoint(state)
        run.log.step(step, values | run.timer.reset(), phase="grpo")
        run.log.rollouts(step, batch.shown)


async def warm_up(run: Run) -> tuple[int, int]:
    """Run the supervised steps that are left; returns (their number, the next problem)."""
    config: GRPOConfig = run.config
    if "warmup_steps" in run.state or config.max_warmup_steps == 0:
        return run.state.get("warmup_steps", 0), run.state.get("cursor", 0)

    async def after_step(step: int, cursor: int, is_last: bool) -> dict[str, Any]:
        if not is_last:
            return {}
        await run.sync()
        accuracy = await run.accuracy()
        await run.checkpoint({"step": step + 1, "cursor": cursor, "warmup_steps": step + 1})
        return {"validation/accuracy": accuracy}

    return await train_supervised(
        run, config.warmup, first_step=0, last_step=config.max_warmup_steps, cursor=0, after_step=after_step
    )


def report(batch: Batch, outputs: Sequence[ForwardBackwardOutput], result: OptimResult) -> dict[str, Any]:
    """A step's numbers under the names of metrics.jsonl."""
    merged = metrics.finish(metrics.merge(output.partials for output in outputs))
    values: dict[str, Any] = {new: merged[name] for name, new in REPORTED.items()}
    return values | {
        "policy_version": result.policy_version,
        "loss": merged["loss:sum"] / num_loss_tokens(batch.samples),
        "grad_norm": result.grad_norm,
        "update_skipped": result.skipped,
        "policy_lag": outputs[0].policy_version - (batch.oldest_version or 0),
        "tokens/trained": sum(map(len, batch.samples)),
    }


def split(samples: Sequence[Sample], size: int) -> Iterator[list[Sample]]:
    for start in range(0, len(samples), size):
        yield list(samples[start : start + size])


if __name__ == "__main__":
    main("controllers.grpo")
