"""Stand-ins for tests, each named for what it is."""

from typing import Any

from controllers.environments import Problem


class ConstantReward:
    """Additions whose reward does not depend on the completion."""

    def __init__(self, reward: float, num_held_out: int):
        self.value, self.num_held_out = reward, num_held_out

    def problem(self, index: int) -> Problem:
        a, b = index % 50, index // 50 % 50
        return Problem(prompt=f"{a}+{b}=", answer=str(a + b), key=f"{a} {b}")

    def held_out(self) -> list[Problem]:
        return [Problem(prompt=f"{a}+99=", answer=str(a + 99), key=f"{a} 99") for a in range(self.num_held_out)]

    def reward(self, problem: Problem, completion: str) -> float:
        return self.value


class ParityReward(ConstantReward):
    """Additions whose reward is 1 for half of all completions: the parity of the sum of their characters."""

    def reward(self, problem: Problem, completion: str) -> float:
        return float(sum(map(ord, completion)) % 2)


def parity_reward(*, seed: int, num_held_out: int) -> ParityReward:
    return ParityReward(0.0, min(num_held_out, 50))


def constant_reward(*, seed: int, num_held_out: int, reward: float) -> ConstantReward:
    return ConstantReward(reward, min(num_held_out, 50))


class ReplayingGenerator:
    """A generator that answers as another did, call by call, whatever the weights; `recording` holds what is left to answer."""

    recording: list[Any]

    @classmethod
    def spawn(cls, config, **_):
        return cls()

    async def ready(self) -> None: ...

    async def close(self) -> None: ...

    async def pull_model_state_dict(self, version):
        return version

    async def generate(self, prompts, params):
        return self.recording.pop(0)
