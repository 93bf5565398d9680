"""Builds the environment that a config describes."""

from controllers.environments.base import AnyEnvironment, Environment, EpisodeEnvironment, Problem
from controllers.environments.config import EnvironmentConfig
from controllers.environments.data import DataEnvironment
from controllers.environments.generated import reasoning_gym
from controllers.environments.mixture import MixedEnvironment, Part, read_parts
from controllers.environments.own_code import imported, require_takes, tried


def build_environment(config: EnvironmentConfig, *, trains: bool = True) -> AnyEnvironment:
    """Raises ValueError for an unknown task or option, a bad row, or too few problems. trains=False:
    evaluation only, so all problems of a file or a data set may be held out."""
    config.validate()
    if config.mixture:
        parts = read_parts(config)
        return MixedEnvironment(parts, [_of_part(part, trains=trains) for part in parts], config.seed)
    if config.is_file or config.is_dataset:
        return DataEnvironment(config, trains=trains)
    if config.is_function:
        return _of_function(config, trains=trains)
    return reasoning_gym(config)


def _of_part(part: Part, *, trains: bool) -> Environment:
    try:
        environment = build_environment(part, trains=trains)
        if not isinstance(environment, Environment):
            raise ValueError(
                f"task={part.task!r} is played in episodes; a mixture takes only tasks that score one completion with a method reward()"
            )
    except ValueError as error:
        raise ValueError(f"mixture, {part.name}: {error}") from None
    return environment


def _of_function(config: EnvironmentConfig, *, trains: bool) -> AnyEnvironment:
    """What config.task returns. Raises ValueError if it fails, or for wrong methods or problems."""
    name = f"task={config.task!r}"
    arguments = {"seed": config.seed, "num_held_out": config.num_held_out, **config.options}
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    environment = tried(f"{name} called with {given}:", imported("task", config.task), **arguments)
    if not isinstance(environment, Environment | EpisodeEnvironment):
        missing = [method for method in ("problem", "held_out", "reward") if not hasattr(environment, method)]
        raise ValueError(
            f"{name} returned {type(environment).__name__} without {', '.join(missing)}; it needs the methods "
            "problem, held_out and reward, or for episodes problem, held_out and episode"
        )
    require_takes(f"{name}: problem", environment.problem, "index")
    require_takes(f"{name}: held_out", environment.held_out)
    if isinstance(environment, Environment):
        require_takes(f"{name}: reward", environment.reward, "problem", "completion")
    else:
        require_takes(f"{name}: episode", environment.episode, "problem")
    if (scores_group := getattr(environment, "rewards", None)) is not None:
        require_takes(f"{name}: rewards", scores_group, "problem", "completions")
    held_out = tried(f"{name}: held_out() raised", environment.held_out)
    if not isinstance(held_out, list) or not held_out:
        raise ValueError(f"{name}: held_out() returned {held_out!r}, not a list of at least one problem")
    keys: set[str] = set()
    for problem in held_out:
        _require_problem(f"{name}: held_out()", problem)
        if problem.key in keys:
            raise ValueError(f"{name}: held_out() returned two problems with the key {problem.key!r}")
        keys.add(problem.key)
    if trains:
        _require_problem(f"{name}: problem(0)", tried(f"{name}: problem(0) raised", environment.problem, 0))
    return environment


def _require_problem(where: str, problem: object) -> None:
    if not isinstance(problem, Problem):
        raise ValueError(f"{where} gave {problem!r}, not a Problem")
    for name in ("prompt", "answer", "key"):
        value = getattr(problem, name)
        if not isinstance(value, str):
            raise ValueError(f"{where} gave a problem whose {name} is {type(value).__name__} {value!r}, not text")
