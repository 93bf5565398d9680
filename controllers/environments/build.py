"""Builds the environment that a config describes."""

from controllers.environments.base import Environment
from controllers.environments.config import EnvironmentConfig
from controllers.environments.data import DataEnvironment
from controllers.environments.episode import AnyEnvironment, EpisodeEnvironment
from controllers.environments.generated import reasoning_gym
from controllers.environments.mixture import MixedEnvironment, read_parts
from controllers.environments.own_code import called, require_problems, require_takes


def build_environment(config: EnvironmentConfig, *, trains: bool = True) -> AnyEnvironment:
    """Raises ValueError for an unknown task or option, a bad row, or too few problems.

    trains=False: evaluation only, so all problems of a file or a data set may be held out.
    """
    config.validate()
    if config.mixture:
        parts = read_parts(config)
        environments: list[Environment] = []
        for part in parts:
            try:
                environment = build_environment(part.config, trains=trains)
                if not isinstance(environment, Environment):
                    raise ValueError(
                        f"task={part.config.task!r} is played in episodes; a mixture takes only tasks that score one completion "
                        "with a method reward()"
                    )
                environments.append(environment)
            except ValueError as error:
                raise ValueError(f"mixture, {part.name}: {error}") from None
        return MixedEnvironment(parts, environments, config.seed)
    if config.is_file or config.is_dataset:
        return DataEnvironment(config, trains=trains)
    if config.is_function:
        return _of_function(config, trains=trains)
    return reasoning_gym(config)


def _of_function(config: EnvironmentConfig, *, trains: bool) -> AnyEnvironment:
    """What config.task returns. Raises ValueError if it fails, or for wrong methods or problems."""
    arguments = {"seed": config.seed, "num_held_out": config.num_held_out, **config.options}
    environment = called("task", config.task, **arguments)
    if not isinstance(environment, Environment | EpisodeEnvironment):
        missing = [name for name in ("problem", "held_out", "reward") if not hasattr(environment, name)]
        raise ValueError(
            f"task={config.task!r} returned {type(environment).__name__} without {', '.join(missing)}; it needs the methods "
            "problem, held_out and reward, or for episodes problem, held_out and episode"
        )
    name = f"task={config.task!r}"
    require_takes(f"{name}: problem", environment.problem, "index")
    require_takes(f"{name}: held_out", environment.held_out)
    if isinstance(environment, Environment):
        require_takes(f"{name}: reward", environment.reward, "problem", "completion")
    else:
        require_takes(f"{name}: episode", environment.episode, "problem")
    if (scores_group := getattr(environment, "rewards", None)) is not None:
        require_takes(f"{name}: rewards", scores_group, "problem", "completions")
    require_problems(name, environment, trains=trains)
    return environment
