"""The policy as reinforcement learning began: a second trainer, without an optimizer, and the KL divergence from it. Trains nothing.

G groups (problems), N completions of each, T positions of a sample.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from controllers import checkpoints
from controllers.advantages import ADVANTAGES
from controllers.rollouts import Group, RolloutBatch
from controllers.run import Run, split
from controllers.run_folder import RunFolder
from rl_actors import KL, Sample


async def spawn_reference(run: Run, *, has_begun: bool, warmup_steps: int) -> Any:
    """A TrainerClient with the weights after the warm-up: the trainer's now, or for a run that `has_begun`, those that it wrote down.

    Without a warm-up they are those of hf_path, which both read, and nothing is written.
    """
    reference = run.spawn_reference()
    with run.log.setup("starting reference"):
        await reference.ready()
    if _is_written_down(run.config, warmup_steps):
        path = str(run.folder.reference)
        if not has_begun:
            saved = await run.trainer.save_checkpoint(path, optimizer=False)
            await saved.wait()
        await reference.load_checkpoint(path, optimizer=False)
    return reference


def require_reference(config: Any, folder: RunFolder) -> None:
    """Raises ValueError when the run of this folder is past the weights that GRPO began with and nobody has them."""
    newest = checkpoints.newest(folder.checkpoints)
    state = checkpoints.read(newest) if newest else {}
    if "warmup_steps" not in state or state["step"] <= state["warmup_steps"]:
        return  # GRPO has not begun, and will write them down
    if _is_written_down(config, state["warmup_steps"]) and not folder.reference.is_dir():
        raise ValueError(
            f"reference_kl={config.reference_kl} needs the weights that GRPO began with, but {folder.reference} is not there: "
            "this run began with reference_kl=0; resume it so, or start a new one"
        )


def _is_written_down(config: Any, warmup_steps: int) -> bool:
    return bool(warmup_steps or not config.trainer.hf_path)


async def apply_reference(run: Run, reference: Any, batch: RolloutBatch) -> tuple[list[Sample], dict[str, float]]:
    """The samples that reference_kl_in asks for, with ref_logprobs for the loss or with advantages of penalised rewards; metrics."""
    samples = await with_reference(run, reference, batch.samples)
    if run.config.reference_kl_in == "loss":
        return samples, {}
    groups = [group for group in batch.groups if group.has_signal()]
    return penalise(groups, samples, run.config.kl(), run.config.rollouts.advantage)


async def with_reference(run: Run, reference: Any, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the column ref_logprobs."""
    with run.timer("reference"):
        chunks = split(samples, run.config.samples_per_forward_backward)
        outputs = [await reference.forward(chunk) for chunk in chunks]
    logprobs = [row for output in outputs for row in output.logprobs]
    return [
        replace(sample, columns={**sample.columns, "ref_logprobs": row})
        for sample, row in zip(samples, logprobs, strict=True)
    ]


def penalise(
    groups: Sequence[Group], samples: Sequence[Sample], kl: KL, advantage: str
) -> tuple[list[Sample], dict[str, float]]:
    """KL in the reward: G * N samples, group by group, with the advantages of R = r - kl.coefficient * sum_t kl_t, and metrics.

    kl_t is the estimate of `kl` between old_logprobs, which sampled, and ref_logprobs; its sum over the completion comes off the
    task's reward before the advantages of a group, so all tokens of a completion share one: RLOO (arXiv 2402.14740), as TRL's
    RLOOTrainer and for GRPO verl's use_kl_in_reward do it. An advantage divided by a standard deviation divides the penalty, too.
    With k1 the penalty is the log ratio of the whole completion and the gradient in the mean that of the KL; with k2 and k3 it is not.
    One group, two completions of two tokens, rewards 1 and 0, old - ref 0.5 and 0 at each token, coefficient 0.1, dr_grpo:
    R = 0.9 and 0, advantages 0.45 and -0.45.
    """
    trained_T = [sample.columns["loss_weights"] != 0 for sample in samples]
    divergences = torch.stack(
        [
            kl(sample.columns["old_logprobs"], sample.columns["ref_logprobs"])[trained].sum()
            for sample, trained in zip(samples, trained_T, strict=True)
        ]
    )
    rewards_GN = torch.tensor([group.rewards for group in groups])
    penalties_GN = kl.coefficient * divergences.view(rewards_GN.shape)
    advantages = ADVANTAGES[advantage](rewards_GN - penalties_GN).flatten()
    changed = [
        _with_advantage(sample, trained * value)
        for sample, trained, value in zip(samples, trained_T, advantages, strict=True)
    ]
    num_tokens = sum(int(trained.sum()) for trained in trained_T)
    return changed, {
        "kl/reference": float(divergences.sum()) / num_tokens,
        "reward/kl_penalty": float(penalties_GN.mean()),
    }


def _with_advantage(sample: Sample, advantages_T: torch.Tensor) -> Sample:
    columns = {name: column for name, column in sample.columns.items() if name != "ref_logprobs"}
    return replace(sample, columns=columns | {"advantages": advantages_T})
