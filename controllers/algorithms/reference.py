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
from controllers.run.update import forward
from rl_actors import KL, ReferenceClient, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    model: ReferenceClient
    samples_per_forward: int
    timer: Timer

    async def logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Of the targets, [T] by sample."""
        with self.timer("reference"):
            outputs = await forward(self.model, samples, self.samples_per_forward)
        return [row for output in outputs for row in output.logprobs]

    async def with_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the column ref_logprobs, for a loss with a KL term."""
        pairs = zip(samples, await self.logprobs(samples), strict=True)
        return [replace(sample, columns={**sample.columns, "ref_logprobs": row}) for sample, row in pairs]

    async def penalise(self, groups: Sequence[Group], kl: KL, temperature: float) -> list[Group]:
        """Rewards R = r - kl.coefficient * sum_t kl_t, where r includes the length penalty.

        kl_t is by the logprobs of generator and reference: one penalty per completion, as in RLOO
        (arXiv 2402.14740). It is divided by the group's standard deviation if R is. Only with k1,
        whose sum is log(p_generator / p_reference), is the expected policy gradient that of the KL
        divergence. temperature: of the completions.
        """
        samples: list[Sample] = []
        for group in groups:
            samples += group.to_samples([0.0] * len(group.completions), temperature)
        rows = iter(zip(samples, await self.logprobs(samples), strict=True))
        penalised = []
        for group in groups:
            divergences = [_divergence(*next(rows), kl) for _ in group.completions]
            pairs = zip(group.rewards, divergences, strict=True)
            rewards = [reward - kl.coefficient * divergence for reward, divergence in pairs]
            penalised.append(replace(group, rewards=rewards, divergences=divergences))
        return penalised


def _divergence(sample: Sample, ref_logprobs_T: Tensor, kl: KL) -> float:
    """Sum of `kl` over the completion."""
    is_completion_T = sample.columns["loss_weights"] != 0
    return float(kl(sample.columns["old_logprobs"], ref_logprobs_T)[is_completion_T].sum())


async def start_reference(run: Run[Any], *, has_begun: bool, sft_steps: int = 0) -> Reference:
    """Start a model with the policy with which GRPO, PPO or DPO begins.

    That is the one of hf_path, or is saved in the run's folder `reference`. has_begun: before the
    run was resumed.
    """
    assert run.supervision.actors is not None
    model = run.supervision.actors.spawn_reference()
    with run.log.setup("starting reference"):
        await model.ready()
    if _is_saved(run.config, sft_steps):
        path = str(run.folder.reference)
        if not has_begun:
            async with run.colocation.borrowed():
                saved = await run.trainer.save_checkpoint(path, optimizer=False)
            await saved.wait()
        await model.load_checkpoint(path, optimizer=False)
    return Reference(model=model, samples_per_forward=run.config.samples_per_forward_backward, timer=run.timer)


def require_reference(config: Any, folder: RunFolder) -> None:
    """Raises ValueError if the first weights of GRPO or PPO are lost. config: a GRPOConfig."""
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
    """False if the loop begins with the weights of hf_path."""
    return bool(sft_steps or not config.trainer.hf_path)
