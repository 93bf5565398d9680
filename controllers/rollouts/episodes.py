"""Plays episodes: environment and policy alternate. Sampled tokens are never encoded again."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self, TypeVar, cast

from controllers.environments import (
    AnyEnvironment,
    Demonstrating,
    Episode,
    EpisodeEnvironment,
    EpisodeError,
    Observation,
    Problem,
    Reply,
    Scorer,
)
from controllers.environments.base import as_reward
from controllers.environments.scorer import together
from controllers.observe.run_folder import Record
from controllers.rollouts.tokenizer import Tokenizer
from rl_actors import Completion, GeneratorClient, Sample, SamplingParams
from rl_actors.field_types import CountingInt, NaturalInt

T = TypeVar("T")


@dataclass(kw_only=True)
class EpisodeConfig:
    max_turns: CountingInt = 8
    """Turns of an episode; a longer one is cut off."""
    max_tokens: NaturalInt = 0
    """Tokens of an episode, with its first observation and all replies. A turn begins only with
    room for the run's max_tokens. 0: as many as trainer and generator accept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    max_turns: int
    max_tokens: int  # of a whole episode
    max_tokens_per_turn: int


Policy = Callable[[list[int], int], Awaitable[Completion]]
"""(tokens of the episode so far, index of the turn) -> the policy's turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptLine:
    role: str  # "environment" or "policy"
    text: str
    reward: float | None = None  # None for the environment


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    prompt: list[int]  # the first observation
    # All later tokens, up to the last sampled one. Observations have logprob 0 and the version of
    # the token before. finish_reason is "length" if cut off.
    completion: Completion = field(
        default_factory=lambda: Completion(tokens=[], logprobs=[], policy_versions=[], finish_reason="stop")
    )
    is_action: list[bool] = field(default_factory=list)  # by token of the completion: sampled by the policy
    rewards_per_token: list[float] = field(default_factory=list)  # a turn's reward at its last token, else 0
    lines: list[TranscriptLine]
    num_retries: int = 0  # before this episode

    def add_turn(self, turn: Completion, text: str, reward: float) -> None:
        self._add(turn.tokens, turn.logprobs, turn.policy_versions, is_action=True)
        self.rewards_per_token[-1] = reward
        self.lines.append(TranscriptLine(role="policy", text=text, reward=reward))

    def add_observation(self, tokens: list[int], text: str) -> None:
        size = len(tokens)
        self._add(tokens, [0.0] * size, self.completion.policy_versions[-1:] * size, is_action=False)
        self.lines.append(TranscriptLine(role="environment", text=text))

    def _add(self, tokens: list[int], logprobs: list[float], versions: list[int], *, is_action: bool) -> None:
        self.completion.tokens.extend(tokens)
        self.completion.logprobs.extend(logprobs)
        self.completion.policy_versions.extend(versions)
        self.is_action.extend([is_action] * len(tokens))
        self.rewards_per_token.extend([0.0] * len(tokens))

    @property
    def reward(self) -> float:
        return math.fsum(self.rewards_per_token)

    @property
    def num_turns(self) -> int:
        return sum(line.role == "policy" for line in self.lines)

    @property
    def text(self) -> str:
        """All messages after the first observation, joined by newlines."""
        return "\n".join(line.text for line in self.lines[1:])

    def to_record(self) -> list[Record]:
        return [{"role": line.role, "text": line.text, "reward": line.reward} for line in self.lines]

    def to_sample(self, *, advantage: float, temperature: float) -> Sample:
        """The advantage is 0 where the policy did not sample."""
        weights = [float(is_action) for is_action in self.is_action]
        return Sample.from_tokens(
            self.prompt,
            self.completion.tokens,
            temperature=temperature,
            loss_weights=weights,
            old_logprobs=self.completion.logprobs,
            advantages=[advantage * weight for weight in weights],
        )


class _Failed(Exception):
    """A method of an environment or an episode raised, or timed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """Plays episodes, again if the environment fails, up to scorer.max_retries times."""

    tokenizer: Tokenizer
    limits: EpisodeLimits
    scorer: Scorer

    async def play(self, environment: EpisodeEnvironment, problem: Problem, policy: Policy) -> PlayedEpisode:
        """Raises EpisodeError if the episode breaks its protocol, if its first observation is empty
        or leaves no room for a turn, or after the last attempt; the policy's exceptions as they are."""
        for num_retries in range(self.scorer.max_retries + 1):
            try:
                return await self._play(environment, problem, policy, num_retries)
            except _Failed as error:
                failure = error
        times = self.scorer.max_retries + 1
        raise EpisodeError(f"the episode of {problem.prompt!r} failed {times} times, the last time in {failure}")

    async def play_all(
        self, environment: EpisodeEnvironment, problems: Sequence[Problem], sender: "TurnSender", *, first_number: int
    ) -> list[PlayedEpisode]:
        """An episode for each problem, with the seeds of the episodes from first_number on."""
        games = []
        for number, problem in enumerate(problems, first_number):
            policy = partial(sender.complete, number * self.limits.max_turns)
            games.append(self.play(environment, problem, policy))
        return await together(games)

    async def demonstrate(self, environment: EpisodeEnvironment, problem: Problem) -> Sample:
        """Trains on a demonstration, whose turns get end tokens. Raises ValueError without one, or if
        the episode is not over after its last turn."""
        require_demonstrations(environment)
        said = list(cast(Demonstrating, environment).demonstration(problem))

        async def policy(tokens: list[int], turn: int) -> Completion:
            if turn >= len(said):
                raise ValueError(f"the episode is not over after the {len(said)} turns of its demonstration: {said}")
            whole = [*self.tokenizer.encode(said[turn]), self.tokenizer.end_token_id]
            cut = whole[: self.limits.max_tokens_per_turn]  # as the generator does
            zeros = [0] * len(cut)
            return Completion(tokens=cut, logprobs=[0.0] * len(cut), policy_versions=zeros, finish_reason="stop")

        played = await self.play(environment, problem, policy)
        weights = [float(is_action) for is_action in played.is_action]
        return Sample.from_tokens(played.prompt, played.completion.tokens, loss_weights=weights)

    async def _play(
        self, environment: EpisodeEnvironment, problem: Problem, policy: Policy, num_retries: int
    ) -> PlayedEpisode:
        episode: Episode = await self._ask("episode", lambda: environment.episode(problem))
        beginning: Observation = await self._ask("reset", episode.reset)
        prompt, text = self._read(beginning, f"reset of {problem.prompt!r}")
        limits = self.limits
        lines = [TranscriptLine(role="environment", text=text)]
        played = PlayedEpisode(prompt=prompt, lines=lines, num_retries=num_retries)
        keeps = getattr(environment, "keeps_special_tokens", False)
        decode = self.tokenizer.decode_turn if keeps else self.tokenizer.decode
        if not prompt or len(prompt) + limits.max_tokens_per_turn > limits.max_tokens:
            raise EpisodeError(
                f"reset of {problem.prompt!r} gave {len(prompt)} tokens; it must give at least 1, and leave room for a turn of "
                f"max_tokens={limits.max_tokens_per_turn} tokens in an episode of at most {limits.max_tokens}"
            )
        for turn in range(limits.max_turns):
            completion = await policy(prompt + played.completion.tokens, turn)
            said = decode(completion.tokens)
            where = f"step after turn {turn + 1} of {problem.prompt!r}"
            reply = _checked(await self._ask(f"turn {turn + 1}", partial(episode.step, said)), where)
            played.add_turn(completion, said, reply.reward)
            if reply.is_over:
                break
            tokens, text = self._read(reply.observation, where, after=completion.tokens[-1])
            length = len(prompt) + len(played.completion.tokens) + len(tokens)
            if turn + 1 == limits.max_turns or length + limits.max_tokens_per_turn > limits.max_tokens:
                break
            played.add_observation(tokens, text)
        # without the tokens of the last reply, as no turn follows
        last = shown(_checked_observation(reply.observation, where, num_tokens=len(self.tokenizer)), self.tokenizer)
        if last:
            played.lines.append(TranscriptLine(role="environment", text=last))
        finish_reason = "stop" if reply.is_over else "length"
        return replace(played, completion=replace(played.completion, finish_reason=finish_reason))

    async def _ask(self, what: str, ask: Callable[[], T | Awaitable[T]]) -> T:
        """Under the scorer's time limit if asynchronous. Raises _Failed, naming `what`, if it fails."""
        try:
            answer = ask()
        except Exception as error:
            raise _Failed(f"{what}: {error!r}") from error
        if not inspect.isawaitable(answer):
            return answer
        try:
            async with self.scorer.limits():
                try:
                    return await answer
                except Exception as error:  # maybe a TimeoutError of its own
                    raise _Failed(f"{what}: {error!r}") from error
        except TimeoutError:
            raise _Failed(f"{what}: no answer within {self.scorer.timeout:g} s") from None

    def _read(self, observation: object, where: str, after: int | None = None) -> tuple[list[int], str]:
        """(tokens, text). after: the last token of the turn before the observation."""
        checked = _checked_observation(observation, where, num_tokens=len(self.tokenizer))
        try:
            return self.tokenizer.encode_observation(checked, after=after), shown(checked, self.tokenizer)
        except ValueError as error:
            raise EpisodeError(f"{where}: {error}") from None


def _checked(reply: object, where: str) -> Reply:
    if not isinstance(reply, Reply):
        raise EpisodeError(f"{where} returned {reply!r}; it must be a Reply")
    try:
        reward = as_reward(reply.reward)
    except ValueError as error:
        raise EpisodeError(f"{where} returned the reward {reply.reward!r}; it must be a finite number") from error
    if not isinstance(reply.is_over, bool):
        raise EpisodeError(f"{where} returned is_over={reply.is_over!r}; it must be True or False")
    return replace(reply, reward=reward)


def _checked_observation(observation: object, where: str, *, num_tokens: int) -> Observation:
    if isinstance(observation, str):
        return observation
    if isinstance(observation, list):
        if all(type(each) is int and 0 <= each < num_tokens for each in observation):
            return observation
        if all(isinstance(each, dict) and {"role", "content"} <= each.keys() for each in observation):
            return observation
    raise EpisodeError(
        f"{where} gave the observation {observation!r}; it must be a text, a list of messages with role and content, or a list of token "
        f"ids from 0 to {num_tokens - 1}"
    )


def shown(observation: Observation, tokenizer: Tokenizer) -> str:
    """The text of an observation, for reports."""
    if isinstance(observation, str):
        return observation
    if observation and isinstance(observation[0], dict):
        return "\n".join(f"{message['role']}: {message['content']}" for message in cast(list, observation))
    return tokenizer.decode(cast(list[int], observation))


def require_demonstrations(environment: AnyEnvironment) -> None:
    if isinstance(environment, EpisodeEnvironment) and not isinstance(environment, Demonstrating):
        raise ValueError(
            f"{type(environment).__name__} has no method `demonstration`, so a run cannot have supervised steps; use --sft-steps 0"
        )


Waiting = tuple[list[int], int, "asyncio.Future[Completion]"]
"""(tokens of the episode so far, seed index, future of the turn)."""


@dataclass(eq=False)
class TurnSender:
    """Requests turns of many episodes; those of one moment share a call. Leaving cancels calls."""

    generator: GeneratorClient
    params: SamplingParams
    call: Callable[[], AbstractAsyncContextManager[None]] = nullcontext  # around each call
    _waiting: list[Waiting] = field(default_factory=list)
    _calls: "set[asyncio.Task[None]]" = field(default_factory=set)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def complete(self, first_number: int, tokens: list[int], turn: int) -> Completion:
        """A turn by its own seed, whatever else shares the call; `first_number` is that of turn 0."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, first_number + turn, answer))
        if len(self._waiting) == 1:
            call = asyncio.create_task(self._send())
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        return await answer

    async def _send(self) -> None:
        await asyncio.sleep(0)  # lets other episodes join
        turns: list[Waiting] = []
        try:
            async with self.call():
                turns = self._waiting
                self._waiting = []
                prompts = [tokens for tokens, _, _ in turns]
                numbers = [number for _, number, _ in turns]
                async for place, completions in self.generator.generate_each(prompts, self.params, numbers):
                    if not turns[place][2].done():  # may be cancelled meanwhile
                        turns[place][2].set_result(completions[0])
        except Exception as error:
            for _, _, answer in turns:
                if not answer.done():
                    answer.set_exception(error)
