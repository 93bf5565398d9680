"""Group-relative policy optimization: the main path and its command line.

python -m controllers.grpo --config tiny
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from controllers.launch import main
from controllers.reference import apply_reference, require_reference, spawn_reference
from controllers.rollouts import RolloutBatch, RolloutConfig, Rollouts
from controllers.run import Run, RunConfig, Update, split
from controllers.run_folder import RunFolder
from controllers.schedules import ScheduleConfig
from controllers.sft import SupervisedConfig, train_supervised
from rl_actors import KL, PPO, Sample, metrics, num_loss_tokens


@dataclass(kw_only=True)
class GRPOConfig(RunConfig):
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    updates_per_step: int = 1
    """Optimizer steps that a step's batch is divided among, at most; the later ones train on what slightly older weights sampled."""
    epochs_per_step: int = 1
    """Times that a step goes over its batch: each is another updates_per_step optimizer steps on the same rollouts."""
    ratio_low: float = 0.8
    """Lower bound of the probability ratio in the loss."""
    ratio_high: float = 1.28
    """Upper bound of the probability ratio in the loss."""
    reference_kl: float = 0.0
    """Weight of the KL divergence from the policy as GRPO began, which a second trainer beside the first holds; 0: none."""
    reference_kl_in: Literal["loss", "reward"] = "loss"
    """loss: every token's divergence is added to its loss; reward: a completion's, summed over its tokens, is subtracted from its
    reward before the advantages."""
    reference_kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Of that divergence, with d the log ratio of policy and reference: k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d.
    None: k3 in the loss, k1 in the reward."""
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
        if not 0 <= self.reference_kl < math.inf:
            raise ValueError(f"reference_kl={self.reference_kl}; it must be a number of at least 0, finite")
        self.loss()
        if self.updates_per_step < 1:
            raise ValueError(f"updates_per_step={self.updates_per_step}; it must be at least 1")
        if self.epochs_per_step < 1:
            raise ValueError(f"epochs_per_step={self.epochs_per_step}; it must be at least 1")
        if self.max_warmup_steps < 0:
            raise ValueError(f"max_warmup_steps={self.max_warmup_steps}; it must be at least 0")

    def validate_resumed(self, folder: RunFolder) -> None:
        super().validate_resumed(folder)
        if self.reference_kl:
            require_reference(self, folder)

    def kl(self) -> KL:
        estimator = self.reference_kl_estimator or ("k3" if self.reference_kl_in == "loss" else "k1")
        return KL(coefficient=self.reference_kl, estimator=estimator)

    def loss(self) -> PPO:
        kl = self.kl() if self.reference_kl and self.reference_kl_in == "loss" else None
        return PPO(ratio_low=self.ratio_low, ratio_high=self.ratio_high, kl=kl)


async def train_step(run: Run, samples: Sequence[Sample], learning_rate: float) -> list[Update]:
    """In every epoch, up to updates_per_step optimizer steps on parts of the batch, each with the mean over its tokens."""
    config: GRPOConfig = run.config
    parts = [*split(samples, -(-len(samples) // config.updates_per_step))] * config.epochs_per_step
    return [await run.update(part, config.loss(), learning_rate) for part in parts]


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
    reference = None
    if config.reference_kl:
        reference = await spawn_reference(run, has_begun=first_step > warmup_steps, warmup_steps=warmup_steps)
    await run.sync()
    for step in range(first_step, last_step):
        with run.timer("generate"):
            batch = await rollouts.next_batch()
        values = batch.metrics()
        if batch.samples:  # with no signal there is no gradient, so no step of the optimizer
            rate = schedule(step - warmup_steps)
            samples = batch.samples
            if reference:
                samples, penalty = await apply_reference(run, reference, batch)
                values |= penalty
            with run.timer("train"):
                updates = await train_step(run, samples, rate)
            await run.sync()
            values |= report(batch, updates, config.epochs_per_step) | {"learning_rate": rate}
        done, is_last = step + 1 - warmup_steps, step + 1 == last_step
        if is_last or done % config.validate_every == 0:
            values["validation/accuracy"] = await run.accuracy()
        run.log.step(step, values | run.timer.reset(), phase="grpo", skipped=not batch.samples)
        run.log.rollouts(step, batch.shown())
        # After the step's line: a run that is killed in between writes that line again, and loses none.
        state = {"step": step + 1, "cursor": rollouts.cursor, "warmup_steps": warmup_steps}
        await run.checkpoint(state, done=done, is_last=is_last)


async def warm_up(run: Run) -> tuple[int, int]:
    """Run the supervised steps that are left; returns (their number, the next problem)."""
    config: GRPOConfig = run.config
    if "warmup_steps" in run.state or config.max_warmup_steps == 0:
        return run.state.get("warmup_steps", 0), run.state.get("cursor", 0)

    async def measure(is_last: bool, step: int) -> dict[str, Any]:
        if not is_last:
            return {}
        await run.sync()
        return {"validation/accuracy": await run.accuracy()}

    async def save(is_last: bool, state: dict[str, Any]) -> None:
        ended = {"warmup_steps": state["step"]} if is_last else {}
        await run.checkpoint(state | ended, done=state["step"], is_last=is_last)

    steps = {"first_step": run.state.get("step", 0), "last_step": config.max_warmup_steps}
    cursor = run.state.get("cursor", 0)
    return await train_supervised(run, config.warmup, **steps, cursor=cursor, measure=measure, save=save)


def report(batch: RolloutBatch, updates: Sequence[Update], num_epochs: int) -> dict[str, Any]:
    """A step's numbers under the names of metrics.jsonl.

    The trainer's logprobs are compared with the generator's on the first update alone: only its weights sampled.
    """
    first = metrics.finish(metrics.merge(output.partials for output in updates[0].outputs))
    whole = metrics.finish(metrics.merge(output.partials for update in updates for output in update.outputs))
    results = [update.result for update in updates]
    values = {"kl/reference": first["kl_reference:mean"]} if "kl_reference:mean" in first else {}
    return values | {
        "logprob_diff/mean": first["logprob_diff:mean"],
        "logprob_diff/max": first["logprob_diff:max"],
        "kl/policy_generator": first["kl_policy_generator:mean"],
        "ratio/mean": whole["ratio:mean"],
        "clip_fraction": whole["clip_fraction:mean"],
        "entropy": first["entropy_estimate:mean"],
        "policy_version": results[-1].policy_version,
        "loss": whole["loss:sum"] / (num_epochs * num_loss_tokens(batch.samples)),
        "grad_norm": max(result.grad_norm for result in results),
        "updates": len(results),
        "updates_skipped": sum(result.skipped for result in results),
        "policy_lag": updates[-1].outputs[0].policy_version - batch.oldest_version,
        "tokens/trained": num_epochs * sum(map(len, batch.samples)),
    }


if __name__ == "__main__":
    main("controllers.grpo")
