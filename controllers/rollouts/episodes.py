"""Plays episodes, in which an environment and a policy alternate. Other modules form groups of episodes and compute advantages.

An episode begins with the environment's first observation. A turn is one completion that the policy samples. After a turn the environment
replies with a reward and the next observation.

Every turn and every observation appends tokens to the episode. A turn appends the sampled tokens themselves. Its text is never encoded,
because encoding could give tokens that the policy did not sample.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, Self, TypeVar, cast

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
from controllers.observe.run_folder import Record
from controllers.rollouts.tokenizer import Tokenizer
from rl_actors import Completion, GeneratorClient, Sample, SamplingParams

T = TypeVar("T")


@dataclass(kw_only=True)
class EpisodeConfig:
    max_turns: int = 8
    """Largest number of turns of an episode. An episode that is not over after max_turns turns is cut off."""
    max_tokens: int = 0
    """Largest number of tokens of an episode: its first observation, all turns and all replies. 0: the largest number that
    trainer and generator both accept. A turn has its own limit, the run's field max_tokens. A turn begins only if the
    episode has room for that many more tokens."""

    def validate(self) -> None:
        if self.max_turns < 1 or self.max_tokens < 0:
            given = f"episodes.max_turns={self.max_turns}, episodes.max_tokens={self.max_tokens}"
            raise ValueError(f"{given}; the first must be at least 1, the second at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    max_turns: int
    max_tokens: int  # of a whole episode
    max_tokens_per_turn: int


class Policy(Protocol):
    """An async function that samples the policy's turns in one episode."""

    async def __call__(self, tokens: list[int], turn: int) -> Completion:
        """A completion of these tokens. turn: index of the turn in the episode; 0 for the first turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptLine:
    """A message of the environment or of the policy."""

    role: str  # "environment" or "policy"
    text: str
    reward: float | None = None  # of a turn of the policy; None for a message of the environment


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    prompt: list[int]  # tokens of the environment's first observation
    # All tokens after the prompt, up to the last token that the policy sampled. A token of an observation has the logprob 0, and the same
    # policy version as the last sampled token before it. finish_reason is "length" if the episode was cut off.
    completion: Completion
    is_action: list[bool]  # of each token of the completion: True if the policy sampled it
    # For each token of the completion: a turn's reward at the turn's last token, 0 at all other tokens.
    rewards_per_token: list[float]
    lines: list[TranscriptLine]
    num_retries: int = 0  # failed attempts at the problem before this episode

    @property
    def reward(self) -> float:
        return math.fsum(self.rewards_per_token)

    @property
    def num_turns(self) -> int:
        return sum(line.role == "policy" for line in self.lines)

    @property
    def text(self) -> str:
        """The messages of the policy and of the environment after the first observation, joined by newlines."""
        return "\n".join(line.text for line in self.lines[1:])

    def to_record(self) -> list[Record]:
        """The lines as records for rollouts.jsonl."""
        return [{"role": line.role, "text": line.text, "reward": line.reward} for line in self.lines]

    def to_sample(self, *, advantage: float, temperature: float) -> Sample:
        """A sample that trains on the tokens that the policy sampled. The advantage is 0 at all other tokens."""
        weights = self._weights()
        return Sample.from_tokens(
            self.prompt,
            self.completion.tokens,
            temperature=temperature,
            loss_weights=weights,
            old_logprobs=self.completion.logprobs,
            advantages=[advantage * weight for weight in weights],
        )

    def to_supervised_sample(self) -> Sample:
        """A sample for supervised training on the tokens of the policy's turns."""
        return Sample.from_tokens(self.prompt, self.completion.tokens, loss_weights=self._weights())

    def _weights(self) -> list[float]:
        return [float(is_action) for is_action in self.is_action]


class _Failed(Exception):
    """A method of an environment or of an episode raised an exception or did not answer in time."""


class _Playing:
    """An episode while it is played."""

    def __init__(self, prompt: list[int], beginning: str) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.is_action: list[bool] = []
        self.rewards: list[float] = []
        self.lines = [TranscriptLine(role="environment", text=beginning)]

    def add_turn(self, completion: Completion, text: str, reward: float) -> None:
        self.tokens += completion.tokens
        self.logprobs += completion.logprobs
        self.versions += completion.policy_versions
        self.is_action += [True] * len(completion.tokens)
        self.rewards += [0.0] * (len(completion.tokens) - 1) + [reward]
        self.lines.append(TranscriptLine(role="policy", text=text, reward=reward))

    def add_observation(self, tokens: list[int], text: str) -> None:
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.versions += [self.versions[-1]] * len(tokens)
        self.is_action += [False] * len(tokens)
        self.rewards += [0.0] * len(tokens)
        self.lines.append(TranscriptLine(role="environment", text=text))

    def finish(self, last: str, *, is_cut_off: bool, num_retries: int) -> PlayedEpisode:
        """The finished episode. last: text of the observation in the last reply; "" if there is no text."""
        completion = Completion(
            tokens=self.tokens,
            logprobs=self.logprobs,
            policy_versions=self.versions,
            finish_reason="length" if is_cut_off else "stop",
        )
        return PlayedEpisode(
            prompt=self.prompt,
            completion=completion,
            is_action=self.is_action,
            rewards_per_token=self.rewards,
            lines=[*self.lines, TranscriptLine(role="environment", text=last)] if last else self.lines,
            num_retries=num_retries,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """Plays episodes.

    If a method of the environment or of the episode raises an exception or does not answer in time, a new episode of the same problem
    begins, at most scorer.max_retries times.
    """

    tokenizer: Tokenizer
    limits: EpisodeLimits
    scorer: Scorer

    async def play(self, environment: EpisodeEnvironment, problem: Problem, policy: Policy) -> PlayedEpisode:
        """Play one episode of the problem.

        Raises EpisodeError if a method of the episode returns a value that the protocol `Episode` does not allow, if the first observation
        is empty or leaves no room for a turn, or if the last attempt fails. An exception of the policy is raised as it is.
        """
        for num_retries in range(self.scorer.max_retries + 1):
            try:
                return await self._play(environment, problem, policy, num_retries)
            except _Failed as error:
                failure = error
        times = self.scorer.max_retries + 1
        raise EpisodeError(f"the episode of {problem.prompt!r} failed {times} times, the last time in {failure}")

    async def demonstrate(self, environment: EpisodeEnvironment, problem: Problem) -> Sample:
        """A sample that trains on the turns of the environment's demonstration. The tokenizer's end token is added to each turn.

        Raises ValueError if the environment has no demonstrations, or if the episode is not over after the demonstration's last turn.
        """
        require_demonstrations(environment)
        shown_turns = cast(Demonstrating, environment).demonstration(problem)
        episode = await self.play(environment, problem, Scripted(shown_turns, self))
        return episode.to_supervised_sample()

    async def _play(
        self, environment: EpisodeEnvironment, problem: Problem, policy: Policy, num_retries: int
    ) -> PlayedEpisode:
        episode: Episode = await self._ask("episode", lambda: environment.episode(problem))
        beginning: Observation = await self._ask("reset", episode.reset)
        prompt, text = self._read(beginning, f"reset of {problem.prompt!r}")
        limits = self.limits
        playing = _Playing(prompt, text)
        keeps = getattr(environment, "keeps_special_tokens", False)
        decode = self.tokenizer.decode_turn if keeps else self.tokenizer.decode
        if not prompt or len(prompt) + limits.max_tokens_per_turn > limits.max_tokens:
            raise EpisodeError(
                f"reset of {problem.prompt!r} gave {len(prompt)} tokens; it must give at least 1, and leave room for a turn of "
                f"max_tokens={limits.max_tokens_per_turn} tokens in an episode of at most {limits.max_tokens}"
            )
        for turn in range(limits.max_turns):
            completion = await policy(prompt + playing.tokens, turn)
            said = decode(completion.tokens)
            where = f"step after turn {turn + 1} of {problem.prompt!r}"
            reply = _checked(await self._ask(f"turn {turn + 1}", partial(episode.step, said)), where)
            playing.add_turn(completion, said, float(reply.reward))
            if reply.is_over:
                break
            tokens, text = self._read(reply.observation, where, after=completion.tokens[-1])
            length = len(prompt) + len(playing.tokens) + len(tokens)
            if turn + 1 == limits.max_turns or length + limits.max_tokens_per_turn > limits.max_tokens:
                break
            playing.add_observation(tokens, text)
        # The tokens of the last reply are left out, because no turn follows this reply.
        last = shown(_checked_observation(reply.observation, where, num_tokens=len(self.tokenizer)), self.tokenizer)
        return playing.finish(last, is_cut_off=not reply.is_over, num_retries=num_retries)

    async def _ask(self, what: str, ask: Callable[[], T | Awaitable[T]]) -> T:
        """Call `ask`, a method of an environment or of an episode, and return its answer.

        If the method is asynchronous, the scorer's time limit applies.

        Raises _Failed if the method raises an exception or exceeds the time limit. what: the text by which the error names this call, such as
        "reset" or "turn 3".
        """
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
                except Exception as error:  # this may be a TimeoutError of the environment's own
                    raise _Failed(f"{what}: {error!r}") from error
        except TimeoutError:
            raise _Failed(f"{what}: no answer within {self.scorer.timeout:g} s") from None

    def _read(self, observation: object, where: str, after: int | None = None) -> tuple[list[int], str]:
        """The tokens and the text of an observation. after: the last token of the turn before the observation."""
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
    """Raises ValueError if the environment has episodes but no demonstrations. A supervised phase would train on the demonstrations."""
    if isinstance(environment, EpisodeEnvironment) and not isinstance(environment, Demonstrating):
        raise ValueError(
            f"{type(environment).__name__} has no method `demonstration`, so a run cannot have supervised steps; use --sft-steps 0"
        )


class Scripted:
    """A policy whose turns are fixed texts, such as those of a demonstration."""

    def __init__(self, texts: Sequence[str], player: Player) -> None:
        self.texts = list(texts)
        self.player = player

    async def __call__(self, tokens: list[int], turn: int) -> Completion:
        if turn >= len(self.texts):
            raise ValueError(
                f"the episode is not over after the {len(self.texts)} turns of its demonstration: {self.texts}"
            )
        tokenizer = self.player.tokenizer
        said = [*tokenizer.encode(self.texts[turn]), tokenizer.end_token_id]
        said = said[: self.player.limits.max_tokens_per_turn]  # the generator cuts a sampled turn off at the same limit
        zeros = [0] * len(said)
        return Completion(tokens=said, logprobs=[0.0] * len(said), policy_versions=zeros, finish_reason="stop")


Waiting = tuple[list[int], int, "asyncio.Future[Completion]"]
"""A requested turn: (tokens of the episode so far, number from which the turn's seed is computed, future of the turn)."""


class TurnSender:
    """Requests the turns of many episodes from the generator. Turns that are requested at the same moment share one call.

    Use a TurnSender in an `async with` block. When the block ends, the calls that are still under way are cancelled.
    """

    def __init__(
        self,
        generator: GeneratorClient,
        params: SamplingParams,
        call: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """params: sampling parameters of every turn. call: returns a new context manager, in which one call of the generator runs."""
        self.generator = generator
        self.params = params
        self.call = call
        self._waiting: list[Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def complete(self, tokens: list[int], number: int) -> Completion:
        """A completion of the tokens. It does not depend on the other turns that share the call.

        number: the number from which the completion's seed is computed.
        """
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, number, answer))
        if len(self._waiting) == 1:
            call = asyncio.create_task(self._send())
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        return await answer

    async def _send(self) -> None:
        await asyncio.sleep(0)  # first lets the other episodes add their turns to this call
        async with self.call():
            turns = self._waiting
            self._waiting = []
            prompts = [tokens for tokens, _, _ in turns]
            numbers = [number for _, number, _ in turns]
            answers = [answer for _, _, answer in turns]
            try:
                async for place, completions in self.generator.generate_each(prompts, self.params, numbers):
                    if not answers[place].done():  # the episode may have been cancelled meanwhile
                        answers[place].set_result(completions[0])
            except Exception as error:
                for answer in answers:
                    if not answer.done():
                        answer.set_exception(error)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The policy of one episode. The generator samples its turns."""

    sender: TurnSender
    # The first turn's seed is computed from this number, the next turn's seed from the next number, and so on.
    first_number: int

    async def __call__(self, tokens: list[int], turn: int) -> Completion:
        return await self.sender.complete(tokens, self.first_number + turn)
