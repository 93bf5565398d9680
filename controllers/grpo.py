"""Group-relative policy optimization: the training loop and its command line.

python -m controllers.grpo --config tiny
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from controllers.launch import main
from controllers.reference import require_reference, start_reference
from controllers.rollouts import RolloutBatch, RolloutConfig, Rollouts
from controllers.run import Run, RunConfig, split
from controllers.run_folder import RunFolder
from controllers.schedules import ScheduleConfig
from controllers.sft import SFTPhase, SFTPhaseConfig
from rl_actors import KL, PPO, ForwardBackwardOutput, OptimResult, Sample, metrics, num_loss_tokens


@dataclass(kw_only=True)
class GRPOConfig(RunConfig):
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    updates_per_step: int = 1
    """Largest number of parts into which a training step divides its batch. Each part gets one optimizer step, so the later parts train on
    samples that slightly older weights generated."""
    epochs_per_step: int = 1
    """Passes of a training step over its batch. Each pass takes up to updates_per_step optimizer steps on the same rollouts."""
    ratio_low: float = 0.8
    """Lower bound of the probability ratio in the loss."""
    ratio_high: float = 1.28
    """Upper bound of the probability ratio in the loss."""
    reference_kl: float = 0.0
    """Weight of the KL divergence from the reference, which is the policy at the start of GRPO. A second trainer beside the first holds the
    reference. 0: no KL divergence and no second trainer."""
    reference_kl_in: Literal["loss", "reward"] = "loss"
    """loss: the divergence of every token is added to its loss. reward: the divergence of a completion, summed over its tokens, is
    subtracted from its reward before advantages are computed."""
    reference_kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of the KL divergence, with d the log ratio of policy and reference: k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d.
    None: k3 in the loss, k1 in the reward."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate by GRPO step."""
    sft: SFTPhaseConfig = field(default_factory=SFTPhaseConfig)
    """Supervised steps before the first GRPO step, for a policy that starts from random weights."""
    sft_steps: int = 0
    """Largest number of supervised steps. 0: no supervised steps."""

    @property
    def is_supervised(self) -> bool:
        return self.sft_steps > 0

    def validate(self) -> None:
        super().validate()
        self.rollouts.validate()
        self.schedule.validate()
        self.sft.validate()
        if not 0 <= self.reference_kl < math.inf:
            raise ValueError(f"reference_kl={self.reference_kl}; it must be finite and at least 0")
        self.loss()
        if self.updates_per_step < 1:
            raise ValueError(f"updates_per_step={self.updates_per_step}; it must be at least 1")
        if self.epochs_per_step < 1:
            raise ValueError(f"epochs_per_step={self.epochs_per_step}; it must be at least 1")
        if self.sft_steps < 0:
            raise ValueError(f"sft_steps={self.sft_steps}; it must be at least 0")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step and the forward_backward calls that it took."""

    outputs: list[ForwardBackwardOutput]
    result: OptimResult


async def train(run: Run[GRPOConfig]) -> None:
    """Take supervised steps until the policy is worth sampling, then GRPO steps. A GRPO step generates, trains and syncs the weights."""
    config = run.config
    if config.validate_first and not run.state:  # a resumed run has a state
        await sync(run)
        await run.record(0, await run.validate(0), phase="start")
    sft_steps, cursor = await train_sft_phase(run)
    steps_done = max(run.state.get("step", 0), sft_steps)
    last_step = sft_steps + config.steps
    run.log.display.total_steps = last_step
    reference = None
    if config.reference_kl:
        reference = await start_reference(run, has_begun=steps_done > sft_steps, sft_steps=sft_steps)
    rollouts = Rollouts(
        config.rollouts,
        run.environment,
        run.tokenizer,
        run.generator,
        max_tokens=config.max_tokens,
        seed=config.seed,
        cursor=cursor,
        penalty=reference.penalise if reference and config.reference_kl_in == "reward" else None,
    )
    schedule = config.schedule.build(config.steps)
    await sync(run)
    for step in range(steps_done + 1, last_step + 1):
        with run.timer("generate"):
            batch = await run.interruption.drop_if_asked(rollouts.next_batch())
        values = batch.metrics()
        if batch.samples:  # empty if the rewards are equal within every group: the gradient would be 0
            samples = batch.samples
            if reference and config.reference_kl_in == "loss":
                samples = await reference.with_logprobs(samples)
            learning_rate = schedule(step - sft_steps)
            with run.timer("train"):
                updates = await train_step(run, samples, learning_rate)
            await sync(run)
            values |= report(batch, updates, config.epochs_per_step) | {"learning_rate": learning_rate}
            values |= run.trained(samples, num_epochs=config.epochs_per_step)
        grpo_step, is_last = step - sft_steps, step == last_step
        if is_last or grpo_step % config.validate_every == 0:
            values |= await run.validate(step)
        await run.record(step, values, phase="grpo", skipped=not batch.samples)
        run.log.rollouts(step, batch.shown())
        # The checkpoint follows the step's record. A run that is killed between the two repeats the step when it is resumed and
        # writes its record again. In the other order the record would be missing.
        state = {"step": step, "cursor": rollouts.cursor, "sft_steps": sft_steps}
        await run.end_step(state, phase_step=grpo_step, is_last=is_last)


async def train_step(run: Run[GRPOConfig], samples: Sequence[Sample], learning_rate: float) -> list[Update]:
    """Train on the samples epochs_per_step times. Every time they are divided into at most updates_per_step parts, and each part gets one
    optimizer step with the mean gradient over its tokens.
    """
    config, loss = run.config, run.config.loss()
    part_size = math.ceil(len(samples) / config.updates_per_step)
    updates = []
    for _ in range(config.epochs_per_step):
        for part in split(samples, part_size):
            outputs = []
            for chunk in split(part, config.samples_per_forward_backward):
                outputs.append(await run.trainer.forward_backward(chunk, loss=loss))
            params = config.optimizer.params(learning_rate=learning_rate, grad_divisor=num_loss_tokens(part))
            result = await run.trainer.optim_step(params)
            updates.append(Update(outputs=outputs, result=result))
    return updates


async def sync(run: Run[GRPOConfig]) -> None:
    """Publish the trainer's weights, and load them into the generator. They never pass through the controller."""
    with run.timer("sync"):
        version = await run.trainer.push_model_state_dict()
        await run.generator.pull_model_state_dict(version)


async def train_sft_phase(run: Run[GRPOConfig]) -> tuple[int, int]:
    """Take the supervised steps that are left.

    Returns (number of supervised steps done, also before a resume; index of the next problem).
    """
    config = run.config
    if "sft_steps" in run.state or config.sft_steps == 0:
        return run.state.get("sft_steps", 0), run.state.get("cursor", 0)
    phase = SFTPhase(run, config.sft, total_steps=config.sft_steps)
    for step in range(run.state.get("step", 0) + 1, config.sft_steps + 1):
        values = await phase.train_step(step)
        is_last = step == config.sft_steps or phase.should_stop()
        state = {"step": step, **phase.state()}
        if is_last:
            state["sft_steps"] = step
            await sync(run)
            values |= await run.validate(step)
        await run.record(step, values, phase="sft")
        await run.end_step(state, phase_step=step, is_last=is_last)
        if is_last:
            break
    return step, phase.cursor


def report(batch: RolloutBatch, updates: Sequence[Update], num_epochs: int) -> dict[str, float]:
    """Metrics of one step under their names in metrics.jsonl.

    The trainer's logprobs are compared with the generator's on the first update only, because later updates have other weights than
    those that sampled.
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
        "clip_fraction/low": whole["clip_fraction_low:mean"],
        "clip_fraction/high": whole["clip_fraction_high:mean"],
        "entropy": first["entropy_estimate:mean"],
        "policy_version": results[-1].policy_version,
        "loss": whole["loss:sum"] / (num_epochs * num_loss_tokens(batch.samples)),
        "grad_norm": max(result.grad_norm for result in results),
        "updates": len(results),
        "updates_skipped": sum(result.skipped for result in results),
        "policy_lag": updates[-1].outputs[0].policy_version - batch.oldest_version,
    }


if __name__ == "__main__":
    main("controllers.grpo")
