"""The functions that score a completion: comparisons with the right answer, or a user's own."""

import functools
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from controllers.environments.base import Problem, Reward
from controllers.environments.config import EnvironmentConfig
from controllers.environments.judge import Judge
from controllers.environments.own_code import imported, require_takes
from controllers.environments.sandbox import Sandbox

Score = Callable[[Problem, str], Reward | Awaitable[Reward]]
"""(problem, completion) -> reward, or an awaitable of it."""

DELIMITED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
LATEX = re.compile(r"\\[A-Za-z]|\^|_\{")
COMMANDS = re.compile(r"\\(?:begin|end)\{[^{}]*\}|\\text\{[^{}]*\}|\\[A-Za-z]+")
WORDS = re.compile(r"[^\W\d_]{2,}")
NAME = re.compile(r"\\text\{([^{}]+)\}|([^\W\d_]{2,}(?: [^\W\d_]+)*)")
SPACE_OF_THOUSANDS = re.compile(r"(?<=\d) (?=\d{3}\b)")
LEAD_IN = re.compile(r"\bis\b|:")
NUMBER_WITH_SEPARATORS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def text_score(config: EnvironmentConfig) -> Score:
    """Raises ValueError if a user's function cannot be imported or takes other arguments."""
    if config.reward == "judge":
        return Judge(config=config.judge)
    if config.reward == "python":
        return Sandbox(config=config.sandbox)
    compares: dict[str, Callable[[str, str], Reward]] = {
        "exact_match": exact_match,
        "math_verify": math_verify,
        "regex": functools.partial(last_match, config.reward_pattern),
    }
    if config.reward in compares:
        return TextScore(compares[config.reward])
    compare = imported("reward", config.reward)
    require_takes(f"reward={config.reward!r}", compare, "answer", "completion")
    return TextScore(compare)


@dataclass(frozen=True, slots=True)
class TextScore:
    """Scores with a function of (answer, completion), which may be `async`."""

    compare: Callable[[str, str], Reward | Awaitable[Reward]]

    def __call__(self, problem: Problem, completion: str) -> Reward | Awaitable[Reward]:
        return self.compare(problem.answer, completion)


def exact_match(answer: str, completion: str) -> float:
    return float(completion.strip() == answer.strip())


def math_verify(answer: str, completion: str) -> float:
    """1.0 for the same mathematical value, such as "0.5" and "$\\frac{1}{2}$"; else 0.0."""
    from math_verify import verify

    name = _name(answer)
    if name is not None and name in map(_name, _candidates(completion)):
        return 1.0
    return float(verify(list(gold_values(answer)), _values(completion), timeout_seconds=_timeout()))


@functools.lru_cache(maxsize=4096)
def gold_values(answer: str) -> tuple:
    """The values of a right answer, or (): r"2\\sqrt{3}" -> (2*sqrt(3), "2\\sqrt{3}")"""
    name = _name(answer)
    # without \text, LaTeX reads a name as a product of letters, equal to its anagrams
    values = _values(answer, is_gold=True) if name is None else _parse(rf"$\text{{{name}}}$")
    return tuple(values) if any(not isinstance(value, str) for value in values) else ()


def _name(text: str) -> str | None:
    """A text of words alone, in lower case, else None. The first has two letters or more."""
    found = NAME.fullmatch(text.strip())
    return (found[1] or found[2]).lower() if found else None


def _values(text: str, *, is_gold: bool = False) -> list:
    """LaTeX without delimiters is read as LaTeX, whole. Of equations without LaTeX, such as
    "16-7=9, 9*2=18", the last number counts, too."""
    values: list = []
    if not DELIMITED.search(text):
        for candidate in _candidates(text):
            if _is_bare_math(candidate) and (values := _parse(f"${candidate}$")):
                if is_gold or LATEX.search(candidate) or "=" not in candidate:
                    return values
                break
    return [*values, *_parse(text)]


def _candidates(text: str) -> list[str]:
    """What follows "is" or a colon in the last line, and the whole text, without Markdown."""
    whole = text.strip()
    last_line = (whole.splitlines() or [""])[-1]
    *_, rest = found = LEAD_IN.split(last_line)
    ends = [rest.strip().rstrip(".!").strip("*` ")] if len(found) > 1 else []
    return [SPACE_OF_THOUSANDS.sub("", each) for each in (*ends, whole.strip("*`"))]


def _is_bare_math(text: str) -> bool:
    """True for one line whose only words are LaTeX's commands and those in \\text."""
    return bool(text) and "\n" not in text and not WORDS.search(COMMANDS.sub(" ", text))


def _parse(text: str) -> list:
    from math_verify import parse

    return parse(text, parsing_timeout=_timeout())


def _timeout() -> int | None:
    # math_verify's timeout uses SIGALRM, which only the main thread can handle
    return 5 if threading.current_thread() is threading.main_thread() else None


def last_match(pattern: str, answer: str, completion: str) -> float:
    """1.0 if the last matches in completion and answer, or the whole answer, are equal, else 0.0.

    The first group that took part is compared, without thousands separators.
    """
    found = _last_found(pattern, completion)
    expected = _last_found(pattern, answer)
    if expected is None:
        expected = _without_separators(answer.strip())
    return float(bool(found) and found == expected)


def _last_found(pattern: str, text: str) -> str | None:
    found = None
    for match in re.finditer(pattern, text):
        groups = [group for group in match.groups() if group is not None]
        if groups or not match.re.groups:
            found = groups[0] if groups else match.group()
    return None if found is None else _without_separators(found.strip())


def _without_separators(text: str) -> str:
    return text.replace(",", "") if NUMBER_WITH_SEPARATORS.fullmatch(text) else text
