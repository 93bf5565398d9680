"""Groups of completions or episodes of one problem, their advantages, and the samples to train on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, pstdev

import torch
from torch import Tensor

from controllers.environments import AnyEnvironment, Environment, EpisodeEnvironment, Problem, Rewards, Scorer, own_code
from controllers.environments.base import are_equal
from controllers.environments.scorer import together
from controllers.observe.run_folder import Record
from controllers.observe.timeline import Timeline
from controllers.rollouts.advantages import ADVANTAGES
from controllers.rollouts.episodes import EpisodeLimits, PlayedEpisode, Player, TurnSender
from controllers.rollouts.tokenizer import Tokenizer
from rl_actors import Completion, GeneratorClient, Sample, SamplingParams
from rl_actors.field_types import CountingInt, NaturalInt, NonNegativeFloat, PositiveShare, Temperature
from rl_actors.seeds import hashed_seed

Take = Callable[[int, int], tuple[list[int], int]]
"""(cursor, count) -> indices of the next `count` training problems, and the next cursor."""


def consecutive(cursor: int, count: int) -> tuple[list[int], int]:
    """A Take that skips no problem."""
    return list(range(cursor, cursor + count)), cursor + count


@dataclass(kw_only=True)
class RolloutConfig:
    groups_per_step: CountingInt = 64
    """Groups that a step trains on; fewer if filtered groups remain after the last refill."""
    group_size: CountingInt = 16
    """Completions of each problem."""
    temperature: Temperature = 1.0
    """Sampling temperature, also of the trainer's logprobs."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling. Below 1 the trainer's logprobs, over all tokens, differ from the generator's."""
    advantage: str = "grpo"
    """grpo, dr_grpo, rloo, reinforce_plus_plus, gae, or module:function from rewards [G, N] to
    advantages [G, N]. gae is for PPO alone: it trains on every group, and takes groups of one."""
    dynamic_sampling_rounds: NaturalInt = 1
    """Refills of filtered groups by new problems (DAPO's dynamic sampling), for each set of
    problems that are started together: with max_staleness=0 a step."""
    max_staleness: NaturalInt = 0
    """Largest staleness of a trained group: the trainer's version minus that of the oldest token.
    The generator runs ahead so far. 0: generation, training and weight sync take turns."""
    in_flight_updates: bool = True
    """Weight syncs do not stop running requests, and each token is recorded with its version.
    False: a sync waits until no request runs."""
    max_retries: NaturalInt = 2
    """Retries of a problem's completions after a generator failure, before the run ends."""
    overlong_buffer: NaturalInt = 0
    """The penalty grows over this many tokens before max_tokens, or all of an episode before
    episodes.max_tokens (DAPO's soft overlong punishment, arXiv 2503.14476, eq. 13). 0: none."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Penalty on the reward of a completion of full length."""

    def rule(self) -> Callable[[Tensor], Tensor]:
        """Rewards [G, N] -> advantages [G, N]. Raises ValueError for an unknown name."""
        if self.advantage in ADVANTAGES:
            return ADVANTAGES[self.advantage]
        if ":" not in self.advantage:
            names = ", ".join([*ADVANTAGES, "gae"])
            raise ValueError(f"rollouts.advantage={self.advantage!r}; it must be one of {names}, or module:function")
        return own_code.imported("rollouts.advantage", self.advantage)

    def validate(self) -> None:
        if self.advantage != "gae":
            self.rule()
            if self.group_size < 2:
                raise ValueError(f"rollouts.group_size={self.group_size}; it must be at least 2")

    def overlong(self, num_tokens: int, max_tokens: int) -> float:
        """overlong_buffer=4, penalty 1, max_tokens=20 -> 0.0 at 16 tokens, 0.25 at 17, 1.0 at 20"""
        excess = num_tokens - (max_tokens - self.overlong_buffer)
        return self.overlong_penalty * max(0, excess) / self.overlong_buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A problem and its N completions, with texts and rewards."""

    problem: Problem
    prompt: list[int]
    completions: list[Completion]
    texts: list[str]
    task_rewards: list[float]
    rewards: list[float]  # task_rewards minus all penalties
    overlong_penalties: list[float] = field(default_factory=list)  # empty without overlong_buffer
    # of task_rewards, by name; None where a reward lacks one
    components: dict[str, list[float | None]] = field(default_factory=dict)
    prompt_text: str = ""  # decoded `prompt`
    num_retries: int = 0  # of a reward function or an episode
    drop_if_equal: bool = True  # False: trained on even if all rewards are equal
    # KL from the reference by completion, summed over its tokens; empty without a KL penalty
    divergences: list[float] = field(default_factory=list)
    # of each completion, whose tokens include the replies between turns; empty without episodes
    episodes: list[PlayedEpisode] = field(default_factory=list)

    @property
    def is_action(self) -> list[list[bool]]:
        """By completion and token: sampled by the policy."""
        if self.episodes:
            return [episode.is_action for episode in self.episodes]
        return [[True] * len(completion.tokens) for completion in self.completions]

    @property
    def lengths(self) -> list[int]:
        """By completion: number of sampled tokens."""
        return [sum(row) for row in self.is_action]

    @property
    def truncated(self) -> list[bool]:
        """By completion: ended by a limit of tokens or turns."""
        return [completion.finish_reason == "length" for completion in self.completions]

    @property
    def rewards_per_token(self) -> list[list[float]]:
        """By completion and token: `rewards` at the last token of each turn, penalties at the last."""
        rows = []
        for place, completion in enumerate(self.completions):
            row = [0.0] * len(completion.tokens)
            rest = self.rewards[place]
            if self.episodes:
                row = list(self.episodes[place].rewards_per_token)
                rest -= self.task_rewards[place]
            row[-1] += rest
            rows.append(row)
        return rows

    def to_samples(self, advantages: Sequence[float], temperature: float) -> list[Sample]:
        if self.episodes:
            pairs = zip(self.episodes, advantages, strict=True)
            return [episode.to_sample(advantage=advantage, temperature=temperature) for episode, advantage in pairs]
        sample = partial(Sample.from_tokens, self.prompt, temperature=temperature)
        return [
            sample(completion.tokens, old_logprobs=completion.logprobs, advantages=advantage)
            for completion, advantage in zip(self.completions, advantages, strict=True)
        ]

    @property
    def oldest_version(self) -> int:
        return min(min(completion.policy_versions) for completion in self.completions)

    def is_trainable(self) -> bool:
        """False for a filtered group: equal rewards, by a rule of ADVANTAGES without a signal."""
        return not self.drop_if_equal or not are_equal(self.rewards)


Penalty = Callable[[Sequence[Group]], Awaitable[list[Group]]]
"""Subtracts a penalty from each reward of the groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The samples of one step, and all groups that were generated for it."""

    samples: list[Sample]  # of trainable groups
    groups: list[Group]  # filtered ones, too
    advantages: list[list[float]]  # by group and completion
    num_refills: int  # one may replace several groups
    num_retries: int  # of groups, at the generator
    version: int  # policy_version at the beginning of the step

    @classmethod
    def of(
        cls, groups: Sequence[Group], config: RolloutConfig, *, num_refills: int, num_retries: int, version: int
    ) -> "RolloutBatch":
        if config.advantage == "gae":
            advantages = [group.rewards for group in groups]  # from which PPO makes them later
        else:
            rewards_GN = torch.tensor([group.rewards for group in groups], dtype=torch.float64)
            advantages = advantages_of(config, rewards_GN).tolist()
        samples: list[Sample] = []
        for group, of_group in zip(groups, advantages, strict=True):
            if group.is_trainable():
                samples += group.to_samples(of_group, config.temperature)
        return cls(
            samples=samples,
            groups=list(groups),
            advantages=advantages,
            num_refills=num_refills,
            num_retries=num_retries,
            version=version,
        )

    @property
    def oldest_version(self) -> int:
        return min(group.oldest_version for group in self.groups)

    def ages(self) -> list[int]:
        """The staleness of each trained group."""
        return [self.version - group.oldest_version for group in self.groups if group.is_trainable()]

    def metrics(self) -> dict[str, float]:
        rewards = [reward for group in self.groups for reward in group.task_rewards]
        lengths = [length for group in self.groups for length in group.lengths]
        num_tokens = sum(lengths)
        values: dict[str, float] = {
            "reward/mean": fmean(rewards),
            "reward/std": pstdev(rewards),
            "groups/filtered": sum(not group.is_trainable() for group in self.groups),
            "groups/refills": self.num_refills,
            "tokens/generated": num_tokens,
            "completion/length_mean": fmean(lengths),
            "completion/length_max": max(lengths),
            "completion/truncated": fmean(is_cut for group in self.groups for is_cut in group.truncated),
            "groups/retries": self.num_retries,
        }
        if ages := self.ages():
            values |= {"age/mean": fmean(ages), "age/max": max(ages)}
        for age in sorted(set(ages)):
            values[f"age/{age}"] = ages.count(age)
        for source in sorted({group.problem.source for group in self.groups} - {""}):
            of_source = [group.task_rewards for group in self.groups if group.problem.source == source]
            values[f"reward/{source}/mean"] = fmean(reward for rewards in of_source for reward in rewards)
        for name in sorted({name for group in self.groups for name in group.components}):
            of_name = [group.components.get(name, []) for group in self.groups]
            values[f"reward/component/{name}"] = fmean(value for row in of_name for value in row if value is not None)
        episodes = [episode for group in self.groups for episode in group.episodes]
        if episodes:
            values["episode/turns_mean"] = fmean(episode.num_turns for episode in episodes)
        num_retries = sum(group.num_retries for group in self.groups)
        if num_retries:
            values["episode/retries" if episodes else "reward/retries"] = num_retries
        overlong = [penalty for group in self.groups for penalty in group.overlong_penalties]
        if overlong:
            values["reward/overlong_penalty"] = fmean(overlong)
        divergences = [divergence for group in self.groups for divergence in group.divergences]
        if divergences:
            penalised = [reward for group in self.groups for reward in group.rewards]
            values["kl/reference"] = sum(divergences) / num_tokens
            values["reward/kl_penalty"] = fmean(rewards) - fmean(penalised) - values.get("reward/overlong_penalty", 0.0)
        return values

    def to_record(self) -> list[Record]:
        """For rollouts.jsonl."""
        records = []
        for group, advantages in zip(self.groups, self.advantages, strict=True):
            record: Record = {
                "prompt": group.prompt_text or group.problem.prompt,
                "answer": group.problem.answer,
                "completions": group.texts,
                "rewards": group.task_rewards,
                "advantages": advantages,
                "lengths": group.lengths,
                "truncated": group.truncated,
                "is_trained": group.is_trainable(),
            }
            if group.episodes:
                record["conversations"] = [episode.to_record() for episode in group.episodes]
            records.append(record)
        return records


class GenerationError(Exception):
    """The generator could not complete some problems. `reason` is its error."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(repr(reason))
        self.reason = reason


class Generating:
    """Counts the running calls to the generator, and can hold back new ones."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._has_ended = asyncio.Event()
        self._num_running = 0

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Around a call. The generator's error becomes a GenerationError."""
        await self._is_open.wait()
        self._num_running += 1
        try:
            with self.timeline.span("generating"):
                yield
        except (ValueError, TypeError):
            raise  # refused inputs would be refused again
        except Exception as error:
            raise GenerationError(error) from error
        finally:
            self._num_running -= 1
            self._has_ended.set()

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """The body runs while no call does."""
        self._is_open.clear()
        try:
            while self._num_running:
                self._has_ended.clear()
                await self._has_ended.wait()
            yield
        finally:
            self._is_open.set()


Deliver = Callable[[int, Group], None]
"""Takes a finished group, with its position in the `indices` of `Rollouts.complete`."""


@dataclass
class Rollouts:
    """Seeds depend on the run's seed, the problem, the place in the group and the turn alone."""

    config: RolloutConfig
    environment: AnyEnvironment
    tokenizer: Tokenizer
    generator: GeneratorClient
    limits: EpisodeLimits
    seed: int
    penalty: Penalty | None = None
    scorer: Scorer = field(default_factory=Scorer)
    timeline: Timeline = field(default_factory=Timeline)
    take: Take = consecutive

    def __post_init__(self) -> None:
        self.generating = Generating(self.timeline)

    async def complete(self, indices: Sequence[int], deliver: Deliver) -> None:
        """Deliver the groups as they finish, with a `penalty` all at the end. Raises GenerationError
        after delivering what has finished, or a reward function's error."""
        finished: dict[int, Group] = {}
        keep = deliver if self.penalty is None else finished.__setitem__
        failure: GenerationError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                if isinstance(self.environment, EpisodeEnvironment):
                    await self._play_all(self.environment, indices, keep)
                else:
                    await self._sample_all(self.environment, indices, tasks, keep)
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            if not isinstance(first, GenerationError):
                raise first from None
            failure = first
        if self.penalty is not None and finished:
            # the reference model batches the completions of all groups
            places = sorted(finished)
            groups = await self.penalty([finished[place] for place in places])
            for place, group in zip(places, groups, strict=True):
                deliver(place, group)
        if failure is not None:
            raise failure

    def _params(self, num_completions: int) -> SamplingParams:
        return SamplingParams(
            n=num_completions,
            max_tokens=self.limits.max_tokens_per_turn,
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            stop_token_ids=self.tokenizer.stop_token_ids,
            seed=hashed_seed(self.seed, "rollouts"),
        )

    async def _sample_all(
        self, environment: Environment, indices: Sequence[int], tasks: asyncio.TaskGroup, keep: Deliver
    ) -> None:
        """One call to the generator; a task for each group scores it and gives it to `keep`."""
        problems = [environment.problem(index) for index in indices]
        prompts = [self.tokenizer.encode_prompt(problem) for problem in problems]

        async def score(place: int, completions: list[Completion]) -> None:
            texts = [self.tokenizer.decode(completion.tokens) for completion in completions]
            scored = await self.scorer.score(environment, problems[place], texts)
            keep(place, self._group(problems[place], prompts[place], completions, texts, scored))

        params = self._params(self.config.group_size)
        async with self.generating.call():
            async for place, completions in self.generator.generate_each(prompts, params, indices):
                tasks.create_task(score(place, completions))

    async def _play_all(self, environment: EpisodeEnvironment, indices: Sequence[int], keep: Deliver) -> None:
        """Play group_size episodes of every problem at once."""

        async def play(place: int, index: int) -> None:
            problem = environment.problem(index)
            size = self.config.group_size
            played = await player.play_all(environment, [problem] * size, sender, first_number=index * size)
            completions = [episode.completion for episode in played]
            texts = [episode.text for episode in played]
            num_retries = sum(episode.num_retries for episode in played)
            scored = Rewards(totals=[episode.reward for episode in played], num_retries=num_retries)
            keep(place, self._group(problem, played[0].prompt, completions, texts, scored, played))

        player = Player(tokenizer=self.tokenizer, limits=self.limits, scorer=self.scorer)
        async with TurnSender(self.generator, self._params(1), self.generating.call) as sender:
            await together(play(place, index) for place, index in enumerate(indices))

    def _group(
        self,
        problem: Problem,
        prompt: list[int],
        completions: list[Completion],
        texts: list[str],
        scored: Rewards,
        episodes: Sequence[PlayedEpisode] = (),
    ) -> Group:
        """With the penalties on length."""
        rewards = scored.totals
        overlong: list[float] = []
        if self.config.overlong_buffer:
            lengths = [len(completion.tokens) for completion in completions]
            max_tokens = self.limits.max_tokens_per_turn
            if episodes:
                lengths = [len(episode.prompt) + len(episode.completion.tokens) for episode in episodes]
                max_tokens = self.limits.max_tokens
            overlong = [self.config.overlong(length, max_tokens) for length in lengths]
            rewards = [reward - penalty for reward, penalty in zip(rewards, overlong, strict=True)]
        return Group(
            problem=problem,
            prompt=prompt,
            prompt_text=self.tokenizer.decode_prompt(prompt),
            completions=completions,
            texts=texts,
            task_rewards=scored.totals,
            rewards=rewards,
            overlong_penalties=overlong,
            components=scored.components,
            num_retries=scored.num_retries,
            drop_if_equal=self.config.advantage in ADVANTAGES,
            episodes=list(episodes),
        )


def advantages_of(config: RolloutConfig, rewards_GN: Tensor) -> Tensor:
    """By the config's rule. Raises ValueError for another shape or if not finite."""
    found = config.rule()(rewards_GN)
    if not isinstance(found, Tensor) or found.shape != rewards_GN.shape or not torch.isfinite(found).all():
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"rollouts.advantage={config.advantage!r} returned {shape} for rewards of shape {list(rewards_GN.shape)}; it must return a "
            "tensor of finite numbers of the same shape"
        )
    return found
