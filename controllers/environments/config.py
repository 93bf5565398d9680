"""Config fields that choose a task, its reward and its held-out problems."""

import json
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from tyro.constructors import PrimitiveConstructorSpec

from controllers.environments.files import FORMATS_TEXT, is_data_file
from controllers.environments.judge import JudgeConfig
from controllers.environments.sandbox import CLOCK_FACTOR, SandboxConfig
from rl_actors.field_types import require_field_types

REWARDS = ("exact_match", "math_verify", "regex", "task", "judge", "python")
LIMITS_OF_RUN = ("reward_workers", "reward_timeout", "reward_retries", "reward_concurrency")
"""Fields that apply to all rewards of a run. Only the field `environment` of a run's config can set them. The tasks of a mixture and the
environments in the field `validation` cannot."""


def _json_field(kind: type) -> PrimitiveConstructorSpec:
    """The rule by which tyro, the command-line parser, reads a flag whose value is JSON of type `kind`."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda args: json.loads(args[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [json.dumps(value)],
    )


@dataclass(kw_only=True)
class EnvironmentConfig:
    task: str = "basic_arithmetic"
    """The source of the problems: a reasoning-gym task; a .jsonl, .json, .csv, .tsv or .parquet file; a Hugging Face
    data set; or a function as module:function. A data set is given by a directory or by an id. Both must contain a slash. If
    `mixture` is set, `task` is not used."""
    options: Annotated[dict[str, object], _json_field(dict)] = field(default_factory=dict)
    """Arguments of the reasoning-gym task, of the user's function, or of `datasets.load_dataset` for a Hugging Face
    data set. The flag takes one JSON object, which replaces all default options."""
    mixture: Annotated[list[dict[str, object]], _json_field(list)] = field(default_factory=list)
    """Several tasks instead of one task. The flag takes a JSON list with one object for each task. An object has "task"
    and other fields of this config. A field that an object leaves out has this config's value. The field num_held_out
    is an exception: an object that leaves it out gets a part of this config's value, in proportion to its weight. An
    object may also have a "name", and a "weight" (default 1). The number of a task's training problems is proportional
    to its weight."""
    prompt_column: str = "prompt"
    """Column of the prompt in a file or a data set."""
    answer_column: str = "answer"
    """Column of the answer in a file or a data set."""
    rejected_column: str = ""
    """Column of an answer that is worse than the answer in answer_column, in a file or a data set. controllers.dpo
    trains on pairs of these two answers."""
    messages_column: str = "messages"
    """Column of a conversation in a file or a data set: a list of {"role": …, "content": …}, of which all fields reach
    the template; "weight" says how much a turn of the assistant is trained. This column is used if a
    row of the data has no prompt column. The model's chat template then makes the prompt from the conversation. If the
    row has no answer column either, and the last message has the role assistant, this message is the answer."""
    tools_column: str = "tools"
    """Column of the tools that the chat template shows beside the conversation: a list of descriptions, or its JSON."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    held_out_task: str = ""
    """Another file or data set, from which at most num_held_out held-out problems are taken. A held-out problem is not
    trained on, even if the data of `task` also has it. Empty: the held-out problems are taken from the data of
    `task`."""
    held_out_split: str = ""
    """Split of held_out_task from which the held-out problems are taken. If held_out_task is empty, this is a split of
    `task`. Empty: the split that `split` names."""
    prompt: str = "{question}"
    """Template of the prompt, e.g. "{expression}=". `{question}` stands for the prompt in the data. The template may
    also use the keys of the problem's metadata. If the task is a file or a data set, these keys are the other
    columns."""
    remove_whitespace: bool = False
    """Remove all whitespace from the prompt ("12 + 34=" becomes "12+34="). A character tokenizer then needs fewer tokens."""
    prompt_pattern: str = ""
    """Regular expression that the whole prompt must match, e.g. "\\d\\d\\+\\d\\d=". A problem whose prompt does not match is left out. Empty: no
    problem is left out."""
    reward: str = "exact_match"
    """Rule that scores a completion. exact_match compares completion and answer without surrounding whitespace.
    math_verify compares their mathematical values. regex compares the last match of reward_pattern in the completion
    with the last match in the answer. task uses the score of the reasoning-gym task. judge asks another model. python
    runs the program in the completion, and then the tests in the answer. module:function calls your function(answer,
    completion), which returns a number. A task that is module:function has its own reward and does not use
    this field."""
    reward_pattern: str = ""
    """For the reward regex: a regular expression. The reward compares the first group of a match. If the pattern has no
    group, the reward compares the whole match. If the answer has no match, its whole text is compared."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """For the reward judge: the model that judges, and its prompt."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """For the reward python: limits of the program."""
    reward_workers: int = 0
    """Number of processes that call the reward functions. Slow functions then run at the same time in several
    processes, and the controller goes on meanwhile. 0: the controller calls the functions itself. The controller always
    calls `async` functions itself."""
    reward_timeout: float = 60.0
    """Seconds in which a reward function must return. A function that takes longer is called again. The limit holds for
    `async` functions and, if reward_workers is above 0, for all other functions, too."""
    reward_retries: int = 2
    """How often a reward function is called again if it fails or takes too long. If the last call fails, too, the run
    ends. If reward_workers is 0, only `async` functions are called again."""
    reward_concurrency: int = 64
    """Largest number of calls of `async` reward functions that run at the same time."""
    num_held_out: int = 512
    """Number of distinct problems that are used for validation and never for training. If held_out_task or
    held_out_split is set, there may be fewer. A named validation set from a file or a data set may also have fewer."""
    seed: int = 0
    """Seed of the problems, of their order, and of the choice of the held-out problems."""
    held_out_seed: int | None = None
    """Seed of the choice of the held-out problems alone. None: `seed`; a run that starts from an export of another run
    takes that run's."""

    @property
    def seed_of_held_out(self) -> int:
        return self.seed if self.held_out_seed is None else self.held_out_seed

    @property
    def has_own_held_out(self) -> bool:
        """True if the held-out problems come from another file, data set or split than the training problems."""
        return bool(self.held_out_task or self.held_out_split)

    def of_held_out(self) -> "EnvironmentConfig":
        """The config whose `task` and `split` are those of the held-out problems."""
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
        """The task with its options and its prompt pattern, for error texts."""
        text = f"task={self.task!r} with options={self.options}"
        return text + (f" and prompt_pattern={self.prompt_pattern!r}" if self.prompt_pattern else "")

    def data_files(self) -> list[str]:
        """The files and directories of this task, its parts and its held-out problems."""
        tasks = {self.task, self.held_out_task}
        for part in self.mixture:
            tasks |= {str(part.get("task", "")), str(part.get("held_out_task", ""))}
        return sorted(task for task in tasks if is_data_file(task) or ("/" in task and Path(task).is_dir()))

    def validate(self) -> None:
        """Raises ValueError for a wrong value that can be found without reading the data of the task.

        `build_environment` reads the data and finds all other wrong values.
        """
        if self.num_held_out < 1:
            raise ValueError(f"num_held_out={self.num_held_out}; it must be at least 1")
        if not isinstance(self.options, dict):
            raise ValueError(f"options={self.options!r} is not a JSON object")
        if not isinstance(self.mixture, list):
            raise ValueError(f"mixture={self.mixture!r} is not a JSON list")
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
        if not 0 < self.reward_timeout < math.inf:
            raise ValueError(f"reward_timeout={self.reward_timeout}; it must be finite and above 0")
        if self.reward_retries < 0 or self.reward_concurrency < 1:
            given = f"reward_retries={self.reward_retries}, reward_concurrency={self.reward_concurrency}"
            raise ValueError(f"{given}; the first must be at least 0, the second at least 1")
        if self.reward_workers < 0:
            raise ValueError(f"reward_workers={self.reward_workers}; it must be at least 0")
        self.sandbox.validate()
        if self.reward == "python" and self.sandbox.seconds >= self.reward_timeout:
            # A program that sleeps is killed only after sandbox.seconds. With a shorter reward_timeout its reward would
            # time out in every attempt, and the run would end.
            raise ValueError(
                f"reward_timeout={self.reward_timeout:g}; it must be above {self.sandbox.seconds}, the wall-clock seconds that "
                f"a program may take ({CLOCK_FACTOR} times sandbox.cpu_seconds={self.sandbox.cpu_seconds})"
            )
        if self.reward == "judge":
            self.judge.validate()
        require_field_types(self)

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
