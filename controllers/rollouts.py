"""Problems -> completions -> rewards -> advantages -> samples. The only place where a rollout becomes a Sample. Trains nothing.

G groups (problems), N completions of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, Literal

import torch

from controllers.advantages import ADVANTAGES
from controllers.environments import Environment, Problem
from controllers.tokenizer import encode
from rl_actors import Completion, GeneratorClient, Sample, SamplingParams

SEEDS_PER_CALL = 1 << 20


@dataclass(kw_only=True)
class RolloutConfig:
    groups_per_step: int = 64
    """Problems whose completions one step trains on."""
    group_size: int = 16
    """Completions of each problem."""
    temperature: float = 1.0
    """Of sampling; the trainer's logprobs are taken at the same temperature."""
    top_p: float = 1.0
    """Share of the probability mass that is sampled from; below 1 the trainer's logprobs cannot match the generator's."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"] = "grpo"
    """How rewards of a group become advantages."""
    max_refills: int = 1
    """Times that groups whose rewards are all equal are replaced by new ones in a step."""

    def validate(self) -> None:
        limits = {"groups_per_step": 1, "group_size": 2, "max_refills": 0}
        for name, limit in limits.items():
            if getattr(self, name) < limit:
                raise ValueError(f"rollouts.{name}={getattr(self, name)}; it must be at least {limit}")
        if not 0.01 <= self.temperature <= 2:
            raise ValueError(f"rollouts.temperature={self.temperature}; it must be in [0.01, 2]")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"rollouts.top_p={self.top_p}; it must be in (0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A problem, its prompt's tokens, and N completions with their texts and rewards."""

    problem: Problem
    prompt: list[int]
    completions: list[Completion]
    texts: list[str]
    rewards: list[float]

    def has_signal(self) -> bool:
        """Equal rewards have zero advantages under every estimator."""
        return len(set(self.rewards)) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """What one step trains on, and what was generated on the way."""

    samples: list[Sample]  # of the groups with a signal
    groups: list[Group]  # all
    num_refills: int

    @property
    def oldest_version(self) -> int:
        """The oldest policy_version that generated a token."""
        return min(min(c.policy_versions) for group in self.groups for c in group.completions)

    def metrics(self) -> dict[str, Any]:
        rewards = [reward for group in self.groups for reward in group.rewards]
        return {
            "reward/mean": fmean(rewards),
            "reward/std": pstdev(rewards),
            "groups/filtered": sum(not group.has_signal() for group in self.groups),
            "groups/refills": self.num_refills,
            "tokens/generated": sum(len(c.tokens) for group in self.groups for c in group.completions),
        }

    def shown(self) -> list[dict[str, Any]]:
        """The first completion of every group, for rollouts.jsonl."""
        return [
            {"prompt": g.problem.prompt, "answer": g.problem.answer, "completion": g.texts[0], "reward": g.rewards[0]}
            for g in self.groups
        ]


class Rollouts:
    """Draws training problems in order; `cursor` is the next one, and all that a resumed run needs."""

    def __init__(
        self,
        config: RolloutConfig,
        environment: Environment,
        tokenizer: Any,
        generator: GeneratorClient,
        *,
        max_tokens: int,
        seed: int,
        cursor: int = 0,
    ) -> None:
        self.config, self.environment, self.tokenizer, self.generator = config, environment, tokenizer, generator
        self.max_tokens, self.seed, self.cursor = max_tokens, seed, cursor

    async def next_batch(self) -> RolloutBatch:
        """groups_per_step groups with a signal, or fewer when max_refills did not find more; none leaves samples empty."""
        groups = await self._generate(self.config.groups_per_step)
        num_refills = 0
        while num_refills < self.config.max_refills:
            missing = self.config.groups_per_step - sum(group.has_signal() for group in groups)
            if missing == 0:
                break
            groups += await self._generate(missing)
            num_refills += 1
        return RolloutBatch(samples=self._samples(groups), groups=groups, num_refills=num_refills)

    async def _generate(self, num_groups: int) -> list[Group]:
        """The next problems, completed and scored."""
        problems = [self.environment.problem(self.cursor + i) for i in range(num_groups)]
        prompts = [encode(self.tokenizer, problem.prompt) for problem in problems]
        params = SamplingParams(
            n=self.config.group_size,
            max_tokens=self.max_tokens,
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            stop_token_ids=(self.tokenizer.eos_token_id,),
            seed=(self.seed * SEEDS_PER_CALL + self.cursor * self.config.group_size) % 2**62,
        )
        self.cursor += num_groups
        groups = []
        for problem, prompt, completions in zip(
            problems, prompts, await self.generator.generate(prompts, params), strict=True
        ):
            texts = [decode(self.tokenizer, completion.tokens) for completion in completions]
            rewards = [float(self.environment.reward(problem, text)) for text in texts]
            groups.append(Group(problem=problem, prompt=prompt, completions=completions, texts=texts, rewards=rewards))
        return groups

    def _samples(self, groups: Sequence[Group]) -> list[Sample]:
        advantages_GN = ADVANTAGES[self.config.advantage](torch.tensor([group.rewards for group in groups]))
        return [
            to_sample(group.prompt, completion, advantage, self.config.temperature)
            for group, row in zip(groups, advantages_GN.tolist(), strict=True)
            if group.has_signal()
            for completion, advantage in zip(group.completions, row, strict=True)
        ]


def to_sample(prompt: Sequence[int], completion: Completion, advantage: float, temperature: float) -> Sample:
    return Sample.from_tokens(
        prompt,
        completion.tokens,
        temperature=temperature,
        old_logprobs=completion.logprobs,
        advantages=advantage,
    )


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=True)


async def greedy_accuracy(
    generator: GeneratorClient, environment: Environment, tokenizer: Any, problems: Sequence[Problem], max_tokens: int
) -> float:
    """The mean reward of greedy completions."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=(tokenizer.eos_token_id,))
    groups = await generator.generate([encode(tokenizer, problem.prompt) for problem in problems], params)
    texts = [decode(tokenizer, completions[0].tokens) for completions in groups]
    return fmean(environment.reward(problem, text) for problem, text in zip(problems, texts, strict=True))
