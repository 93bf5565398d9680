"""Fakes for tests: environments, generators and trainers without a model."""

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from controllers.environments import Message, Problem
from rl_actors import (
    Completion,
    ForwardBackwardOutput,
    OptimParams,
    OptimResult,
    Sample,
    SamplingParams,
    TrainerInfo,
    metrics,
)
from rl_actors.metrics import to_numbers


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


class Conversations(ConstantReward):
    """Conversations of two turns, which are all the same."""

    def __init__(self, num_held_out: int):
        super().__init__(0.0, num_held_out)

    def problem(self, index: int) -> Problem:
        return self._about(index % 6)

    def held_out(self) -> list[Problem]:
        return [self._about(6 + index) for index in range(self.num_held_out)]

    def reward(self, problem: Problem, completion: str) -> float:
        return float(completion == problem.answer)

    def _about(self, number: int) -> Problem:
        messages = [
            Message(role="user", content="say it"),
            Message(role="assistant", content="it"),
            Message(role="user", content="once more"),
        ]
        return Problem(prompt=str(number), answer="it!", key=str(number), messages=messages)


def conversations(*, seed: int, num_held_out: int) -> Conversations:
    return Conversations(min(num_held_out, 3))


def parity_reward(*, seed: int, num_held_out: int) -> ParityReward:
    return ParityReward(0.0, min(num_held_out, 50))


def constant_reward(*, seed: int, num_held_out: int, reward: float) -> ConstantReward:
    return ConstantReward(reward, min(num_held_out, 50))


def trainer_info(**values: object) -> TrainerInfo:
    """One rank on a CPU, with a peak of 1 GiB; `values` replace its fields."""
    fields = {
        "policy_version": 0,
        "steps_skipped": 0,
        "state": "idle",
        "num_parameters": 1,
        "vocab_size": 16,
        "max_sequence_length": 64,
        "tokens_per_row": 64,
        "max_call_bytes": 1 << 20,
        "layout": {},
        "device": "cpu",
        "device_name": "CPU",
        "dtype": "float32",
        "head": "logprobs",
        "rank": 0,
        "world_size": 1,
        "pid": 0,
        "optimizer": "AdamW",
        "optimizer_fields": (),
        "memory_bytes": 1 << 29,
        "peak_memory_bytes": 1 << 30,
        "logs": "",
    }
    return TrainerInfo(**(fields | values))


class AnswersEach:
    """generate_each of a fake that has generate: all prompts finish at the same time."""

    async def generate_each(
        self, prompts: list[list[int]], params: SamplingParams
    ) -> AsyncIterator[tuple[int, list[Completion]]]:
        for pair in enumerate(await self.generate(prompts, params)):
            yield pair


class ReplayingGenerator(AnswersEach):
    """A generator that repeats the answers of another one, call by call, whatever the weights. `recording` holds the answers that are left."""

    recording: list[Any]
    last_pull = None  # it moves no bytes

    @classmethod
    def spawn(cls, config, **_):
        return cls()

    async def ready(self) -> None: ...

    async def close(self) -> None: ...

    async def pull_model_state_dict(self, version):
        return version

    async def generate(self, prompts, params):
        return self.recording.pop(0)


class ActorOfNothing:
    """The calls that start and end an actor, for fakes without a process."""

    @classmethod
    def spawn(cls, config, **_):
        return cls()

    async def ready(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step that a trainer was asked for, with the samples of the forward_backward calls before it."""

    params: OptimParams
    samples: list[Sample]


class NearTrainer(ActorOfNothing):
    """A trainer without a model. Its logprobs are the generator's, or -1, plus `difference`, and it computes real losses from them."""

    difference = 0.25

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.samples: list[Sample] = []  # since the last step

    async def forward_backward(self, samples: Sequence[Sample], loss) -> ForwardBackwardOutput:
        self.samples += samples
        rows, partials = [], []
        for sample in samples:
            columns = {name: column[None] for name, column in sample.columns.items()}
            sampled = columns.get("old_logprobs", torch.full((1, len(sample)), -1.0))
            rows.append(sampled[0] + self.difference)
            total, values = loss(sampled + self.difference, **columns)
            partials.append({"loss:sum": total, **values})
        merged = to_numbers(metrics.merge(partials))
        return ForwardBackwardOutput(
            logprobs=rows, metrics=metrics.finish(merged), policy_version=len(self.steps), partials=merged
        )

    async def optim_step(self, params: OptimParams) -> OptimResult:
        self.steps.append(Step(params=params, samples=self.samples))
        self.samples = []
        return OptimResult(policy_version=len(self.steps), grad_norm=1.0)

    async def push_model_state_dict(self) -> int:
        return len(self.steps)

    async def info(self) -> list[TrainerInfo]:
        return [trainer_info(policy_version=len(self.steps))]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A call of `generate` and its answer."""

    prompts: list[list[int]]
    params: SamplingParams
    answer: list[list[Completion]]


class RandomGenerator(AnswersEach, ActorOfNothing):
    """A generator without a model. It draws tokens 2 to 11; they depend on the seed of the call, the prompt and the completion."""

    last_pull = None  # it moves no bytes

    def __init__(self) -> None:
        self.version = -1
        self.generations: list[Generation] = []

    async def pull_model_state_dict(self, version: int) -> int:
        self.version = version
        return version

    async def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[list[Completion]]:
        answer = []
        for prompt in prompts:
            group = [self._completion(random.Random(f"{params.seed}/{prompt}/{i}"), params) for i in range(params.n)]
            answer.append(group)
        self.generations.append(Generation(prompts=prompts, params=params, answer=answer))
        return answer

    def _completion(self, draw: random.Random, params: SamplingParams) -> Completion:
        tokens = [draw.randint(2, 11) for _ in range(draw.randint(1, params.max_tokens))]
        logprobs = [-4 * draw.random() for _ in tokens]
        versions = [self.version] * len(tokens)
        return Completion(tokens=tokens, logprobs=logprobs, policy_versions=versions, finish_reason="stop")
