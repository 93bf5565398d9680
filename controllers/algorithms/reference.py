"""The reference policy, and the KL divergence of the trained policy from it.

The reference policy is the policy at the start of GRPO, PPO or DPO. A second model holds its weights and is never trained.

A sample has T positions. A column of a sample is a named tensor [T].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from controllers.observe.logger import Timer
from controllers.observe.run_folder import RunFolder
from controllers.rollouts.groups import Group
from controllers.run import checkpoints
from controllers.run.run import Run
from controllers.run.update import chunks
from rl_actors import KL, ReferenceClient, Sample


@dataclass(slots=True, kw_only=True)
class FrozenPolicy:
    """A policy that does not change. It computes the logprobs of samples, and can add these logprobs to the samples as a column."""

    model: ReferenceClient
    samples_per_forward: int
    timer: Timer

    async def logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Logprobs of the targets under the frozen policy, [T] for each sample."""
        rows: list[Tensor] = []
        with self.timer("reference"):
            for chunk in chunks(samples, self.samples_per_forward):
                output = await self.model.forward(chunk)
                rows += output.logprobs
        return rows

    async def with_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the column ref_logprobs, which a loss with a KL term reads."""
        rows = await self.logprobs(samples)
        with_column = []
        for sample, row in zip(samples, rows, strict=True):
            with_column.append(replace(sample, columns={**sample.columns, "ref_logprobs": row}))
        return with_column


@dataclass(slots=True, kw_only=True)
class Reference(FrozenPolicy):
    """The reference policy. The KL divergence of the trained policy from the reference is a penalty on rewards or a term of the loss."""

    kl: KL  # the estimator and its coefficient, which may change from step to step
    temperature: float  # temperature at which the completions were sampled

    async def penalise(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with rewards R = r - kl.coefficient * sum_t kl_t, where r is the reward before this penalty.

        r is the task's reward, minus the penalty on long completions if there is one.
        kl_t is the estimate that `kl` gives at token t from the logprobs of the generator and the reference. The
        penalty is one number for the whole completion. This is the method of RLOO (arXiv 2402.14740), of TRL's
        RLOOTrainer and, for GRPO, of verl's use_kl_in_reward. If R is later divided by a standard deviation, the penalty
        in R is divided, too.

        The class KL defines the estimators k1, k2 and k3. With k1 the sum of kl_t is the log of the ratio p_generator /
        p_reference of the whole completion. If this sum is the reward, the expected policy gradient is the gradient of
        the KL divergence. With k2 or k3 the expected policy gradient differs from the gradient of the KL divergence.

        Example: one group, two completions of two tokens, rewards 1 and 0, estimator k1, coefficient 0.1. At each token the generator's logprob
        minus the reference's logprob is 0.5 in the first completion and 0 in the second. Then R = 0.9 and 0.
        """
        samples: list[Sample] = []
        for group in groups:
            samples += group.to_samples([0.0] * len(group.completions), self.temperature)
        rows = await self.logprobs(samples)
        found = iter(divergences(samples, rows, self.kl))
        penalised = []
        for group in groups:
            of_group = [next(found) for _ in group.completions]
            rewards = []
            for reward, divergence in zip(group.rewards, of_group, strict=True):
                rewards.append(reward - self.kl.coefficient * divergence)
            penalised.append(replace(group, rewards=rewards, divergences=of_group))
        return penalised


def divergences(samples: Sequence[Sample], ref_logprobs: Sequence[Tensor], kl: KL) -> list[float]:
    """For each sample the sum of `kl` over its completion, from the generator's logprobs (the column old_logprobs) and ref_logprobs."""
    found = []
    for sample, row in zip(samples, ref_logprobs, strict=True):
        is_completion_T = sample.columns["loss_weights"] != 0
        found.append(float(kl(sample.columns["old_logprobs"], row)[is_completion_T].sum()))
    return found


async def start_frozen(run: Run[Any], *, has_begun: bool, is_saved: bool) -> FrozenPolicy:
    """Start a model that is never trained. It holds the policy with which a phase of the run (GRPO, PPO or DPO) begins.

    has_begun: True if the phase began before the run was resumed. False if the phase begins now.
    is_saved: False if the model reads the policy from hf_path, as the trainer did. True if the model reads the policy from the run's folder
    `reference`. If is_saved is True and the phase begins now, this function first saves the trainer's current weights in this folder.
    """
    model = run.supervision.spawn_reference()
    with run.log.setup("starting reference"):
        await model.ready()
    if is_saved:
        path = str(run.folder.reference)
        if not has_begun:
            async with run.colocation.borrowed():
                saved = await run.trainer.save_checkpoint(path, optimizer=False)
            await saved.wait()
        await model.load_checkpoint(path, optimizer=False)
    return FrozenPolicy(model=model, samples_per_forward=run.config.samples_per_forward_backward, timer=run.timer)


async def start_reference(run: "Run[Any]", *, has_begun: bool, sft_steps: int) -> Reference:
    """Start a model that holds the policy with which GRPO or PPO begins."""
    config = run.config
    frozen = await start_frozen(run, has_begun=has_begun, is_saved=_is_saved(config, sft_steps))
    return Reference(
        model=frozen.model,
        samples_per_forward=frozen.samples_per_forward,
        timer=frozen.timer,
        kl=replace(config.kl(), coefficient=run.state.get("kl_coefficient", config.reference_kl)),
        temperature=config.rollouts.temperature,
    )


def require_reference(config: Any, folder: RunFolder) -> None:
    """config: a GRPOConfig. Raises ValueError if the reference cannot get the weights with which the run in this folder began GRPO or PPO.

    The reference can get these weights if the run saved them, or if they are the weights of hf_path.
    """
    newest = checkpoints.newest(folder.checkpoints)
    state = checkpoints.read(newest) if newest else {}
    if "sft_steps" not in state or state["step"] <= state["sft_steps"]:
        return  # GRPO or PPO has not begun. The weights are saved when it begins.
    if _is_saved(config, state["sft_steps"]) and not folder.reference.is_dir():
        raise ValueError(
            f"reference_kl={config.reference_kl} needs the weights that GRPO or PPO began with, but {folder.reference} does not exist: "
            "this run began with reference_kl=0; resume it with reference_kl=0, or start a new run"
        )


def _is_saved(config: Any, sft_steps: int) -> bool:
    """True if the reference's weights must be saved. False if GRPO or PPO begins with the weights of hf_path, which the reference can read."""
    return bool(sft_steps or not config.trainer.hf_path)
