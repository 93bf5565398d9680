"""Config fields that choose a task, its reward and its held-out problems."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

from controllers.environments.files import FORMATS_TEXT, is_data_file
from controllers.environments.judge import JudgeConfig
from controllers.environments.sandbox import CLOCK_FACTOR, SandboxConfig
from rl_actors.field_types import CountingInt, NaturalInt, PositiveFloat, require_field_types

REWARDS = ("exact_match", "math_verify", "regex", "task", "judge", "python")
LIMITS_OF_RUN = ("reward_workers", "reward_timeout", "reward_retries", "reward_concurrency")
"""Fields that no part of a mixture and no entry of `evaluation` sets."""


def json_field(
    kind: type, load: Callable[[str], Any] = json.loads, dump: Callable[[Any], str] = json.dumps
) -> PrimitiveConstructorSpec:
    """How tyro reads a flag whose value is JSON of type `kind`."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda args: load(args[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [dump(value)],
    )


@dataclass(kw_only=True)
class EnvironmentConfig:
    task: str = "basic_arithmetic"
    """A reasoning-gym task, a .jsonl, .json, .csv, .tsv or .parquet file, a Hugging Face data set
    (directory or id, with a slash), or module:function. Unused with `mixture`."""
    options: Annotated[dict[str, object], json_field(dict)] = field(default_factory=dict)
    """Arguments of the reasoning-gym task, of your function or of `datasets.load_dataset`. The JSON
    object replaces all default options."""
    mixture: Annotated[list[dict[str, object]], json_field(list)] = field(default_factory=list)
    """Several tasks: a JSON list of objects with "task" and optionally "name", "weight" (default 1)
    and fields of this config, whose values are the defaults; num_held_out is shared by weight."""
    prompt_column: str = "prompt"
    """Column of the prompt in a file or a data set."""
    answer_column: str = "answer"
    """Column of the answer in a file or a data set."""
    rejected_column: str = ""
    """Column of the rejected answer, for controllers.dpo; answer_column has the chosen one."""
    messages_column: str = "messages"
    """Column of a conversation, for rows without a prompt column: a list of {"role": …, "content":
    …}. An assistant's "weight" scales its loss. Without answer column its last message counts."""
    tools_column: str = "tools"
    """Column of the tools for the chat template: a list of descriptions, or its JSON."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    held_out_task: str = ""
    """File or data set of at most num_held_out held-out problems. Empty: `task`."""
    held_out_split: str = ""
    """Split of held_out_task, or of `task` if that is empty. Empty: `split`."""
    prompt: str = "{question}"
    """Template of the prompt, e.g. "{expression}=". {question} is the prompt in the data; the other
    keys are the metadata or other columns."""
    remove_whitespace: bool = False
    """Remove all whitespace from the prompt, so that a character tokenizer needs fewer tokens."""
    prompt_pattern: str = ""
    """Regular expression that a whole prompt must match, e.g. "\\d\\d=", or the problem is left out."""
    reward: str = "exact_match"
    """exact_match ignores surrounding whitespace. math_verify compares mathematical values, regex
    the last matches of reward_pattern. task is the reasoning-gym score. judge asks a model. python
    runs the completion's program, then the tests in the answer. module:function is your
    function(answer, completion) -> number. Unused if `task` is module:function."""
    reward_pattern: str = ""
    """For the reward regex, which compares a match's first group, or the match if it has none. An
    answer without a match is compared whole."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """For the reward judge."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """For the reward python."""
    reward_workers: NaturalInt = 0
    """Processes that call reward functions. 0, or for `async` functions: the controller does."""
    reward_timeout: PositiveFloat = 60.0
    """Seconds for a call of an `async` function, or of any with reward_workers; then it is retried."""
    reward_retries: NaturalInt = 2
    """Retries of such a call that failed or timed out, before the run ends."""
    reward_concurrency: CountingInt = 64
    """Concurrent calls of `async` reward functions."""
    num_held_out: CountingInt = 512
    """Distinct problems for evaluation, never trained on; fewer if a held-out set has fewer."""
    seed: int = 0
    """Seed of the problems, their order and the choice of the held-out problems."""
    held_out_seed: int | None = None
    """Seed of the choice of held-out problems. None: `seed`, or that of the exported run."""

    @property
    def seed_of_held_out(self) -> int:
        return self.seed if self.held_out_seed is None else self.held_out_seed

    @property
    def has_own_held_out(self) -> bool:
        return bool(self.held_out_task or self.held_out_split)

    def of_held_out(self) -> "EnvironmentConfig":
        return replace(self, task=self.held_out_task or self.task, split=self.held_out_split or self.split)

    @property
    def is_file(self) -> bool:
        return is_data_file(self.task)

    @property
    def is_function(self) -> bool:
        return ":" in self.task and not self.is_file

    @property
    def is_dataset(self) -> bool:
        return "/" in self.task and not self.is_file and not self.is_function

    @property
    def source(self) -> str:
        """Names the task in error texts."""
        text = f"task={self.task!r} with options={self.options}"
        return text + (f" and prompt_pattern={self.prompt_pattern!r}" if self.prompt_pattern else "")

    def data_files(self) -> list[str]:
        """The files and directories of this task, its parts and its held-out problems."""
        tasks = {self.task, self.held_out_task}
        for part in self.mixture:
            tasks |= {str(part.get("task", "")), str(part.get("held_out_task", ""))}
        return sorted(task for task in tasks if is_data_file(task) or ("/" in task and Path(task).is_dir()))

    def validate(self) -> None:
        """Raises ValueError for what is wrong whatever the data; `build_environment` reads them."""
        require_field_types(self)
        for name in ("prompt_pattern", "reward_pattern"):
            try:
                re.compile(getattr(self, name))
            except re.error as error:
                raise ValueError(f"{name}={getattr(self, name)!r} is not a regular expression: {error}") from None
        self._validate_reward()
        if self.mixture:
            if self.has_own_held_out:
                raise ValueError(
                    "a mixture takes neither held_out_task nor held_out_split; the parts of the mixture may have them"
                )
            return
        if not self.task:
            raise ValueError(
                "environment.task is empty: --task takes a reasoning-gym task, a file, a Hugging Face data set or module:function"
            )
        if self.reward == "task" and (self.is_file or self.is_function or self.is_dataset):
            raise ValueError(f"reward='task' needs a reasoning-gym task, but task={self.task!r}")
        if Path(self.task).is_file() and not self.is_file:
            raise ValueError(f"task={self.task!r} is a file of an unknown format; the formats are {FORMATS_TEXT}")
        if self.is_file and not Path(self.task).is_file():
            raise ValueError(f"task={self.task!r} is not a file")
        if self.has_own_held_out:
            self._validate_own_held_out()

    def _validate_reward(self) -> None:
        if (self.reward == "regex") != bool(self.reward_pattern):
            raise ValueError(
                f"reward={self.reward!r} with reward_pattern={self.reward_pattern!r}; the reward regex needs a pattern, and no other "
                "reward takes one"
            )
        if self.reward not in REWARDS and ":" not in self.reward:
            raise ValueError(f"reward={self.reward!r}; it must be one of {', '.join(REWARDS)}, or module:function")
        if self.reward == "python" and self.sandbox.seconds >= self.reward_timeout:
            # a sleeping program is killed only after sandbox.seconds: a shorter timeout would fail
            # every attempt
            raise ValueError(
                f"reward_timeout={self.reward_timeout:g}; it must be above {self.sandbox.seconds}, the wall-clock seconds that "
                f"a program may take ({CLOCK_FACTOR} times sandbox.cpu_seconds={self.sandbox.cpu_seconds})"
            )
        if self.reward == "judge":
            self.judge.validate()

    def _validate_own_held_out(self) -> None:
        given = f"held_out_task={self.held_out_task!r}, held_out_split={self.held_out_split!r}"
        if not (self.is_file or self.is_dataset):
            raise ValueError(f"{given} with task={self.task!r}; only a file or a data set can have them")
        other = self.of_held_out()
        if not (other.is_file or other.is_dataset):
            raise ValueError(f"{given}; held_out_task must be a file or a data set")
        if other.is_file and self.held_out_split:
            raise ValueError(f"{given}; the file {other.task} has no splits")
        if other.is_file and not Path(other.task).is_file():
            raise ValueError(f"held_out_task={self.held_out_task!r} is not a file")
        if (other.task, other.split) == (self.task, self.split):
            raise ValueError(
                f"{given}; these are the problems of task={self.task!r} itself; leave both fields empty to hold out num_held_out of them"
            )
