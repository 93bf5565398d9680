"""The reference: the policy at the start of GRPO, PPO or DPO, in a second model that only infers.

T positions of a sample.
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
    """A model that never changes; its logprobs can be a column of samples."""

    model: ReferenceClient
    samples_per_forward: int
    timer: Timer

    async def logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Of the targets, [T] by sample."""
        rows: list[Tensor] = []
        with self.timer("reference"):
            for chunk in chunks(samples, self.samples_per_forward):
                output = await self.model.forward(chunk)
                rows += output.logprobs
        return rows

    async def with_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the column ref_logprobs, for a loss with a KL term."""
        rows = await self.logprobs(samples)
        with_column = []
        for sample, row in zip(samples, rows, strict=True):
            with_column.append(replace(sample, columns={**sample.columns, "ref_logprobs": row}))
        return with_column


@dataclass(slots=True, kw_only=True)
class Reference(FrozenPolicy):
    """The reference, for a KL penalty on rewards or a KL term in the loss."""

    kl: KL  # its coefficient may change from step to step
    temperature: float  # of the completions

    async def penalise(self, groups: Sequence[Group]) -> list[Group]:
        """Rewards R = r - kl.coefficient * sum_t kl_t, where r includes the length penalty.

        kl_t is by the logprobs of generator and reference: one penalty per completion, as in RLOO
        (arXiv 2402.14740), TRL's RLOOTrainer and verl's use_kl_in_reward. It is divided by the
        group's standard deviation if R is. Only with k1, whose sum is log(p_generator /
        p_reference), is the expected policy gradient that of the KL divergence.

        Two completions of two tokens, rewards 1 and 0, k1, coefficient 0.1, differences of logprobs
        0.5 and 0 at each token -> R = 0.9 and 0.
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
    """Sum of `kl` over each completion, from the columns old_logprobs and ref_logprobs."""
    found = []
    for sample, row in zip(samples, ref_logprobs, strict=True):
        is_completion_T = sample.columns["loss_weights"] != 0
        found.append(float(kl(sample.columns["old_logprobs"], row)[is_completion_T].sum()))
    return found


async def start_frozen(run: Run[Any], *, has_begun: bool, is_saved: bool) -> FrozenPolicy:
    """Start a model with the policy with which a phase of the run (GRPO, PPO or DPO) begins.

    has_begun: the phase began before the run was resumed. is_saved: read the policy from the run's
    folder `reference`, where it is saved when the phase begins; False: from hf_path.
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
    """The reference of GRPO or PPO."""
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
    """Raises ValueError if the weights with which GRPO or PPO began are lost.

    config: a GRPOConfig. They are saved in the folder, or are those of hf_path.
    """
    newest = checkpoints.newest(folder.checkpoints)
    state = checkpoints.read(newest) if newest else {}
    if "sft_steps" not in state or state["step"] <= state["sft_steps"]:
        return  # not begun: they are saved then
    if _is_saved(config, state["sft_steps"]) and not folder.reference.is_dir():
        raise ValueError(
            f"reference_kl={config.reference_kl} needs the weights that GRPO or PPO began with, but {folder.reference} does not exist: "
            "this run began with reference_kl=0; resume it with reference_kl=0, or start a new run"
        )


def _is_saved(config: Any, sft_steps: int) -> bool:
    """False if GRPO or PPO begins with the weights of hf_path."""
    return bool(sft_steps or not config.trainer.hf_path)
