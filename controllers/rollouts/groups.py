"""Makes the samples that a training step trains on.

The generator samples completions of problems, reward functions score the completions, and advantages are computed from the rewards. A group
is one problem with its N completions.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import cast

import torch
from torch import Tensor

from controllers.environments import AnyEnvironment, Environment, Problem, Scorer, own_code
from controllers.environments.base import are_equal
from controllers.observe.run_folder import Record
from controllers.observe.timeline import Timeline
from controllers.rollouts.advantages import ADVANTAGES
from controllers.rollouts.episodes import PlayedEpisode
from controllers.rollouts.tokenizer import Tokenizer
from rl_actors import Completion, GeneratorClient, Sample, SamplingParams
from rl_actors.seeds import hashed_seed

Take = Callable[[int, int], tuple[list[int], int]]
"""Function of (cursor, count): the indices of the next `count` training problems from `cursor` on, and the next cursor."""


def consecutive(cursor: int, count: int) -> tuple[list[int], int]:
    """A Take that skips no problem."""
    return list(range(cursor, cursor + count)), cursor + count


@dataclass(kw_only=True)
class RolloutConfig:
    groups_per_step: int = 64
    """Number of groups that a step trains on. A group is one problem with its completions. A step trains on fewer groups if groups whose
    rewards are all equal remain after the last refill (see dynamic_sampling_rounds)."""
    group_size: int = 16
    """Number of completions of each problem."""
    temperature: float = 1.0
    """Sampling temperature. The trainer computes its logprobs at the same temperature."""
    top_p: float = 1.0
    """Share of the probability mass from which tokens are sampled. With a value below 1 the trainer's logprobs cannot match the generator's:
    the trainer normalizes its probabilities over all tokens, and the generator only over the tokens of this share."""
    advantage: str = "grpo"
    """Rule that makes advantages from the rewards of a group: grpo, dr_grpo, rloo, reinforce_plus_plus, gae, or module:function, which
    takes rewards [G, N] and returns advantages [G, N]. PPO needs the rule gae, and only PPO takes it. With gae the
    values of a value model also go into the advantages, every group is trained on, and a group may have only one completion."""
    dynamic_sampling_rounds: int = 1
    """Largest number of refills. A refill replaces the groups whose rewards are all equal with groups of new problems. The limit
    applies to each set of problems that are started together. If max_staleness is 0, such a set is all problems of a step."""
    max_staleness: int = 0
    """Largest age of a group on which a step trains. The age is the trainer's version minus the version that sampled the group's oldest token.
    The version counts optimizer steps, and a step of the loop may have several. The generator runs ahead of the trainer as far as this age
    allows. 0: generation, training and weight sync come one after the other."""
    in_flight_updates: bool = True
    """True: running requests continue with the new weights when the generator gets them, and each token is recorded with the version that sampled
    it. False: the generator gets new weights only when no request is running."""
    max_retries: int = 2
    """Largest number of times that a problem's completions are requested again after the generator has failed. If the last attempt also fails,
    the run ends with the generator's error."""
    overlong_buffer: int = 0
    """A penalty on the reward grows over the last overlong_buffer tokens before the limit max_tokens. The penalty is 0 for a completion of up to
    max_tokens - overlong_buffer tokens, and overlong_penalty at max_tokens (DAPO's soft overlong punishment, arXiv 2503.14476, eq. 13). In a
    task with episodes, the limit is episodes.max_tokens, and all tokens of an episode count, also its prompt. 0: no penalty."""
    overlong_penalty: float = 1.0
    """Penalty on the reward of a completion that is as long as its limit allows. Has no effect if overlong_buffer is 0."""

    def rule(self) -> Callable[[Tensor], Tensor]:
        """The function that makes advantages [G, N] from rewards [G, N]. Raises ValueError for an unknown name."""
        if self.advantage in ADVANTAGES:
            return ADVANTAGES[self.advantage]
        if ":" not in self.advantage:
            names = ", ".join([*ADVANTAGES, "gae"])
            raise ValueError(f"rollouts.advantage={self.advantage!r}; it must be one of {names}, or module:function")
        return own_code.imported("rollouts.advantage", self.advantage)

    def validate(self) -> None:
        if self.advantage != "gae":
            self.rule()
        limits = {"groups_per_step": 1, "dynamic_sampling_rounds": 0, "max_staleness": 0, "max_retries": 0}
        limits["group_size"] = 1 if self.advantage == "gae" else 2
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
        """The penalty on the reward of a completion of num_tokens tokens. overlong_buffer must be above 0.

        Example: if overlong_buffer=4, overlong_penalty=1 and max_tokens=20, the penalty is 0 up to 16 tokens, 0.25 at 17 and 1 at 20.
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
    overlong_penalties: list[float] = field(default_factory=list)  # empty if overlong_buffer is 0
    # Components of the task_rewards, by name; None where a reward lacks the component.
    components: dict[str, list[float | None]] = field(default_factory=dict)
    prompt_text: str = ""  # decoded from `prompt`
    num_retries: int = 0  # times that a reward function was called again, or an episode was played again
    drop_if_equal: bool = True  # False: the group is trained on even if all its rewards are equal
    # KL divergence of the policy from the reference model on each completion, summed over the tokens. Empty if no KL penalty is
    # subtracted from the rewards.
    divergences: list[float] = field(default_factory=list)
    # The episode of each completion. The completion of an episode has the tokens of all the policy's turns, and of the environment's
    # replies between these turns. The list is empty if the task has no episodes.
    episodes: list[PlayedEpisode] = field(default_factory=list)

    @property
    def is_action(self) -> list[list[bool]]:
        """For each completion and each of its tokens: True if the policy sampled the token."""
        if self.episodes:
            return [episode.is_action for episode in self.episodes]
        return [[True] * len(completion.tokens) for completion in self.completions]

    @property
    def lengths(self) -> list[int]:
        """For each completion: the number of tokens that the policy sampled."""
        return [sum(row) for row in self.is_action]

    @property
    def truncated(self) -> list[bool]:
        """For each completion: True if a limit of tokens or turns has ended the completion."""
        return [completion.finish_reason == "length" for completion in self.completions]

    @property
    def rewards_per_token(self) -> list[list[float]]:
        """For each completion and each of its tokens: the token's part of `rewards`.

        Without episodes, the whole reward is at the last token of the completion. With episodes, a turn's reward is at the turn's last token, and
        the penalties are at the last token of the completion.
        """
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
        """One sample for each completion. Only the tokens that the policy sampled are trained on."""
        if self.episodes:
            pairs = zip(self.episodes, advantages, strict=True)
            return [episode.to_sample(advantage=advantage, temperature=temperature) for episode, advantage in pairs]
        samples = []
        for completion, advantage in zip(self.completions, advantages, strict=True):
            samples.append(to_sample(self.prompt, completion, advantage, temperature))
        return samples

    @property
    def oldest_version(self) -> int:
        """The oldest policy_version that generated a token of the group."""
        return min(min(completion.policy_versions) for completion in self.completions)

    def is_trainable(self) -> bool:
        """True if the group can be trained on.

        A group whose rewards are all equal can be trained on only with the rule gae. Every other rule gives all completions of such a group the
        advantage 0.
        """
        return not self.drop_if_equal or not are_equal(self.rewards)


Penalty = Callable[[Sequence[Group]], Awaitable[list[Group]]]
"""Function from groups to the same groups, with a penalty subtracted from each reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The samples that one step trains on, and all groups that were generated for the step."""

    samples: list[Sample]  # the completions of the groups that have a signal
    groups: list[Group]  # all groups, also those that have no signal
    advantages: list[list[float]]  # one list for each group, one number for each completion
    num_refills: int  # one refill may replace several groups
    num_retries: int  # times that a group's completions were requested again
    version: int  # the trainer's policy_version when the step begins

    @classmethod
    def of(
        cls, groups: Sequence[Group], config: RolloutConfig, *, num_refills: int, num_retries: int, version: int
    ) -> "RolloutBatch":
        """The batch of these groups, with their samples and advantages."""
        advantages = group_advantages(groups, config)
        return cls(
            samples=to_samples(groups, advantages, config.temperature),
            groups=list(groups),
            advantages=advantages,
            num_refills=num_refills,
            num_retries=num_retries,
            version=version,
        )

    @property
    def oldest_version(self) -> int:
        """The oldest policy_version that generated a token of the batch."""
        return min(group.oldest_version for group in self.groups)

    def ages(self) -> list[int]:
        """The age of each group that is trained on: the version when the step begins, minus the version that sampled the group's oldest token."""
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
        }
        values |= self._age_metrics()
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

    def _age_metrics(self) -> dict[str, float]:
        """The number of retries, the mean and the largest age, and the number of groups of each age."""
        ages = self.ages()
        values: dict[str, float] = {"groups/retries": self.num_retries}
        if ages:
            values |= {"age/mean": fmean(ages), "age/max": max(ages)}
        for age in sorted(set(ages)):
            values[f"age/{age}"] = ages.count(age)
        return values

    def to_record(self) -> list[Record]:
        """The records of all groups for rollouts.jsonl."""
        shown: list[Record] = []
        for group, advantages in zip(self.groups, self.advantages, strict=True):
            record: Record = {"conversations": [each.to_record() for each in group.episodes]} if group.episodes else {}
            shown.append(
                record
                | {
                    "prompt": group.prompt_text or group.problem.prompt,
                    "answer": group.problem.answer,
                    "completions": group.texts,
                    "rewards": group.task_rewards,
                    "advantages": advantages,
                    "lengths": group.lengths,
                    "truncated": group.truncated,
                    "is_trained": group.is_trainable(),
                }
            )
        return shown


class GenerationError(Exception):
    """The generator could not complete some problems. `reason` is the generator's error."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(repr(reason))
        self.reason = reason


class Generating:
    """Counts the calls to the generator that are running, and can keep new calls from beginning."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._may_begin = asyncio.Event()
        self._changed = asyncio.Event()
        self._may_begin.set()
        self._num_running = 0

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Context manager for one call."""
        await self._may_begin.wait()
        self._num_running += 1
        try:
            with self.timeline.span("generating"):
                yield
        finally:
            self._num_running -= 1
            self._changed.set()

    @contextlib.asynccontextmanager
    async def paused(self, *, wait: bool) -> AsyncIterator[None]:
        """Context manager. If `wait` is True, the body begins when no call is running, and new calls begin only after the body.

        If `wait` is False, the context manager does nothing.
        """
        if not wait:
            yield
            return
        self._may_begin.clear()
        try:
            while self._num_running:
                self._changed.clear()
                await self._changed.wait()
            yield
        finally:
            self._may_begin.set()


Deliver = Callable[[int, Group], None]
"""Function of (position, group) that takes a finished group. The position is the place of the group's problem in
`indices`, the list that `Rollouts.complete` got."""


class Rollouts:
    """Generates completions of the environment's problems and scores them. The sampling seeds depend only on the run's seed and a problem's index."""

    def __init__(
        self,
        config: RolloutConfig,
        environment: AnyEnvironment,
        tokenizer: Tokenizer,
        generator: GeneratorClient,
        *,
        max_tokens: int,
        seed: int,
        penalty: Penalty | None = None,
        scorer: Scorer | None = None,
        timeline: Timeline | None = None,
        take: Take = consecutive,
    ) -> None:
        self.config = config
        self.environment = environment
        self.tokenizer = tokenizer
        self.generator = generator
        self.max_tokens = max_tokens
        self.seed = seed
        self.penalty = penalty
        self.take = take
        self.scorer = scorer or Scorer()
        self.generating = Generating(timeline or Timeline())

    async def complete(self, indices: Sequence[int], deliver: Deliver) -> None:
        """Give `deliver` the groups of the problems with these indices, in the order in which the groups finish.

        If these rollouts have a `penalty` function, `deliver` gets all groups at the end instead. If the generator fails, `deliver` first
        gets the groups that have finished, and then this method raises GenerationError. If a reward function fails, this method raises the
        function's error.
        """
        finished: dict[int, Group] = {}
        keep = deliver if self.penalty is None else finished.__setitem__
        failure: GenerationError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._complete_all(indices, tasks, keep)
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            if not isinstance(first, GenerationError):
                raise first from None
            failure = first
        if self.penalty is not None and finished:
            # One call for all groups, because the reference model computes the logprobs of many completions at once.
            places = sorted(finished)
            groups = await self.penalty([finished[place] for place in places])
            for place, group in zip(places, groups, strict=True):
                deliver(place, group)
        if failure is not None:
            raise failure

    async def _complete_all(self, indices: Sequence[int], tasks: asyncio.TaskGroup, keep: Deliver) -> None:
        """Complete the problems in one call to the generator. For each group, a task in `tasks` computes the rewards and gives the group to
        `keep`.
        """
        problems = [self.environment.problem(index) for index in indices]
        prompts = [self.tokenizer.encode_prompt(problem) for problem in problems]
        params = self.sampling_params(n=self.config.group_size)

        async def score(place: int, completions: list[Completion]) -> None:
            keep(place, await self._scored(problems[place], prompts[place], completions))

        try:
            async with self.generating.call():
                async for place, completions in self.generator.generate_each(prompts, params, indices):
                    tasks.create_task(score(place, completions))
        except (ValueError, TypeError):
            raise  # the generator refuses the input, so a retry would be refused, too
        except Exception as error:
            raise GenerationError(error) from error

    def sampling_params(self, *, n: int) -> SamplingParams:
        return SamplingParams(
            n=n,
            max_tokens=self.max_tokens,
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            stop_token_ids=self.tokenizer.stop_token_ids,
            seed=hashed_seed(self.seed, "rollouts"),
        )

    def penalised(
        self, totals: list[float], lengths: Sequence[int], max_tokens: int
    ) -> tuple[list[float], list[float]]:
        """Two lists: the rewards `totals` minus the penalties on long completions, and these penalties.

        If overlong_buffer is 0, the second list is empty.
        """
        if not self.config.overlong_buffer:
            return totals, []
        overlong = [self.config.overlong(length, max_tokens) for length in lengths]
        return [reward - penalty for reward, penalty in zip(totals, overlong, strict=True)], overlong

    async def _scored(self, problem: Problem, prompt: list[int], completions: list[Completion]) -> Group:
        texts = [self.tokenizer.decode(completion.tokens) for completion in completions]
        found = await self.scorer.score(cast(Environment, self.environment), problem, texts)
        lengths = [len(completion.tokens) for completion in completions]
        rewards, overlong = self.penalised(found.totals, lengths, self.max_tokens)
        return Group(
            problem=problem,
            prompt=prompt,
            prompt_text=self.tokenizer.decode_prompt(prompt),
            completions=completions,
            texts=texts,
            task_rewards=found.totals,
            rewards=rewards,
            overlong_penalties=overlong,
            components=found.components,
            num_retries=found.num_retries,
            drop_if_equal=self.config.advantage != "gae",
        )


def group_advantages(groups: Sequence[Group], config: RolloutConfig) -> list[list[float]]:
    """The advantages of the completions by the rule config.advantage, one list for each group.

    If the rule is gae, this function returns the rewards instead. PPO later computes the advantages from the rewards and the values.
    """
    if config.advantage == "gae":
        return [group.rewards for group in groups]
    rewards_GN = torch.tensor([group.rewards for group in groups], dtype=torch.float64)
    return advantages_of(config, rewards_GN).tolist()


def advantages_of(config: RolloutConfig, rewards_GN: Tensor) -> Tensor:
    """The advantages of the config's rule. Raises ValueError, naming the rule, if they have another shape or are not finite."""
    found = config.rule()(rewards_GN)
    if not isinstance(found, Tensor) or found.shape != rewards_GN.shape or not torch.isfinite(found).all():
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"rollouts.advantage={config.advantage!r} returned {shape} for rewards of shape {list(rewards_GN.shape)}; it must return a "
            "tensor of finite numbers of the same shape"
        )
    return found


def to_samples(groups: Sequence[Group], advantages: Sequence[Sequence[float]], temperature: float) -> list[Sample]:
    """Samples, one for each completion of the groups that have a signal."""
    samples: list[Sample] = []
    for group, of_group in zip(groups, advantages, strict=True):
        if group.is_trainable():
            samples += group.to_samples(of_group, temperature)
    return samples


def to_sample(prompt: Sequence[int], completion: Completion, advantage: float, temperature: float) -> Sample:
    return Sample.from_tokens(
        prompt,
        completion.tokens,
        temperature=temperature,
        old_logprobs=completion.logprobs,
        advantages=advantage,
    )
