"""Validation measures greedy accuracy and pass@k on sets of held-out problems. It also returns some of the greedy completions.

The accuracy is the mean reward of greedy completions. For pass@k a completion passes if its reward is at least `PassAtKConfig.threshold`.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean

from tyro.constructors import PrimitiveConstructorSpec

from controllers import config_file
from controllers.environments import (
    AnyEnvironment,
    EnvironmentConfig,
    EpisodeEnvironment,
    Problem,
    Scorer,
    build_environment,
)
from controllers.environments.config import LIMITS_OF_RUN
from controllers.environments.together import together
from controllers.observe.run_folder import Record
from controllers.rollouts.episodes import Player, Sampled, TurnSender
from controllers.rollouts.tokenizer import Tokenizer
from rl_actors import GeneratorClient, SamplingParams
from rl_actors.seeds import hashed_seed

SAMPLES_KEPT = 8
"""Largest number of problems of a set whose completions are written to validation.jsonl. They are the same problems at every validation."""

Sets = dict[str, EnvironmentConfig]

SETS_AS_JSON = PrimitiveConstructorSpec(
    nargs=1,
    metavar="JSON",
    instance_from_str=lambda args: config_file.from_json(Sets, args[0]),
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [json.dumps({name: asdict(config) for name, config in value.items()})],
)
"""The rule by which tyro, the command-line parser, reads and shows the named validation sets: as one JSON object."""


@dataclass(kw_only=True)
class PassAtKConfig:
    num_samples: int = 0
    """Number of completions of each held-out problem. pass@k is estimated from them. 0: pass@k is not measured."""
    k: tuple[int, ...] = (1, 4)
    """The values of k. Each k gives a metric eval/pass@k."""
    temperature: float = 1.0
    """Sampling temperature of the completions for pass@k."""
    threshold: float = 1.0
    """A completion passes if its reward is at least this number."""

    def validate(self) -> None:
        if self.num_samples < 0:
            raise ValueError(f"pass_at_k.num_samples={self.num_samples}; it must be at least 0")
        if not self.k or min(self.k) < 1:
            raise ValueError(f"pass_at_k.k={self.k}; give one or more integers, each at least 1")
        if self.num_samples and max(self.k) > self.num_samples:
            raise ValueError(
                f"pass_at_k.k={self.k} needs {max(self.k)} completions, but pass_at_k.num_samples={self.num_samples}"
            )
        if not 0.01 <= self.temperature <= 2:
            raise ValueError(f"pass_at_k.temperature={self.temperature}; it must be in [0.01, 2]")
        if not math.isfinite(self.threshold):
            raise ValueError(f"pass_at_k.threshold={self.threshold}; it must be finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """Held-out problems of an environment. The set of the run's own task has the name ""."""

    name: str
    environment: AnyEnvironment
    problems: list[Problem]

    def metric(self, name: str) -> str:
        """metric("reward") -> "eval/reward", or "eval/<name>/reward" """
        return f"eval/{self.name}/{name}" if self.name else f"eval/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Result of one validation."""

    metrics: dict[str, float]
    samples: list[Record]  # lines of validation.jsonl, without the step


def check_sets(sets: Mapping[str, EnvironmentConfig]) -> None:
    """Raises ValueError if a set's name cannot be part of a metric's name, or if the set's config is wrong. The error names the set."""
    for name, config in sets.items():
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(
                f"validation has a set named {name!r}; a name consists of letters, digits, '_', '-' and '.'"
            )
        try:
            _require_no_limits(config)
            config.validate()
        except ValueError as error:
            raise ValueError(f"validation.{name}: {error}") from None


def _require_no_limits(config: EnvironmentConfig) -> None:
    """Raises ValueError if a set changes a field of LIMITS_OF_RUN, because these fields apply to the whole run."""
    default = EnvironmentConfig()
    for name in LIMITS_OF_RUN:
        if getattr(config, name) != getattr(default, name):
            given = f"{name}={getattr(config, name)}"
            raise ValueError(
                f"{given}: a set cannot have its own {name}; use environment.{name}, which applies to all rewards of a run"
            )


def build_sets(environment: AnyEnvironment, sets: Mapping[str, EnvironmentConfig], *, seed: int) -> list[EvaluationSet]:
    """The validation set of the run's own environment, and then every named set. `seed` is added to the seeds of the named sets.

    Raises ValueError with the set's name if an environment cannot be built.
    """
    built = [EvaluationSet(name="", environment=environment, problems=environment.held_out())]
    for name, config in sets.items():
        try:
            other = build_environment(replace(config, seed=seed + config.seed), trains=False)
        except ValueError as error:
            raise ValueError(f"validation.{name}: {error}") from error
        built.append(EvaluationSet(name=name, environment=other, problems=other.held_out()))
    return built


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that at least one of k completions passes, estimated from num_samples completions of which num_passed passed.

    The estimate is unbiased: 1 - C(n - c, k) / C(n, k), where n = num_samples and c = num_passed (Chen et al., "Evaluating large language
    models trained on code", arXiv 2107.03374, eq. 1). pass_at_k(4, 1, 2) -> 0.5
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k}; it must be in [1, {num_samples}], because there are {num_samples} completions")
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Scores the generator's current weights on all sets."""

    sets: Sequence[EvaluationSet]
    generator: GeneratorClient
    tokenizer: Tokenizer
    max_tokens: int
    seed: int
    pass_at_k: PassAtKConfig
    player: Player  # for tasks that take several turns
    scorer: Scorer = field(default_factory=Scorer)

    async def __call__(self) -> Scores:
        """The scores on all sets. Raises RewardError if a reward is not a finite number or its last retry fails, and EpisodeError if an episode
        fails.
        """
        metrics: dict[str, float] = {}
        samples: list[Record] = []
        for one in self.sets:
            greedy = SamplingParams(
                max_tokens=self.max_tokens, temperature=0.0, stop_token_ids=self.tokenizer.stop_token_ids
            )
            texts, rewards = await self._answers(one, greedy)
            metrics[one.metric("reward")] = fmean(row[0] for row in rewards)
            passed = await self._passed(one) if self.pass_at_k.num_samples else []
            for k in self.pass_at_k.k if passed else ():
                metrics[one.metric(f"pass@{k}")] = fmean(pass_at_k(self.pass_at_k.num_samples, n, k) for n in passed)
            samples += self._shown(one, texts, rewards, passed)
        return Scores(metrics=metrics, samples=samples)

    async def _answers(self, one: EvaluationSet, params: SamplingParams) -> tuple[list[list[str]], list[list[float]]]:
        """(texts, rewards). Entry i of each list has the texts, or the rewards, of all completions of problem i."""
        environment = one.environment
        if isinstance(environment, EpisodeEnvironment):
            return await self._played(environment, one.problems, params)
        prompts = [self.tokenizer.encode_prompt(problem) for problem in one.problems]
        answers = await self.generator.generate(prompts, params)
        texts = [[self.tokenizer.decode(completion.tokens) for completion in completions] for completions in answers]
        asked = [self.scorer.score(environment, *pair) for pair in zip(one.problems, texts, strict=True)]
        return texts, [found.totals for found in await together(asked)]

    async def _played(
        self, environment: EpisodeEnvironment, problems: Sequence[Problem], params: SamplingParams
    ) -> tuple[list[list[str]], list[list[float]]]:
        """(texts, rewards) of params.n episodes of every problem. Entry i of each list has the texts, or the rewards, of problem i."""
        async with TurnSender(self.generator, replace(params, n=1)) as sender:
            games = []
            for place in range(len(problems) * params.n):
                policy = Sampled(sender=sender, first_number=place * self.player.limits.max_turns)
                games.append(self.player.play(environment, problems[place // params.n], policy))
            played = await together(games)
        by_problem = [played[start : start + params.n] for start in range(0, len(played), params.n)]
        texts = [[episode.text for episode in episodes] for episodes in by_problem]
        return texts, [[episode.reward for episode in episodes] for episodes in by_problem]

    async def _passed(self, one: EvaluationSet) -> list[int]:
        """For each problem, the number of completions that pass. Each problem has pass_at_k.num_samples completions."""
        params = SamplingParams(
            n=self.pass_at_k.num_samples,
            max_tokens=self.max_tokens,
            temperature=self.pass_at_k.temperature,
            stop_token_ids=self.tokenizer.stop_token_ids,
            seed=hashed_seed(self.seed, "validation", one.name),  # the same at every validation
        )
        _, rewards = await self._answers(one, params)
        return [sum(reward >= self.pass_at_k.threshold for reward in row) for row in rewards]

    def _shown(
        self, one: EvaluationSet, texts: list[list[str]], rewards: list[list[float]], passed: list[int]
    ) -> list[Record]:
        """Lines of validation.jsonl for evenly spaced problems of the set, with their greedy completions."""
        stride = max(1, len(one.problems) // SAMPLES_KEPT)
        shown: list[Record] = []
        for index in range(0, len(one.problems), stride)[:SAMPLES_KEPT]:
            problem = one.problems[index]
            shown_prompt = problem.prompt
            if not isinstance(one.environment, EpisodeEnvironment):
                shown_prompt = self.tokenizer.decode_prompt(self.tokenizer.encode_prompt(problem))
            line: Record = {"set": one.name, "prompt": shown_prompt, "answer": problem.answer}
            line |= {"completion": texts[index][0], "reward": rewards[index][0]}
            if passed:
                line |= {"passed": passed[index], "samples": self.pass_at_k.num_samples}
            shown.append(line)
        return shown
