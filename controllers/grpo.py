"""Group-relative policy optimization: the training loop and its command line.

python -m controllers.grpo --config tiny
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal, TypeVar

from controllers.algorithms.kl_control import KLControlConfig
from controllers.algorithms.policy_loss import Aggregation, CorrectionConfig, LossConfig, grad_divisor
from controllers.algorithms.presets import ALGORITHMS
from controllers.algorithms.reference import Reference, require_reference, start_reference
from controllers.algorithms.schedules import ScheduleConfig
from controllers.observe.run_folder import RunFolder
from controllers.program.launch import start_loop
from controllers.rollouts.groups import Group, Penalty, RolloutBatch, RolloutConfig
from controllers.run.config import Algorithm, RunConfig
from controllers.run.run import Run
from controllers.run.survival import ReplayingQueue
from controllers.run.update import Update, chunks, forward, sync, update
from controllers.sft import SFTPhaseConfig, train_phase
from rl_actors import KL, Sample, metrics
from rl_actors.field_types import CountingInt, NaturalInt, NonNegativeFloat
from rl_actors.losses import Loss, columns_of


@dataclass(kw_only=True)
class GRPOConfig(RunConfig):
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling of the training completions, and their advantages."""
    updates_per_step: CountingInt = 1
    """Optimizer steps on one batch. From the second on, it is off-policy."""
    epochs_per_step: CountingInt = 1
    """Passes over a batch, each with up to updates_per_step optimizer steps."""
    algorithm: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo"] | None = None
    """Preset of a paper, which other flags override. PPO also needs --advantage gae."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The policy loss and its options."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Correction for stale or otherwise off-policy completions."""
    aggregation: Aggregation = "token_mean"
    """token_mean: mean over the step's tokens. sequence_mean: mean over each sample's tokens, then
    over samples. sequence_sum: sum over each sample's tokens, then mean over samples. constant:
    sum over tokens / (max_tokens * samples)."""
    entropy_bonus: float = 0.0
    """Weight of the policy's entropy in the objective."""
    reference_kl: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the policy at the start, in a second model. 0: neither."""
    reference_kl_in: Literal["loss", "reward"] = "loss"
    """reward: subtracted from a completion's (in PPO a token's) reward before advantages."""
    reference_kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """k1: d = logprob - ref_logprob, k2: d^2 / 2, k3: exp(-d) - 1 + d. None: k3, in a reward k1."""
    kl_control: KLControlConfig = field(default_factory=KLControlConfig)
    """Changes the weight to keep the divergence near a target; it begins with reference_kl."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate of the policy; sft.schedule has that of supervised steps."""
    sft: SFTPhaseConfig = field(default_factory=SFTPhaseConfig)
    """Supervised steps before the first, for a policy with random weights."""
    sft_steps: NaturalInt = 0
    """Largest number of supervised steps; sft.stop_at_answer_probability may end them earlier."""

    presets: ClassVar[Mapping[str, Algorithm]] = ALGORITHMS
    short_flags: ClassVar[dict[str, str]] = RunConfig.short_flags | {
        "--lr": "--schedule.learning-rate",
        "--advantage": "--rollouts.advantage",
        "--group-size": "--rollouts.group-size",
        "--groups": "--rollouts.groups-per-step",
        "--temperature": "--rollouts.temperature",
    }

    @property
    def is_supervised(self) -> bool:
        return self.sft_steps > 0

    @property
    def has_reference(self) -> bool:
        return self.reference_kl > 0

    @property
    def is_off_policy(self) -> bool:
        """True if a step may train on completions of older or of quantized weights."""
        return self.rollouts.max_staleness > 0 or self.generator.quantization is not None

    def plan_lines(self) -> list[str]:
        staleness = self.rollouts.max_staleness
        ahead = staleness // self.versions_per_step
        correction = self.correction.chosen(is_off_policy=self.is_off_policy)
        how = f"{ahead} steps ahead of the trainer (rollouts.max_staleness={staleness})"
        return [f"rollouts: {how}; correction: {correction}"]

    def validate(self) -> None:
        super().validate()
        self.rollouts.validate()
        if self.rollouts.advantage == "gae" and not self.has_critic:
            raise ValueError("rollouts.advantage='gae' needs a value model; python -m controllers.ppo has one")
        self.schedule.validate()
        self.sft.schedule.validate()
        self.kl_control.validate()
        if self.kl_control.target is not None and not self.reference_kl:
            raise ValueError(
                f"kl_control.target={self.kl_control.target} with reference_kl=0; reference_kl is the first weight "
                "of the KL divergence, so it must be above 0"
            )
        self.make_loss()
        if 0 < self.rollouts.max_staleness < self.versions_per_step:
            raise ValueError(
                f"rollouts.max_staleness={self.rollouts.max_staleness}, but a step advances the version by up to updates_per_step * "
                f"epochs_per_step = {self.versions_per_step}, so no rollouts could run ahead; use 0 or at least {self.versions_per_step}"
            )
        if self.colocation.enabled and self.rollouts.max_staleness:
            raise ValueError(
                f"colocation.enabled=True with rollouts.max_staleness={self.rollouts.max_staleness}: the generator sleeps while the trainer "
                "works, so no rollouts can run ahead; use 0"
            )

    def validate_resumed(self, folder: RunFolder) -> None:
        super().validate_resumed(folder)
        if self.reference_kl:
            require_reference(self, folder)

    @property
    def versions_per_step(self) -> int:
        return self.updates_per_step * self.epochs_per_step

    def kl(self, coefficient: float | None = None) -> KL:
        """coefficient: of a checkpoint, which only counts if kl_control moves it."""
        estimator = self.reference_kl_estimator or ("k3" if self.reference_kl_in == "loss" else "k1")
        moved = None if self.kl_control.target is None else coefficient
        return KL(coefficient=self.reference_kl if moved is None else moved, estimator=estimator)

    def make_loss(self, kl: KL | None = None) -> Loss:
        """kl: its KL term, if it has one. Raises ValueError for an option it lacks, or out of range."""
        return self.loss.build(
            kl=(kl or self.kl()) if self.reference_kl and self.reference_kl_in == "loss" else None,
            entropy_bonus=self.entropy_bonus,
            correction=self.correction.build(is_off_policy=self.is_off_policy),
            sequence_mean=self.aggregation == "sequence_mean",
        )

    def grad_divisor(self, samples: Sequence[Sample]) -> float:
        return grad_divisor(self.aggregation, samples, self.max_tokens)


ConfigOfLoop = TypeVar("ConfigOfLoop", bound=GRPOConfig)  # also of a loop that uses functions of this module


async def train(run: Run[GRPOConfig]) -> None:
    """Supervised steps, if any, then GRPO steps: generate, train, sync."""
    config = run.config
    sft_steps, cursor = await train_sft_phase(run)
    steps_done = max(run.state.get("step", 0), sft_steps)
    last_step = sft_steps + config.steps
    run.log.display.total_steps = last_step
    reference = None
    if config.reference_kl:
        reference = await start_reference(run, has_begun=steps_done > sft_steps, sft_steps=sft_steps)
    kl = config.kl(run.state.get("kl_coefficient"))

    async def penalise(groups: Sequence[Group]) -> list[Group]:
        assert reference is not None
        return await reference.penalise(groups, kl, config.rollouts.temperature)  # kl: the step's

    penalty = penalise if reference and config.reference_kl_in == "reward" else None
    schedule = config.schedule.build(config.steps)
    version = await sync(run)
    async with make_queue(run, cursor, penalty, steps_done=steps_done) as rollouts:
        for step in range(steps_done + 1, last_step + 1):
            with run.timer("generate"):
                batch = await rollouts.next_batch(version)
            values = batch.metrics()
            # none if the rewards of every group are equal
            if batch.samples:
                loss = config.make_loss(kl)
                samples = await with_columns_of_loss(run, batch.samples, loss, reference)
                learning_rate = schedule(step - sft_steps)
                async with run.training():
                    updates = await train_step(run, minibatches(config, samples), loss, learning_rate)
                async with rollouts.update():
                    version = await sync(run)
                values |= step_metrics(config, batch, updates) | {"learning_rate": learning_rate}
                values |= run.trained_metrics(samples, num_epochs=config.epochs_per_step)
            if reference is not None:
                values["kl/coefficient"] = kl.coefficient
                # missing if the divergence is part of the loss and the step did not train
                if "kl/reference" in values:
                    kl = config.kl_control.next_kl(kl, values["kl/reference"])
            grpo_step = step - sft_steps
            is_last = step == last_step
            if is_last or grpo_step % config.evaluate_every == 0:
                values |= await run.evaluate(step)
            await run.log_step(step, values, phase="grpo", skipped=not batch.samples)
            run.log.rollouts(step, batch.to_record())
            # before the checkpoint, as in sft.py
            state = {"step": step, **rollouts.state(), "sft_steps": sft_steps, "kl_coefficient": kl.coefficient}
            await run.end_step(state, phase_step=grpo_step, is_last=is_last)


def make_queue(run: Run[ConfigOfLoop], cursor: int, penalty: Penalty | None, *, steps_done: int) -> ReplayingQueue:
    """Goes on at the checkpoint. Repeated steps get the batches that the run still has."""
    return ReplayingQueue(
        run.rollouts(run.config.rollouts, penalty=penalty),
        run.supervision,
        steps_done=steps_done,
        versions_per_step=run.config.versions_per_step,
        cursor=cursor,
        pending=run.state.get("pending", ()),
    )


def minibatches(config: GRPOConfig, samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
    """By optimizer step: epochs_per_step passes, each in at most updates_per_step parts."""
    part_size = math.ceil(len(samples) / config.updates_per_step)
    for _ in range(config.epochs_per_step):
        yield from chunks(samples, part_size)


async def train_step(
    run: Run[ConfigOfLoop], parts: Iterable[Sequence[Sample]], loss: Loss, learning_rate: float
) -> list[Update]:
    """One optimizer step on each part, its gradient divided by `config.grad_divisor(part)`."""
    config = run.config
    backward = partial(run.trainer.forward_backward, loss=loss)
    return [
        await update(config, run.trainer, part, backward, learning_rate, config.grad_divisor(part)) for part in parts
    ]


async def with_columns_of_loss(
    run: Run[ConfigOfLoop], samples: Sequence[Sample], loss: Loss, reference: Reference | None
) -> Sequence[Sample]:
    """The samples with the columns that the loss reads.

    With a correction that reweights, old_logprobs are the trainer's from before the update, and
    generator_logprobs the generator's. Raises ValueError if the loss needs a reference that is None.
    """
    columns, optional = columns_of(loss)
    if "ref_logprobs" in columns and not reference:
        raise ValueError(
            f"reference_kl={run.config.reference_kl}: the loss needs a reference; start_reference makes one"
        )
    if "generator_logprobs" in columns:
        async with run.training():
            samples = await with_trainer_logprobs(run, samples)
    if reference and "ref_logprobs" in columns:
        samples = await reference.with_logprobs(samples)
    # without other columns, which the trainer would refuse
    names = columns | optional
    return [
        replace(sample, columns={name: sample.columns[name] for name in sample.columns if name in names})
        for sample in samples
    ]


async def with_trainer_logprobs(run: Run[ConfigOfLoop], samples: Sequence[Sample]) -> list[Sample]:
    """With the trainer's logprobs in old_logprobs, and the generator's in generator_logprobs."""
    outputs = await forward(run.trainer, samples, run.config.samples_per_forward_backward)
    rows = [row for output in outputs for row in output.logprobs]
    extended = []
    for sample, row in zip(samples, rows, strict=True):
        logprobs = {"generator_logprobs": sample.columns["old_logprobs"], "old_logprobs": row}
        extended.append(replace(sample, columns={**sample.columns, **logprobs}))
    return extended


async def train_sft_phase(run: Run[ConfigOfLoop]) -> tuple[int, int]:
    """Take the supervised steps that are left. Returns (all of them, index of the next problem)."""
    if "sft_steps" in run.state:
        return run.state["sft_steps"], run.state["cursor"]
    return await train_phase(run, run.config.sft, num_steps=run.config.sft_steps)


OF_FIRST_UPDATE = {
    "kl_reference:mean": "kl/reference",
    "logprob_diff:mean": "logprob_diff/mean",
    "logprob_diff:max": "logprob_diff/max",
    "kl_policy_generator:mean": "kl/policy_generator",
    "entropy_estimate:mean": "entropy",
}
OF_ALL_UPDATES = {
    "clip_fraction:mean": "clip_fraction",
    "clip_fraction_low:mean": "clip_fraction/low",
    "clip_fraction_high:mean": "clip_fraction/high",
    "correction:mean": "correction/mean",
    "correction_zero:mean": "correction/zero",
    "entropy:mean": "entropy/exact",
    "ratio:mean": "ratio/mean",
}
"""Loss's metric -> name in metrics.jsonl. Any other metric `x:mean` is there as loss/x/mean."""


def step_metrics(config: GRPOConfig, batch: RolloutBatch, updates: Sequence[Update]) -> dict[str, float]:
    """Under their names in metrics.jsonl. What compares trainer and generator is of the first
    optimizer step, before the weights move apart."""
    first = metrics.finish(metrics.merge(output.partials for output in updates[0].outputs))
    whole = metrics.finish(metrics.merge(output.partials for update in updates for output in update.outputs))
    results = [update.result for update in updates]
    values = {name: first[of_loss] for of_loss, name in OF_FIRST_UPDATE.items() if of_loss in first}
    for of_loss, value in whole.items():
        if of_loss not in OF_FIRST_UPDATE and of_loss != "loss:sum":
            values[OF_ALL_UPDATES.get(of_loss, "loss/" + of_loss.replace(":", "/"))] = value
    return values | {
        "policy_version": results[-1].policy_version,
        "loss": whole["loss:sum"] / (config.epochs_per_step * config.grad_divisor(batch.samples)),
        "grad_norm": max(result.grad_norm for result in results),
        "updates": len(results),
        "updates_skipped": sum(result.skipped for result in results),
        "policy_lag": updates[-1].outputs[0].policy_version - batch.oldest_version,
    }


if __name__ == "__main__":
    start_loop("controllers.grpo")
