"""Command line of a run: flags -> a checked config and the run's folder.
It starts no process, and writes no file but downloaded models.
"""

import difflib
import os
import shlex
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from controllers import config_file
from controllers.observe.run_folder import RunFolder
from controllers.program import help
from controllers.run.config import RunConfig

FIXED_ON_RESUME = ("seed", "environment", "chat", "alphabet", "sft_steps", "trainer.model", "trainer.hf_path")
"""Otherwise weights might not fit, or held-out problems might have been trained on."""

FIELDS_OF_TASK = (
    *("options", "split", "held_out_task", "held_out_split", "mixture"),
    *("prompt", "remove_whitespace", "prompt_pattern", "reward", "reward_pattern"),
)
"""Fields of the environment that describe one task."""

Configs = Mapping[str, Callable[[], RunConfig]]
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""A flag without a value."""


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """Train, or check, plan or evaluate a run."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    config_name: Annotated[str, tyro.conf.arg(name="config")]
    """Name of a config, or a .json, .yaml or .toml file."""
    output_dir: Path
    """Folder of the run, by default runs/<config>-<time>."""
    resume: Path | None = None
    """Continue the run of this folder from its newest complete checkpoint."""
    eval_only: Path | None = None
    """Score the checkpoint in this folder, or the newest checkpoint of the run in this folder, and
    stop. If --config is left out, the config of the checkpoint's run is used.
    """
    save_config: Path | None = None
    """Write the config to this .json or .yaml file before the run."""
    dry_run: Switch = False
    """Check everything, print the config and stop."""
    plan: Switch = False
    """Print the parallel layout, the memory of a rank and where each process runs, and stop."""
    cache_dir: Path | None = None
    """Folder of compiled kernels, which later runs find; by default RL_ACTORS_CACHE, or rl_actors in
    the user's cache."""
    verbose: Switch = False
    """Show the logs of libraries and actors also on the terminal, not only in files."""


def parse(
    prog: str,
    configs: Configs,
    argv: Sequence[str] | None = None,
    configs_by_controller: Mapping[str, Configs] | None = None,
    program: type[Invocation] = Invocation,
) -> Invocation:
    """`prog`: how the user starts the program. `--config` names one of `configs` (default: the first)
    or a file; dotted flags edit its fields. configs_by_controller: for an error text. program: has
    the other flags. Exits with status 2 and a message, or 0 after `--help`.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        return _parse(prog, configs, argv, configs_by_controller or {}, program)
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(2)


def _parse(
    prog: str,
    configs: Configs,
    argv: list[str],
    configs_by_controller: Mapping[str, Configs],
    program: type[Invocation],
) -> Invocation:
    chosen = _chosen(prog, argv)
    name, base = _base(chosen, configs, configs_by_controller)
    before = config_file.leaves_of(base)
    if chosen.algorithm:
        _apply_preset(base, chosen.algorithm)
    folder = chosen.resume or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    defaults = program(config=base, config_name=name, output_dir=folder)
    if (group := help.asked(argv)) is not None:
        help.show(prog, defaults, group, configs)
    argv = _without_short_flags(argv, base.short_flags)
    if not (chosen.resume or chosen.eval_only):
        _drop_options_of_other_task(base, argv)
    flags, unknown = tyro.cli(program, default=defaults, prog=prog, args=argv, return_unknown_args=True)
    if unknown:
        raise ValueError(help.unknown(unknown, defaults))
    config = flags.config.with_local_models()
    if chosen.resume:
        if flags.output_dir.resolve() != folder.resolve():
            raise ValueError(
                f"--output-dir {flags.output_dir} is another folder, but --resume {folder} continues the run in its own folder; "
                "leave out --output-dir"
            )
        _require_same(before, config_file.leaves_of(config))
    config.validate()
    if flags.save_config:
        config_file.require_format("--save-config", flags.save_config)
    # --plan and --eval-only write nothing to output_dir, --dry-run nothing to a default one
    writes = chosen.resume or flags.output_dir != folder or not flags.dry_run
    if writes and not (flags.plan or flags.eval_only):
        require_writable("--output-dir", flags.output_dir)
        if not chosen.resume and RunFolder(flags.output_dir).holds_run:
            command = f"{prog} --resume {shlex.quote(str(flags.output_dir))}"
            raise ValueError(f"{flags.output_dir} holds a run; to continue it: {command}")
    return replace(flags, config=config, config_name=name)


def _chosen(prog: str, argv: list[str]) -> Namespace:
    """The flags that choose the config, read first because the others edit it."""
    source = ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    source.add_argument("--config")
    source.add_argument("--resume", type=Path)
    source.add_argument("--eval-only", "--eval_only", type=Path)
    source.add_argument("--algorithm")
    chosen, _ = source.parse_known_args(argv)
    if chosen.resume and (chosen.config or chosen.eval_only or chosen.algorithm):
        others = "--config, --algorithm or --eval-only"
        raise ValueError(f"--resume uses the config of its run, so it cannot be combined with {others}")
    if chosen.eval_only and not chosen.eval_only.is_dir():
        raise ValueError(f"--eval-only {chosen.eval_only} is not a folder")
    return chosen


def _apply_preset(config: RunConfig, name: str) -> None:
    """Set a preset's fields and print them to stderr, because --dry-run prints JSON."""
    if name not in config.presets:
        near = difflib.get_close_matches(name, config.presets) or list(config.presets)
        known = f"did you mean {' or '.join(near)}?" if near else "this controller has no presets"
        raise ValueError(f"--algorithm {name} is not a preset; {known}")
    algorithm = config.presets[name]
    values = algorithm.apply(config)
    print(f"--algorithm {name} ({algorithm.paper}) sets:", file=sys.stderr)
    for field_name, value in values.items():
        print(f"  {field_name.removesuffix('.name')} = {value}", file=sys.stderr)


def _without_short_flags(argv: Sequence[str], short_flags: Mapping[str, str]) -> list[str]:
    """`--lr=1e-4` -> `--schedule.learning-rate=1e-4`."""
    whole = []
    for argument in argv:
        flag, equals, value = argument.partition("=")
        whole.append(short_flags.get(flag, flag) + equals + value)
    return whole


def _drop_options_of_other_task(config: RunConfig, argv: Sequence[str]) -> None:
    """With another task than the config's, the fields of the config's task get their defaults."""
    source = ArgumentParser(add_help=False, allow_abbrev=False)
    source.add_argument("--environment.task", dest="task")
    task = source.parse_known_args(list(argv))[0].task
    environment = config.environment
    if task in (None, environment.task):
        return
    defaults = type(environment)()
    dropped = [name for name in FIELDS_OF_TASK if getattr(environment, name) != getattr(defaults, name)]
    for name in dropped:
        setattr(environment, name, getattr(defaults, name))
    if dropped:
        names = ", ".join(dropped)
        print(f"--task {task}: the config's own {names} belong to its task and are dropped", file=sys.stderr)


def _base(chosen: Namespace, configs: Configs, configs_by_controller: Mapping[str, Configs]) -> tuple[str, RunConfig]:
    """(name, config) before flags edit it."""
    default = next(iter(configs))
    name = chosen.config or default
    if chosen.resume:
        file = chosen.resume / "config.json"
    elif chosen.eval_only and not chosen.config:
        # The folder of a checkpoint is run/checkpoints/step-N.
        folder = chosen.eval_only.resolve().parent
        file = (folder.parent if folder.name == "checkpoints" else chosen.eval_only) / "config.json"
    elif config_file.is_file_name(name):
        file = Path(name)
    elif name in configs:
        return name, configs[name]()
    else:
        raise ValueError(_unknown_config(name, configs, configs_by_controller))
    if file.is_dir():
        raise ValueError(f"{file} is a folder; --config takes the name of a config or a file")
    if not file.is_file():
        remedy = "; give --config the name of a config, or an existing file"
        raise ValueError(f"{file} does not exist{', so no run can be resumed from there' if chosen.resume else remedy}")
    loaded = config_file.read(type(configs[default]()), file)
    return (file.resolve().parent.name if file.name == "config.json" else file.stem), loaded


def _unknown_config(name: str, configs: Configs, configs_by_controller: Mapping[str, Configs]) -> str:
    owners = [controller for controller, theirs in configs_by_controller.items() if name in theirs]
    if owners:
        own = ", ".join(configs)
        return f"--config {name} belongs to {' and '.join(owners)}; the configs of this controller: {own}"
    near = difflib.get_close_matches(name, configs) or list(configs)
    return f"--config {name} is neither a config nor a file of JSON, YAML or TOML; did you mean {' or '.join(near)}?"


def _require_same(before: Mapping[str, object], after: Mapping[str, object]) -> None:
    """Raise ValueError if a value of FIXED_ON_RESUME, or in one, has changed."""
    for name in sorted(before.keys() | after.keys()):
        is_fixed = any(f"{name}.".startswith(f"{prefix}.") for prefix in FIXED_ON_RESUME)
        if is_fixed and before.get(name) != after.get(name):
            change = f"from {before.get(name)!r} to {after.get(name)!r}"
            raise ValueError(f"{name} cannot change {change} in a resumed run; start a new run")


def require_writable(flag: str, folder: Path) -> None:
    """Raise ValueError if the folder cannot be made or written to."""
    existing = folder
    # Path.exists would raise an error in a folder that this user may not enter
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"{flag} {folder}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
        raise ValueError(f"{flag} {folder}: {existing} is not writable")
    try:
        # Some file systems, such as /proc, say that root may write, and then refuse.
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {folder}: nothing can be written to {existing}: {error.strerror}") from None


def print_config(config: RunConfig) -> None:
    """To stdout, as JSON that `--config` takes."""
    Console().print_json(config_file.to_json(config))
