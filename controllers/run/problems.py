"""Which problems a run can take.
Those of files, data sets and held-out sets are checked before the run. Endless sources are not: a
run skips what it cannot take.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

from controllers.environments import AnyEnvironment, EpisodeEnvironment, Problem
from controllers.environments.base import text_of
from controllers.environments.data import DataEnvironment
from controllers.environments.held_out import digest_of
from controllers.environments.mixture import MixedEnvironment
from controllers.rollouts.groups import consecutive
from controllers.rollouts.tokenizer import Tokenizer

if TYPE_CHECKING:
    from controllers.rollouts.evaluation import EvaluationSet
    from controllers.run.config import RunConfig

FIRST = 1000
"""Problems of an endless source that are looked at before a run."""
MAX_SKIPPED = 1000
"""Problems in a row that a run skips at most."""
BLOCK = 1000
"""Number of problems that are encoded together."""
SECONDS_BETWEEN_LINES = 5.0


def listed(environment: AnyEnvironment) -> tuple[list[Problem], bool]:
    """(training problems known before the run, whether there are no others)."""
    if isinstance(environment, DataEnvironment):
        return environment.training_problems, True
    if not isinstance(environment, MixedEnvironment):
        return [], False
    parts = [listed(part) for part in environment.environments.values()]
    return [problem for problems, _ in parts for problem in problems], all(is_whole for _, is_whole in parts)


def known_problems(environment: AnyEnvironment, sets: Sequence["EvaluationSet"]) -> list[Problem]:
    """All held-out problems, the listed ones, and the first of an endless source."""
    held_out = [problem for each in sets for problem in each.problems]
    problems, is_whole = listed(environment)
    return [*held_out, *problems, *([] if is_whole else map(environment.problem, range(FIRST)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The prompt is not empty and leaves room for a completion; what is trained on is short enough
    with its answer."""

    tokenizer: Tokenizer
    max_tokens: int
    longest_prompt: int | None  # in tokens; None: no completion of the problem is sampled
    longest_sample: int | None  # in tokens, with the answer; None: the answer is not trained
    may_be_empty: bool  # True for a task of episodes, whose first observation is checked when an episode begins
    with_all_answers: Callable[[Problem], list[Problem]]

    @classmethod
    def of(cls, config: "RunConfig", tokenizer: Tokenizer, environment: AnyEnvironment, *, is_sampled: bool) -> Self:
        has_episodes = isinstance(environment, EpisodeEnvironment)
        longest = config.trainer.max_sequence_length
        room = min(config.generator.max_model_len, longest) - config.max_tokens
        return cls(
            tokenizer=tokenizer,
            max_tokens=config.max_tokens,
            longest_prompt=room if is_sampled else None,
            longest_sample=longest if config.is_supervised and not has_episodes else None,
            may_be_empty=has_episodes,
            with_all_answers=config.with_all_answers,
        )

    def reasons(self, problems: Sequence[Problem]) -> list[str]:
        """Per problem why the run cannot take it, "" if it can. Raises ValueError if the tokenizer
        refuses one."""
        lengths = [len(tokens) for tokens in self.tokenizer.encode_prompts(problems)]
        found = [self._of_prompt(*pair) for pair in zip(problems, lengths, strict=True)]
        places = [place for place, text in enumerate(found) if not text and self.longest_sample is not None]
        answers = [self.with_all_answers(problems[place]) for place in places]
        for column in zip(*answers, strict=True):
            lengths = self.tokenizer.sample_lengths(column)
            for place, problem, length in zip(places, column, lengths, strict=True):
                found[place] = found[place] or self._of_sample(problem, length)
        return found

    def reason(self, problem: Problem) -> str:
        """Why the run cannot take the problem, "" if it can."""
        try:
            return self.reasons([problem])[0]
        except ValueError as error:
            return str(error)

    def _of_prompt(self, problem: Problem, length: int) -> str:
        if not self.may_be_empty and (length == 0 or not _has_text(problem)):
            return "the prompt is empty"
        if self.longest_prompt is not None and length > self.longest_prompt:
            room = f"with max_tokens={self.max_tokens} a prompt may have at most {self.longest_prompt}"
            return f"the prompt {problem.prompt[:80]!r} has {length} tokens, but {room}"
        return ""

    def _of_sample(self, problem: Problem, length: int) -> str:
        assert self.longest_sample is not None
        if length <= self.longest_sample:
            return ""
        return (
            f"the prompt {problem.prompt[:80]!r} and the answer {problem.answer[:80]!r} have {length} tokens, "
            f"but trainer.max_sequence_length={self.longest_sample}"
        )


def _has_text(problem: Problem) -> bool:
    if problem.messages:
        return any(text_of(message) for message in problem.messages if message["role"] != "assistant")
    return bool(problem.prompt)


def require_fitting(
    config: "RunConfig", tokenizer: Tokenizer, environment: AnyEnvironment, sets: Sequence["EvaluationSet"]
) -> None:
    """Raises ValueError, naming the place, for a known problem that the run cannot take, or if none
    of the first problems of an endless source fits."""
    progress = _Progress()
    for each in sets:
        held_out = Rule.of(config, tokenizer, each.environment, is_sampled=config.has_generator)
        _require_all(each.problems, held_out, progress)
    rule = Rule.of(config, tokenizer, environment, is_sampled=config.samples_problems)
    problems, is_whole = listed(environment)
    _require_all(problems, rule, progress)
    if not is_whole:
        reasons = [rule.reason(environment.problem(index)) for index in range(FIRST)]
        if all(reasons):
            raise ValueError(f"none of the first {FIRST} problems fits, the first one because {reasons[0]}")


def _require_all(problems: Sequence[Problem], rule: Rule, progress: "_Progress") -> None:
    for start in range(0, len(problems), BLOCK):
        progress.show(start, len(problems))
        block = problems[start : start + BLOCK]
        try:
            reasons = rule.reasons(block)
        except ValueError:  # to find the problem that the tokenizer refuses
            reasons = [rule.reason(problem) for problem in block]
        for problem, reason in zip(block, reasons, strict=True):
            if reason:
                raise ValueError(f"{problem.place}: {reason}" if problem.place else reason)


class _Progress:
    """Prints a line from time to time."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def show(self, done: int, total: int) -> None:
        if time.monotonic() >= self.last + SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            print(f"checking the problems: {done:,} of {total:,}", file=sys.stderr, flush=True)


class TrainingProblems:
    """The training problems by index, without those that the run cannot take. The text alone
    decides, so a resumed run skips the same."""

    def __init__(self, config: "RunConfig", tokenizer: Tokenizer, environment: AnyEnvironment) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.environment = environment
        self.num_skipped = 0  # since the last report
        self.news = ""  # a line about the first problem that was skipped, until the next report
        self._has_skipped = False
        before = config.held_out_before()
        self._held_out_before = before.digests if before else frozenset()

    @cached_property
    def rule(self) -> Rule | None:
        """None if all training problems were checked before the run."""
        if listed(self.environment)[1]:
            return None
        return Rule.of(self.config, self.tokenizer, self.environment, is_sampled=self.config.samples_problems)

    def take(self, cursor: int, count: int) -> tuple[list[int], int]:
        """A Take. Raises ValueError after MAX_SKIPPED unfit problems in a row."""
        if self.rule is None:
            return consecutive(cursor, count)
        indices: list[int] = []
        num_skipped = 0
        while len(indices) < count:
            reason = self._reason(self.environment.problem(cursor), self.rule)
            if not reason:
                indices.append(cursor)
            num_skipped = num_skipped + 1 if reason else 0
            self._note(cursor, reason)
            if num_skipped == MAX_SKIPPED:
                raise ValueError(
                    f"{MAX_SKIPPED} training problems in a row were skipped, problem {cursor} because {reason}"
                )
            cursor += 1
        return indices, cursor

    def _reason(self, problem: Problem, rule: Rule) -> str:
        if digest_of(problem.key) in self._held_out_before:
            return f"the run that made {self.config.trainer.hf_path} held out the problem {problem.key[:80]!r}"
        return rule.reason(problem)

    def _note(self, index: int, reason: str) -> None:
        if reason:
            self.num_skipped += 1
        if reason and not self._has_skipped:
            self._has_skipped = True
            self.news = f"training problem {index} was skipped: {reason}; problems/skipped counts such problems"

    def report(self) -> tuple[dict[str, float], str]:
        """(metrics since the last report, a line to print or "")."""
        num_skipped = self.num_skipped
        news = self.news
        self.num_skipped = 0
        self.news = ""
        return ({"problems/skipped": num_skipped} if num_skipped else {}), news
