"""Evaluation of held-out problems: mean greedy reward, and pass@k."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean

from controllers import config_file
from controllers.environments import (
    AnyEnvironment,
    EnvironmentConfig,
    EpisodeEnvironment,
    Problem,
    Scorer,
    build_environment,
)
from controllers.environments.config import LIMITS_OF_RUN, json_field
from controllers.environments.scorer import together
from controllers.observe.run_folder import Record
from controllers.rollouts.episodes import EpisodeLimits, Player, TurnSender
from controllers.rollouts.tokenizer import Tokenizer
from rl_actors import GeneratorClient, SamplingParams
from rl_actors.field_types import NaturalInt, Temperature
from rl_actors.seeds import hashed_seed

SAMPLES_KEPT = 8  # problems of a set whose completions evaluation.jsonl has, the same every time
Sets = dict[str, EnvironmentConfig]

SETS_AS_JSON = json_field(
    dict,
    load=partial(config_file.from_json, Sets),
    dump=lambda sets: json.dumps({name: asdict(config) for name, config in sets.items()}),
)


@dataclass(kw_only=True)
class PassAtKConfig:
    num_samples: NaturalInt = 0
    """Completions of each held-out problem, for pass@k. 0: no pass@k."""
    k: tuple[int, ...] = (1, 4)
    """Each k gives a metric eval/pass@k."""
    temperature: Temperature = 1.0
    """Sampling temperature for pass@k."""
    threshold: float = 1.0
    """A completion passes with at least this reward."""

    def validate(self) -> None:
        if not self.k or min(self.k) < 1:
            raise ValueError(f"pass_at_k.k={self.k}; give one or more integers, each at least 1")
        if self.num_samples and max(self.k) > self.num_samples:
            raise ValueError(
                f"pass_at_k.k={self.k} needs {max(self.k)} completions, but pass_at_k.num_samples={self.num_samples}"
            )
        if not math.isfinite(self.threshold):
            raise ValueError(f"pass_at_k.threshold={self.threshold}; it must be finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """Held-out problems of an environment; "" names the run's own."""

    name: str
    environment: AnyEnvironment
    problems: list[Problem]

    def metric(self, name: str) -> str:
        return f"eval/{self.name}/{name}" if self.name else f"eval/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    metrics: dict[str, float]
    samples: list[Record]  # of evaluation.jsonl, without the step


def check_sets(sets: Mapping[str, EnvironmentConfig]) -> None:
    """Raises ValueError, naming the set, for a wrong config or a name that no metric can have."""
    default = EnvironmentConfig()
    for name, config in sets.items():
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(
                f"evaluation has a set named {name!r}; a name consists of letters, digits, '_', '-' and '.'"
            )
        own = [limit for limit in LIMITS_OF_RUN if getattr(config, limit) != getattr(default, limit)]
        try:
            if own:
                raise ValueError(
                    f"{own[0]}={getattr(config, own[0])}: a set cannot have its own {own[0]}; use environment.{own[0]}, "
                    "which applies to all rewards of a run"
                )
            config.validate()
        except ValueError as error:
            raise ValueError(f"evaluation.{name}: {error}") from None


def build_sets(environment: AnyEnvironment, sets: Mapping[str, EnvironmentConfig], *, seed: int) -> list[EvaluationSet]:
    """The run's own set, then the named ones, seeds plus `seed`. Raises ValueError, naming it."""
    built = [EvaluationSet(name="", environment=environment, problems=environment.held_out())]
    for name, config in sets.items():
        try:
            other = build_environment(replace(config, seed=seed + config.seed), trains=False)
        except ValueError as error:
            raise ValueError(f"evaluation.{name}: {error}") from error
        built.append(EvaluationSet(name=name, environment=other, problems=other.held_out()))
    return built


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """P(any of k completions passes), unbiased: 1 - C(n - c, k) / C(n, k), where c of n passed (Chen et
    al., arXiv 2107.03374, eq. 1). pass_at_k(4, 1, 2) -> 0.5"""
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k}; it must be in [1, {num_samples}], because there are {num_samples} completions")
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Scores the generator's current weights on all sets."""

    sets: Sequence[EvaluationSet]
    generator: GeneratorClient
    tokenizer: Tokenizer
    limits: EpisodeLimits
    seed: int
    pass_at_k: PassAtKConfig
    scorer: Scorer = field(default_factory=Scorer)

    async def __call__(self) -> Scores:
        """Raises RewardError for a reward that is not finite or failed; EpisodeError."""
        metrics: dict[str, float] = {}
        samples: list[Record] = []
        for one in self.sets:
            texts, rewards = await self._answers(one, num_samples=1, temperature=0.0)
            metrics[one.metric("reward")] = fmean(row[0] for row in rewards)
            passed: list[int] = []  # by problem, the number of completions
            if num_samples := self.pass_at_k.num_samples:
                _, sampled = await self._answers(one, num_samples, self.pass_at_k.temperature)
                passed = [sum(reward >= self.pass_at_k.threshold for reward in row) for row in sampled]
                for k in self.pass_at_k.k:
                    metrics[one.metric(f"pass@{k}")] = fmean(pass_at_k(num_samples, number, k) for number in passed)
            samples += self._shown(one, texts, rewards, passed)
        return Scores(metrics=metrics, samples=samples)

    async def _answers(
        self, one: EvaluationSet, num_samples: int, temperature: float
    ) -> tuple[list[list[str]], list[list[float]]]:
        """(texts, rewards), by problem and completion."""
        params = SamplingParams(
            n=num_samples,
            max_tokens=self.limits.max_tokens_per_turn,
            temperature=temperature,
            stop_token_ids=self.tokenizer.stop_token_ids,
            # the same at every evaluation
            seed=hashed_seed(self.seed, "validation", one.name) if temperature else None,
        )
        environment = one.environment
        if isinstance(environment, EpisodeEnvironment):
            player = Player(tokenizer=self.tokenizer, limits=self.limits, scorer=self.scorer)
            repeated = [problem for problem in one.problems for _ in range(num_samples)]
            async with TurnSender(self.generator, replace(params, n=1)) as sender:
                played = await player.play_all(environment, repeated, sender, first_number=0)
            by_problem = [played[start : start + num_samples] for start in range(0, len(played), num_samples)]
            texts = [[episode.text for episode in episodes] for episodes in by_problem]
            return texts, [[episode.reward for episode in episodes] for episodes in by_problem]
        prompts = [self.tokenizer.encode_prompt(problem) for problem in one.problems]
        answers = await self.generator.generate(prompts, params)
        texts = [[self.tokenizer.decode(completion.tokens) for completion in completions] for completions in answers]
        asked = [self.scorer.score(environment, *pair) for pair in zip(one.problems, texts, strict=True)]
        return texts, [scored.totals for scored in await together(asked)]

    def _shown(
        self, one: EvaluationSet, texts: list[list[str]], rewards: list[list[float]], passed: list[int]
    ) -> list[Record]:
        """Lines of evaluation.jsonl for evenly spaced problems, with their greedy completions."""
        stride = max(1, len(one.problems) // SAMPLES_KEPT)
        shown: list[Record] = []
        for index in range(0, len(one.problems), stride)[:SAMPLES_KEPT]:
            prompt = one.problems[index].prompt
            if not isinstance(one.environment, EpisodeEnvironment):
                prompt = self.tokenizer.decode_prompt(self.tokenizer.encode_prompt(one.problems[index]))
            line: Record = {"set": one.name, "prompt": prompt, "answer": one.problems[index].answer}
            line |= {"completion": texts[index][0], "reward": rewards[index][0]}
            if passed:
                line |= {"passed": passed[index], "samples": self.pass_at_k.num_samples}
            shown.append(line)
        return shown
