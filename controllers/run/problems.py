"""Which problems a run can take: checked before the run, but skipped if a source is endless."""

import sys
import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

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

FIRST = 1000  # problems of an endless source that are looked at before a run
MAX_SKIPPED = 1000  # in a row
BLOCK = 1000  # problems that are encoded together
SECONDS_BETWEEN_LINES = 5.0  # about the progress


def listed(environment: AnyEnvironment) -> tuple[list[Problem], bool]:
    """(training problems before the run, whether there are no others)."""
    if isinstance(environment, DataEnvironment):
        return environment.training_problems, True
    if not isinstance(environment, MixedEnvironment):
        return [], False
    parts = [listed(part) for part in environment.environments.values()]
    return [problem for problems, _ in parts for problem in problems], all(is_whole for _, is_whole in parts)


def known_problems(environment: AnyEnvironment, sets: Sequence["EvaluationSet"]) -> list[Problem]:
    """All held-out problems, the listed ones, and the first of an endless source."""
    held_out = [problem for one in sets for problem in one.problems]
    problems, is_whole = listed(environment)
    return [*held_out, *problems, *([] if is_whole else map(environment.problem, range(FIRST)))]


class Rule:
    """A prompt is not empty and leaves room for a completion, and for an answer to train on."""

    def __init__(
        self, config: "RunConfig", tokenizer: Tokenizer, environment: AnyEnvironment, *, is_sampled: bool
    ) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = config.max_tokens
        self.with_all_answers = config.with_all_answers
        # the first observation of an episode is checked when it begins
        self.may_be_empty = isinstance(environment, EpisodeEnvironment)
        longest = config.trainer.max_sequence_length
        room = min(config.generator.max_model_len, longest) - config.max_tokens
        # in tokens; None: no completion of the problem is sampled, or its answer is not trained
        self.longest_prompt = room if is_sampled else None
        self.longest_sample = longest if config.is_supervised and not self.may_be_empty else None

    def reasons(self, problems: Sequence[Problem]) -> list[str]:
        """By problem, "" if the run can take it. Raises ValueError if the tokenizer refuses one."""
        lengths = [len(tokens) for tokens in self.tokenizer.encode_prompts(problems)]
        reasons = [self._of_prompt(*pair) for pair in zip(problems, lengths, strict=True)]
        indices = [index for index, text in enumerate(reasons) if not text and self.longest_sample is not None]
        answers = [self.with_all_answers(problems[index]) for index in indices]
        for column in zip(*answers, strict=True):
            lengths = self.tokenizer.sample_lengths(column)
            for index, problem, length in zip(indices, column, lengths, strict=True):
                reasons[index] = reasons[index] or self._of_sample(problem, length)
        return reasons

    def reason(self, problem: Problem) -> str:
        """`reasons` of one; a text, too, if the tokenizer refuses it."""
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
    """Raises ValueError, naming its file and line, for a problem that the run cannot take, or if
    none of the first of an endless source fits."""
    for held_out in sets:
        rule = Rule(config, tokenizer, held_out.environment, is_sampled=config.has_generator)
        _require_all(held_out.problems, rule)
    rule = Rule(config, tokenizer, environment, is_sampled=config.samples_problems)
    problems, is_whole = listed(environment)
    _require_all(problems, rule)
    if not is_whole:
        reasons = [rule.reason(environment.problem(index)) for index in range(FIRST)]
        if all(reasons):
            raise ValueError(f"none of the first {FIRST} problems fits, the first one because {reasons[0]}")


def _require_all(problems: Sequence[Problem], rule: Rule) -> None:
    said = time.monotonic()
    for start in range(0, len(problems), BLOCK):
        if time.monotonic() >= said + SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            print(f"checking the problems: {start:,} of {len(problems):,}", file=sys.stderr, flush=True)
        block = problems[start : start + BLOCK]
        try:
            reasons = rule.reasons(block)
        except ValueError:  # to find the problem that the tokenizer refuses
            reasons = [rule.reason(problem) for problem in block]
        for problem, reason in zip(block, reasons, strict=True):
            if reason:
                raise ValueError(f"{problem.place}: {reason}" if problem.place else reason)


class TrainingProblems:
    """Without those that the run cannot take. Their text decides, so a resumed run skips the same."""

    def __init__(self, config: "RunConfig", tokenizer: Tokenizer, environment: AnyEnvironment) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.environment = environment
        self.num_skipped = 0  # since the last report
        self.first_skipped = ""  # a line about the first problem that was skipped
        self._has_reported = False
        before = config.held_out_before()
        self._held_out_before = before.digests if before else frozenset()

    @cached_property
    def rule(self) -> Rule | None:
        """None if all training problems were checked before the run."""
        if listed(self.environment)[1]:
            return None
        return Rule(self.config, self.tokenizer, self.environment, is_sampled=self.config.samples_problems)

    def take(self, cursor: int, count: int) -> tuple[list[int], int]:
        """A Take. Raises ValueError after MAX_SKIPPED unfit problems in a row."""
        if self.rule is None:
            return consecutive(cursor, count)
        indices: list[int] = []
        num_in_a_row = 0
        while len(indices) < count:
            reason = self._reason(self.environment.problem(cursor), self.rule)
            if not reason:
                indices.append(cursor)
                num_in_a_row = 0
            else:
                num_in_a_row += 1
                self.num_skipped += 1
                self.first_skipped = self.first_skipped or f"training problem {cursor} was skipped: {reason}"
            if num_in_a_row == MAX_SKIPPED:
                raise ValueError(
                    f"{MAX_SKIPPED} training problems in a row were skipped, problem {cursor} because {reason}"
                )
            cursor += 1
        return indices, cursor

    def _reason(self, problem: Problem, rule: Rule) -> str:
        if digest_of(problem.key) in self._held_out_before:
            return f"the run that made {self.config.trainer.hf_path} held out the problem {problem.key[:80]!r}"
        return rule.reason(problem)

    def report(self) -> tuple[dict[str, float], str]:
        """(metrics since the last report, a line or "")."""
        metrics: dict[str, float] = {"problems/skipped": self.num_skipped} if self.num_skipped else {}
        is_news = self.first_skipped and not self._has_reported
        line = f"{self.first_skipped}; problems/skipped counts such problems" if is_news else ""
        self.num_skipped = 0
        self._has_reported = bool(self.first_skipped)
        return metrics, line
