"""Problems -> completions -> rewards -> advantages -> samples. The only place where a rollout becomes a Sample. Trains nothing.

G groups (problems), N completions of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any, Literal

import torch

from controllers import advantages
from controllers.environments import Environment, Problem
from controllers.tokenizer import encode
from rl_actors import Completion, Sample, SamplingParams
from rl_actors.clients import GeneratorClient

ADVANTAGES = {
    "grpo": advantages.grpo,
    "dr_grpo": advantages.dr_grpo,
    "rloo": advantages.rloo,
    "reinforce_plus_plus": advantages.reinforce_plus_plus,
}
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
        if not self.temperature > 0:
            raise ValueError(
                f"rollouts.temperature={self.temperature}; it must be positive: greedy groups have no signal"
            )


@dataclass(slots=True, kw_only=True)
class Batch:
    """What one step trains on, and what was generated on the way."""

    samples: list[Sample] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # of every completion, filtered groups included
    num_groups_filtered: int = 0
    num_refills: int = 0
    tokens_generated: int = 0
    oldest_version: int | None = None  # the oldest policy_version that generated a token
    shown: list[dict[str, Any]] = field(default_factory=list)  # for rollouts.jsonl

    def metrics(self) -> dict[str, Any]:
        return {
            "reward/mean": fmean(self.rewards),
            "reward/std": pstdev(self.rewards),
            "groups/filtered": self.num_groups_filtered,
            "groups/refills": self.num_refills,
            "tokens/generated": self.tokens_generated,
        }


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

    async def next_batch(self) -> Batch:
        """groups_per_step groups with a signal, or fewer when max_refills did not find more; none leaves samples empty."""
        batch, wanted = Batch(), self.config.groups_per_step
        while True:
            problems = [self.environment.problem(self.cursor + i) for i in range(wanted)]
            params = SamplingParams(
                n=self.config.group_size,
                max_tokens=self.max_tokens,
                temperature=self.config.temperature,
                top_p=self.config.top_p,
                stop_token_ids=(self.tokenizer.eos_token_id,),
                seed=(self.seed * SEEDS_PER_CALL + self.cursor * self.config.group_size) % 2**62,
            )
            self.cursor += wanted
            prompts = [encode(self.tokenizer, problem.prompt) for problem in problems]
            wanted = self._add(batch, problems, prompts, await self.generator.generate(prompts, params))
            if wanted == 0 or batch.num_refills == self.config.max_refills:
                return batch
            batch.num_refills += 1

    def _add(
        self, batch: Batch, problems: list[Problem], prompts: list[list[int]], groups: list[list[Completion]]
    ) -> int:
        """Score groups and keep those with a signal; returns how many had none."""
        texts = [[decode(self.tokenizer, completion.tokens) for completion in group] for group in groups]
        rewards_GN = torch.tensor(
            [
                [self.environment.reward(problem, text) for text in group]
                for problem, group in zip(problems, texts, strict=True)
            ]
        )
        advantages_GN = ADVANTAGES[self.config.advantage](rewards_GN)
        kept_G = advantages.has_signal(rewards_GN).tolist()
        for g, group in enumerate(groups):
            batch.rewards += rewards_GN[g].tolist()
            batch.tokens_generated += sum(len(completion.tokens) for completion in group)
            shown = {"prompt": problems[g].prompt, "answer": problems[g].answer}
            batch.shown.append({**shown, "completion": texts[g][0], "reward": float(rewards_GN[g, 0])})
            if kept_G[g]:
                for completion, advantage in zip(group, advantages_GN[g].tolist(), strict=True):
                    batch.samples.append(to_sample(prompts[g], completion, advantage, self.config.temperature))
                    versions = [*completion.policy_versions, batch.oldest_version]
                    batch.oldest_version = min(version for version in versions if version is not None)
        filtered = len(groups) - sum(kept_G)
        batch.num_groups_filtered += filtered
        return filtered


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
