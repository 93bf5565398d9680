"""The policy as reinforcement learning began: a second trainer, without an optimizer, and the column that losses read. Trains nothing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from controllers.run import Run, split
from rl_actors import Sample


async def spawn_reference(run: Run, *, has_begun: bool, warmup_steps: int) -> Any:
    """A TrainerClient with the weights after the warm-up: the trainer's now, or for a run that `has_begun`, those that it wrote down.

    Without a warm-up they are those of hf_path, which both read, and nothing is written.
    """
    reference = run.spawn_reference()
    if warmup_steps or not run.config.trainer.hf_path:
        path = str(run.folder.reference)
        if not has_begun:
            saved = await run.trainer.save_checkpoint(path, optimizer=False)
            await saved.wait()
        await reference.load_checkpoint(path, optimizer=False)
    return reference


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
