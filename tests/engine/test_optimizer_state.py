"""Tests that a checkpoint restores the whole state of a user's own optimizer, including values that are not tensors."""

import torch
from references import ppo_samples

from rl_actors.config import OptimizerConfig
from rl_actors.losses import PPO
from rl_actors.types import OptimParams

STEP = OptimParams(learning_rate=1e-2, grad_divisor=10.0)


class SlowingDown(torch.optim.Optimizer):
    """An optimizer that divides the learning rate by the number of its steps. Its state holds this number as a Python int."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["num_steps"] = state.get("num_steps", 0) + 1
                parameter.add_(parameter.grad, alpha=-group["lr"] / state["num_steps"])


def losses(engine, num_steps: int) -> list[float]:
    found = []
    for seed in range(num_steps):
        found.append(engine.forward_backward(ppo_samples([31, 7], seed=seed), PPO()).metrics["loss:sum"])
        engine.optim_step(STEP)
    return found


def test_a_new_trainer_restores_python_numbers_in_the_optimizers_state(make_engine, tmp_path):
    optimizer = OptimizerConfig(name=f"{__name__}:SlowingDown")
    engine = make_engine(optimizer=optimizer)
    losses(engine, 3)
    engine.save_checkpoint(str(tmp_path / "checkpoint")).result()
    other = make_engine(optimizer=optimizer)
    other.load_checkpoint(str(tmp_path / "checkpoint"))
    assert losses(other, 3) == losses(engine, 3)
