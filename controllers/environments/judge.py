"""A reward by another model, the judge, on an OpenAI-compatible server."""

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from controllers.environments.base import Problem

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@dataclass(kw_only=True)
class JudgeConfig:
    url: str = ""
    """Server up to /v1, e.g. http://localhost:8000/v1. OPENAI_API_KEY has its key."""
    model: str = ""
    """The judge's name on the server."""
    prompt: str = (
        "Question: {question}\nRight answer: {answer}\nAnswer of a student: {completion}\n\n"
        'How good is the answer of the student? End with a line "score: N", with N from 0 to 10.'
    )
    """Request, with {question} (metadata["question"], else the prompt), {answer} and {completion}."""
    pattern: str = r"score:\s*(\d+(?:\.\d+)?)"
    """Regular expression of the score: the first group of the last match in the judge's answer."""
    best_score: float = 10.0
    """Score whose reward is 1; scores are divided by it."""

    def validate(self) -> None:
        if not re.match(r"https?://", self.url) or not self.model:
            raise ValueError(
                f"judge.url={self.url!r}, judge.model={self.model!r}; the reward judge needs both, and judge.url must begin with http:// "
                "or https://"
            )
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"judge.pattern={self.pattern!r} is not a regular expression: {error}") from None
        if groups < 1:
            raise ValueError(f"judge.pattern={self.pattern!r} has no group; its first group must be the score")
        if not self.best_score > 0:
            raise ValueError(f"judge.best_score={self.best_score}; it must be above 0")
        try:
            self.prompt.format(question="", answer="", completion="")
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
            raise ValueError(
                f"judge.prompt={self.prompt!r}: {error}; the prompt may use question, answer and completion"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    config: JudgeConfig
    clients: "list[AsyncOpenAI]" = field(default_factory=list)  # made by the first call

    async def __call__(self, problem: Problem, completion: str) -> float:
        """Raises openai's errors, and ValueError without a score, or one above best_score."""
        from openai import AsyncOpenAI

        if not self.clients:
            key = os.environ.get("OPENAI_API_KEY", "none")  # a local server needs no key
            self.clients.append(AsyncOpenAI(base_url=self.config.url, api_key=key, max_retries=0))
        question = str(problem.metadata.get("question", problem.prompt))
        request = self.config.prompt.format(question=question, answer=problem.answer, completion=completion)
        response = await self.clients[0].chat.completions.create(
            model=self.config.model, messages=[{"role": "user", "content": request}], temperature=0.0
        )
        text = response.choices[0].message.content or ""
        found = re.findall(self.config.pattern, text)
        if not found:
            raise ValueError(f"the judge gave no score: {text[:200]!r}")
        last = found[-1] if isinstance(found[-1], str) else found[-1][0]
        if float(last) > self.config.best_score:
            raise ValueError(f"the judge gave {last}, above judge.best_score={self.config.best_score}: {text[:200]!r}")
        return float(last) / self.config.best_score
