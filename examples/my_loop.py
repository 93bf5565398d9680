"""A training loop of one's own: its own problems, reward, advantages and schedule. Everything else comes with `main`: flags, --plan,
--dry-run, checkpoints, --resume, the end after Ctrl-C, survival of dead actors, and the report.

python examples/my_loop.py --steps 20
python examples/my_loop.py --resume runs/mine-…
"""

import math
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from configs.blank import blank
from controllers.environments import EnvironmentConfig, Problem
from controllers.grpo import GRPOConfig, make_queue, sync, with_columns_of_loss
from controllers.program.cli import Configs
from controllers.program.launch import main
from controllers.run.run import Run
from controllers.run.update import chunks
from rl_actors import OptimParams, num_loss_tokens


class LastDigit:
    """Problems with a known answer: the last digit of a number, "4817:" -> "7"."""

    def __init__(self, seed: int, num_held_out: int) -> None:
        numbers = Random(seed).sample(range(1000, 10_000), k=5000)
        problems = [Problem(prompt=f"{number}:", answer=str(number % 10), key=str(number)) for number in numbers]
        self.test = problems[:num_held_out]
        self.training = problems[num_held_out:]

    def held_out(self) -> list[Problem]:
        return self.test

    def problem(self, index: int) -> Problem:
        return self.training[index % len(self.training)]

    def reward(self, problem: Problem, completion: str) -> float:
        """1 for the right digit, half of it for another digit, 0 for anything else: a first completion rarely is one character."""
        if completion == problem.answer:
            return 1.0
        return 0.5 if completion.isdigit() and len(completion) == 1 else 0.0


def ranks(rewards_GN: Tensor) -> Tensor:
    """Advantages [G, N] from rewards [G, N]: the rank of each completion in its group, from -1 to 1; equal rewards share a rank."""
    better_GNN = (rewards_GN[:, :, None] > rewards_GN[:, None, :]).float()
    worse_GNN = (rewards_GN[:, :, None] < rewards_GN[:, None, :]).float()
    return (better_GNN - worse_GNN).sum(-1) / (rewards_GN.shape[1] - 1)


@dataclass(kw_only=True)
class MyConfig(GRPOConfig):
    """Every field is a flag, such as --half-life 50."""

    first_learning_rate: float = 1e-3
    half_life: float = 30.0
    """Steps after which the learning rate is half as large."""

    def learning_rate(self, step: int) -> float:
        return self.first_learning_rate * math.exp2(-step / self.half_life)


def mine() -> MyConfig:
    base = blank()
    config = MyConfig(
        trainer=base.trainer,
        generator=base.generator,
        alphabet=base.alphabet,
        max_tokens=2,
        steps=60,
        environment=EnvironmentConfig(task=f"{__name__}:LastDigit", num_held_out=200),
        rollouts=base.rollouts,
        checkpoint_every=10,
    )
    config.rollouts.advantage = f"{__name__}:ranks"
    return config


async def train(run: Run[MyConfig]) -> None:
    """Generate, train, sync: the learning rate, gradient accumulation, normalization and the moment of the sync are lines here."""
    config = run.config
    steps_done = run.state.get("step", 0)  # above 0 in a resumed run
    run.log.display.total_steps = config.steps
    version = await sync(run)
    async with make_queue(run, run.state.get("cursor", 0), None, steps_done=steps_done) as rollouts:
        for step in range(steps_done + 1, config.steps + 1):
            with run.timer("generate"):
                batch = await rollouts.next_batch(version)
            values = batch.metrics()
            if batch.samples:
                loss = config.make_loss()  # by --loss and --correction
                samples = await with_columns_of_loss(run, batch.samples, loss, reference=None)
                async with run.training():
                    for chunk in chunks(samples, config.samples_per_forward_backward):
                        await run.trainer.forward_backward(chunk, loss=loss)
                    params = OptimParams(
                        learning_rate=config.learning_rate(step), grad_divisor=num_loss_tokens(samples)
                    )
                    result = await run.trainer.optim_step(params)
                async with rollouts.update():
                    version = await sync(run)
                values |= {
                    "learning_rate": params.learning_rate,
                    "grad_norm": result.grad_norm,
                    **run.trained_metrics(batch.samples),
                }
            is_last = step == config.steps
            if is_last or step % config.evaluate_every == 0:
                values |= await run.evaluate(step)
            lengths = torch.tensor([len(sample) for sample in batch.samples] or [0]).float()
            values["sample/longest"] = float(
                lengths.max()
            )  # a metric of one's own, with a chart of its own in the report
            await run.log_step(step, values, phase="mine", skipped=not batch.samples)
            run.log.rollouts(step, batch.to_record())
            await run.end_step({"step": step, **rollouts.state()}, phase_step=step, is_last=is_last)


CONFIGS: Configs = {"mine": mine}

if __name__ == "__main__":
    main(train, CONFIGS)
