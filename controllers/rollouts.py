"""Rollouts: problems -> completions -> rewards -> advantages -> samples. Only this module makes a Sample of a completion. Trains nothing.

G groups (problems), N completions of each.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Literal

import torch

from controllers.advantages import ADVANTAGES
from controllers.environments import Environment, Problem, Scorer
from controllers.run_folder import Record
from controllers.tokenizer import Tokenizer
from rl_actors import Completion, GeneratorClient, Sample, SamplingParams

SEEDS_PER_RUN = 1 << 20
"""Distance between the sampling seeds of two runs whose `seed` differs by 1."""


@dataclass(kw_only=True)
class RolloutConfig:
    groups_per_step: int = 64
    """Problems whose completions one step trains on."""
    group_size: int = 16
    """Completions of each problem."""
    temperature: float = 1.0
    """Sampling temperature. The trainer computes its logprobs at the same temperature."""
    top_p: float = 1.0
    """Share of the probability mass that is sampled from. Below 1 the trainer's logprobs cannot match the generator's."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"] = "grpo"
    """Rule that makes advantages of the rewards of a group."""
    max_refills: int = 1
    """Largest number of times in a step that further groups are generated because groups had equal rewards."""
    overlong_buffer: int = 0
    """Number of tokens before max_tokens over which a penalty on the reward grows from 0 to overlong_penalty (DAPO's soft overlong
    punishment, arXiv 2503.14476, eq. 13). 0: no penalty."""
    overlong_penalty: float = 1.0
    """Penalty on the reward of a completion of max_tokens tokens. It needs an overlong_buffer above 0."""

    def validate(self) -> None:
        limits = {"groups_per_step": 1, "group_size": 2, "max_refills": 0}
        for name, limit in limits.items():
            if getattr(self, name) < limit:
                raise ValueError(f"rollouts.{name}={getattr(self, name)}; it must be at least {limit}")
        if self.overlong_buffer < 0:
            raise ValueError(f"rollouts.overlong_buffer={self.overlong_buffer}; it must be at least 0")
        if not 0 <= self.overlong_penalty < math.inf:
            raise ValueError(f"rollouts.overlong_penalty={self.overlong_penalty}; it must be finite and at least 0")
        if not 0.01 <= self.temperature <= 2:
            raise ValueError(f"rollouts.temperature={self.temperature}; it must be in [0.01, 2]")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"rollouts.top_p={self.top_p}; it must be in (0, 1]")

    def overlong(self, num_tokens: int, max_tokens: int) -> float:
        """The penalty on the reward of a completion of num_tokens tokens.

        With overlong_buffer=4, overlong_penalty=1 and max_tokens=20 the penalty is 0 up to 16 tokens, 0.25 at 17 and 1 at 20.
        """
        excess = num_tokens - (max_tokens - self.overlong_buffer)
        return self.overlong_penalty * max(0, excess) / self.overlong_buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A problem, its prompt's tokens, and N completions with their texts and rewards."""

    problem: Problem
    prompt: list[int]
    completions: list[Completion]
    texts: list[str]
    task_rewards: list[float]
    rewards: list[float]  # task_rewards minus all penalties. Advantages are computed from these rewards.
    overlong_penalties: list[float] = field(default_factory=list)  # empty without overlong_buffer
    components: dict[str, list[float]] = field(default_factory=dict)  # components of the task_rewards, by name
    num_retries: int = 0  # times that a reward was asked for again
    # Divergence of each completion from the reference. Empty if the divergence is no penalty on the reward.
    divergences: list[float] = field(default_factory=list)

    def has_signal(self) -> bool:
        """True if the rewards differ. Equal rewards give zero advantages under every estimator."""
        return len(set(self.rewards)) > 1


Penalty = Callable[[Sequence[Group]], Awaitable[list[Group]]]
"""Function from groups to the same groups with reduced rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The samples that one step trains on, and all groups that were generated for the step."""

    samples: list[Sample]  # the completions of the groups that have a signal
    groups: list[Group]  # all groups, also those without a signal
    advantages: list[list[float]]  # one list for each group, one number for each completion
    num_refills: int

    @property
    def oldest_version(self) -> int:
        """The oldest policy_version that generated a token of the batch."""
        return min(min(c.policy_versions) for group in self.groups for c in group.completions)

    def metrics(self) -> dict[str, float]:
        rewards = [reward for group in self.groups for reward in group.task_rewards]
        completions = [completion for group in self.groups for completion in group.completions]
        lengths = [len(completion.tokens) for completion in completions]
        num_tokens = sum(lengths)
        values: dict[str, float] = {
            "reward/mean": fmean(rewards),
            "reward/std": pstdev(rewards),
            "groups/filtered": sum(not group.has_signal() for group in self.groups),
            "groups/refills": self.num_refills,
            "tokens/generated": num_tokens,
            "completion/length_mean": fmean(lengths),
            "completion/length_max": max(lengths),
            "completion/truncated": fmean(completion.finish_reason == "length" for completion in completions),
        }
        for source in sorted({group.problem.source for group in self.groups} - {""}):
            of_source = [group.task_rewards for group in self.groups if group.problem.source == source]
            values[f"reward/{source}/mean"] = fmean(reward for rewards in of_source for reward in rewards)
        for name in sorted({name for group in self.groups for name in group.components}):
            of_name = [group.components.get(name, []) for group in self.groups]
            values[f"reward/component/{name}"] = fmean(value for row in of_name for value in row)
        num_retries = sum(group.num_retries for group in self.groups)
        if num_retries:
            values["reward/retries"] = num_retries
        overlong = [penalty for group in self.groups for penalty in group.overlong_penalties]
        if overlong:
            values["reward/overlong_penalty"] = fmean(overlong)
        divergences = [divergence for group in self.groups for divergence in group.divergences]
        if divergences:
            penalised = [reward for group in self.groups for reward in group.rewards]
            values["kl/reference"] = sum(divergences) / num_tokens
            values["reward/kl_penalty"] = fmean(rewards) - fmean(penalised) - values.get("reward/overlong_penalty", 0.0)
        return values

    def shown(self) -> list[Record]:
        """The records of all groups for rollouts.jsonl."""
        shown: list[Record] = []
        for group, advantages in zip(self.groups, self.advantages, strict=True):
            shown.append(
                {
                    "prompt": group.problem.prompt,
                    "answer": group.problem.answer,
                    "completions": group.texts,
                    "rewards": group.task_rewards,
                    "advantages": advantages,
                    "lengths": [len(completion.tokens) for completion in group.completions],
                    "truncated": [completion.finish_reason == "length" for completion in group.completions],
                    "is_trained": group.has_signal(),
                }
            )
        return shown


class Rollouts:
    """Generates batches from the training problems in their order. `cursor` is the index of the next problem; a resumed run needs no other state."""

    def __init__(
        self,
        config: RolloutConfig,
        environment: Environment,
        tokenizer: Tokenizer,
        generator: GeneratorClient,
        *,
        max_tokens: int,
        seed: int,
        cursor: int = 0,
        penalty: Penalty | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        self.config, self.environment, self.tokenizer, self.generator = config, environment, tokenizer, generator
        self.max_tokens, self.seed, self.cursor, self.penalty = max_tokens, seed, cursor, penalty
        self.scorer = scorer or Scorer()

    async def next_batch(self) -> RolloutBatch:
        """Generate groups_per_step groups with a signal. The batch has fewer if max_refills refills did not find enough.

        If no group has a signal, the batch has no samples.
        """
        groups = await self._generate(self.config.groups_per_step)
        num_refills = 0
        while num_refills < self.config.max_refills:
            missing = self.config.groups_per_step - sum(group.has_signal() for group in groups)
            if missing == 0:
                break
            groups += await self._generate(missing)
            num_refills += 1
        return RolloutBatch(
            samples=to_samples(groups, self.config),
            groups=groups,
            advantages=group_advantages(groups, self.config),
            num_refills=num_refills,
        )

    async def _generate(self, num_groups: int) -> list[Group]:
        """Complete the next problems and score the completions."""
        problems = [self.environment.problem(self.cursor + i) for i in range(num_groups)]
        prompts = [self.tokenizer.encode_prompt(problem) for problem in problems]
        params = SamplingParams(
            n=self.config.group_size,
            max_tokens=self.max_tokens,
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            stop_token_ids=self.tokenizer.stop_token_ids,
            seed=(self.seed * SEEDS_PER_RUN + self.cursor * self.config.group_size) % 2**62,
        )
        self.cursor += num_groups
        answers = await self.generator.generate(prompts, params)
        texts = [[self.tokenizer.decode(completion.tokens) for completion in completions] for completions in answers]
        asked = [self.scorer.score(self.environment, *pair) for pair in zip(problems, texts, strict=True)]
        scored = await asyncio.gather(*asked)
        groups = []
        for problem, prompt, completions, decoded, found in zip(problems, prompts, answers, texts, scored, strict=True):
            task_rewards = found.totals
            rewards, overlong = task_rewards, []
            if self.config.overlong_buffer:
                overlong = [self.config.overlong(len(completion.tokens), self.max_tokens) for completion in completions]
                rewards = [reward - penalty for reward, penalty in zip(task_rewards, overlong, strict=True)]
            groups.append(
                Group(
                    problem=problem,
                    prompt=prompt,
                    completions=completions,
                    texts=decoded,
                    task_rewards=task_rewards,
                    rewards=rewards,
                    overlong_penalties=overlong,
                    components=found.components,
                    num_retries=found.num_retries,
                )
            )
        return groups if self.penalty is None else await self.penalty(groups)


def group_advantages(groups: Sequence[Group], config: RolloutConfig) -> list[list[float]]:
    """The advantages of the completions, one list for each group. They are computed by the rule config.advantage."""
    return ADVANTAGES[config.advantage](torch.tensor([group.rewards for group in groups])).tolist()


def to_samples(groups: Sequence[Group], config: RolloutConfig) -> list[Sample]:
    """The completions of the groups with a signal as samples with advantages."""
    samples = []
    for group, advantages in zip(groups, group_advantages(groups, config), strict=True):
        if not group.has_signal():
            continue
        for completion, advantage in zip(group.completions, advantages, strict=True):
            samples.append(to_sample(group.prompt, completion, advantage, config.temperature))
    return samples


def to_sample(prompt: Sequence[int], completion: Completion, advantage: float, temperature: float) -> Sample:
    return Sample.from_tokens(
        prompt,
        completion.tokens,
        temperature=temperature,
        old_logprobs=completion.logprobs,
        advantages=advantage,
    )
