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
from dataclasses import dataclass, field, make_dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, Protocol

import tyro
from rich.console import Console

from controllers import config_file
from controllers.observe.run_folder import RunFolder
from controllers.program import help

if TYPE_CHECKING:
    from controllers.run.config import RunConfig

FIXED_ON_RESUME = ("seed", "environment", "chat", "alphabet", "sft_steps", "trainer.model", "trainer.hf_path")
"""A resumed run cannot change these: weights might not fit, or held-out problems might have been
trained on."""

ABOUT_FLAGS = "Every field of the config is a flag: trainer.hf_path is --trainer.hf-path or --trainer.hf_path."

Configs = Mapping[str, "Callable[[], RunConfig]"]
Annotation = object  # a class, `int | None`, `list[int]`: annotations have no narrower common type


@dataclass(frozen=True, kw_only=True)
class Invocation:
    config: "RunConfig"
    config_name: str
    output_dir: Path  # folder of the run; equal to `resume` if the run is resumed
    resume: Path | None
    eval_only: Path | None
    dry_run: bool
    plan: bool
    verbose: bool
    save_config: Path | None = None


class _Flags(Protocol):
    """What tyro returns for the class that `_flags` makes, without what `_chosen` read."""

    config: "RunConfig"
    output_dir: Path | None
    save_config: Path | None
    dry_run: bool
    plan: bool
    verbose: bool


def parse(
    prog: str,
    configs: Configs,
    argv: Sequence[str] | None = None,
    fixed_on_resume: Sequence[str] = FIXED_ON_RESUME,
    configs_by_controller: Mapping[str, Configs] | None = None,
) -> Invocation:
    """`prog`: how the user starts the program.
    `--config` names one of `configs` (default: the first) or a file; dotted flags edit its fields.
    fixed_on_resume: fields that a resumed run cannot change. configs_by_controller: for an error
    that names the right loop.
    Exits with status 2 and a message, or 0 after `--help`.
    """
    try:
        return _parse(
            prog, configs, sys.argv[1:] if argv is None else list(argv), fixed_on_resume, configs_by_controller or {}
        )
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(2)


def _parse(
    prog: str,
    configs: Configs,
    argv: list[str],
    fixed_on_resume: Sequence[str],
    configs_by_controller: Mapping[str, Configs],
) -> Invocation:
    chosen = _chosen(prog, argv)
    _require_own(chosen.config, configs, configs_by_controller)
    name, base = _base(configs, chosen.config, chosen.resume, chosen.eval_only)
    before = config_file.leaves_of(base)
    if chosen.algorithm:
        _apply_preset(base, chosen.algorithm)
    program_flags = _program_flags(configs, name)
    if (group := help.asked(argv)) is not None:
        _show_help(prog, base, program_flags, group)
    argv = _without_short_flags(argv, base.short_flags)
    if not (chosen.resume or chosen.eval_only):
        _drop_options_of_other_task(base, argv)
    parsed: tuple[_Flags, list[str]] = tyro.cli(
        _flags(program_flags, base), prog=prog, args=argv, return_unknown_args=True
    )
    flags, unknown = parsed
    if unknown:
        raise ValueError(help.unknown(unknown, base, program_flags, base.short_flags))
    config = flags.config.with_local_models()
    if chosen.resume:
        if flags.output_dir and flags.output_dir.resolve() != chosen.resume.resolve():
            raise ValueError(
                f"--output-dir {flags.output_dir} is another folder, but --resume {chosen.resume} continues the run in its own folder; "
                "leave out --output-dir"
            )
        _require_same(before, config_file.leaves_of(config), fixed_on_resume)
    config.validate()
    if flags.save_config:
        config_file.require_format("--save-config", flags.save_config)

    output_dir = chosen.resume or flags.output_dir or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    # With --plan or --eval-only nothing is written to output_dir, so it is not checked. With --dry-run output_dir is
    # checked only if the user has named a folder.
    is_named = bool(flags.output_dir or chosen.resume)
    if not (flags.plan or chosen.eval_only) and (is_named or not flags.dry_run):
        require_writable("--output-dir", output_dir)
        if not chosen.resume:
            _require_no_run(prog, output_dir)
    return Invocation(
        config=config,
        config_name=name,
        output_dir=output_dir,
        resume=chosen.resume,
        eval_only=chosen.eval_only,
        save_config=flags.save_config,
        dry_run=flags.dry_run,
        plan=flags.plan,
        verbose=flags.verbose,
    )


def _chosen(prog: str, argv: list[str]) -> Namespace:
    """The flags that choose the config, read first because the others edit it. Raises ValueError
    for those that exclude each other."""
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


def _show_help(prog: str, config: "RunConfig", program_flags: Sequence[help.ProgramFlag], group: str) -> NoReturn:
    """Print the help, and exit with status 0. group: as `help.asked` returns it, or "all".

    Raises ValueError if the config has no such group.
    """
    if group == "all":
        about = f"The defaults below are the values of the chosen config. {ABOUT_FLAGS}"
        tyro.cli(_flags(program_flags, config), prog=prog, description=about, args=["--help"])
    elif group:
        help.show_group(prog, config, group)
    else:
        print(help.overview(prog, config, program_flags, config.short_flags), end="")
    sys.exit(0)


def _apply_preset(config: "RunConfig", name: str) -> None:
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


FIELDS_OF_TASK = (
    "options",
    "split",
    "held_out_task",
    "held_out_split",
    "mixture",
    "prompt",
    "remove_whitespace",
    "prompt_pattern",
    "reward",
    "reward_pattern",
)
"""Fields of the environment that describe one task."""


def _drop_options_of_other_task(config: "RunConfig", argv: Sequence[str]) -> None:
    """With another task than the config's, the fields of the config's task get their defaults."""
    source = ArgumentParser(add_help=False, allow_abbrev=False)
    source.add_argument("--environment.task", dest="task")
    task = source.parse_known_args(list(argv))[0].task
    environment = getattr(config, "environment", None)
    if task is None or environment is None or task == environment.task:
        return
    defaults = type(environment)()
    dropped = [name for name in FIELDS_OF_TASK if getattr(environment, name) != getattr(defaults, name)]
    for name in dropped:
        setattr(environment, name, getattr(defaults, name))
    if dropped:
        print(
            f"--task {task}: the config's own {', '.join(dropped)} belong to its task and are dropped", file=sys.stderr
        )


def _require_own(config: str | None, configs: Configs, configs_by_controller: Mapping[str, Configs]) -> None:
    """Raise ValueError, naming them, if only other loops have this config."""
    owners = [controller for controller, theirs in configs_by_controller.items() if config in theirs]
    if owners and config not in configs:
        own = ", ".join(configs)
        raise ValueError(f"--config {config} belongs to {' and '.join(owners)}; the configs of this controller: {own}")


def _base(configs: Configs, config: str | None, resume: Path | None, eval_only: Path | None) -> tuple[str, "RunConfig"]:
    """(name, config) before flags edit it."""
    default = next(iter(configs))
    file = Path(config) if config and config_file.is_file_name(config) else None
    if resume:
        file = resume / "config.json"
    elif eval_only and not config:
        # The folder of a checkpoint is run/checkpoints/step-N.
        run = eval_only.resolve().parents[1] if eval_only.resolve().parent.name == "checkpoints" else eval_only
        file = run / "config.json"
    if file is None:
        name = config or default
        if name in configs:
            return name, configs[name]()
        near = difflib.get_close_matches(name, configs) or list(configs)
        raise ValueError(
            f"--config {name} is neither a config nor a file of JSON, YAML or TOML; did you mean {' or '.join(near)}?"
        )
    if file.is_dir():
        raise ValueError(f"{file} is a folder; --config takes the name of a config or a file")
    if not file.is_file():
        remedy = (
            ", so no run can be resumed from there"
            if resume
            else "; give --config the name of a config, or an existing file"
        )
        raise ValueError(f"{file} does not exist{remedy}")
    loaded = config_file.read(type(configs[default]()), file)
    return (file.resolve().parent.name if file.name == "config.json" else file.stem), loaded


def _program_flags(configs: Configs, name: str) -> list[help.ProgramFlag]:
    """The flags that are no fields of the config. name: of the chosen config."""
    flag = help.ProgramFlag
    of_config = f"Name of a config ({', '.join(configs)}), or a .json, .yaml or .toml file."
    return [
        flag(name="config_name", kind=str, default=name, meaning=of_config, shown="config"),
        flag(
            name="output_dir",
            kind=Path | None,
            default=None,
            meaning="Folder of the run; None: runs/<config>-<time>.",
        ),
        flag(
            name="resume",
            kind=Path | None,
            default=None,
            meaning="Continue the run of this folder from its newest complete checkpoint.",
        ),
        flag(
            name="eval_only",
            kind=Path | None,
            default=None,
            meaning="Score the checkpoint in this folder, or the newest checkpoint of the run in this folder, and stop. "
            "If --config is left out, the config of the checkpoint's run is used.",
        ),
        flag(
            name="save_config",
            kind=Path | None,
            default=None,
            meaning="Write the config to this .json or .yaml file before the run.",
        ),
        flag(name="dry_run", kind=bool, default=False, meaning="Check everything, print the config and stop."),
        flag(
            name="plan",
            kind=bool,
            default=False,
            meaning="Print the parallel layout, the memory of a rank and where each process runs, and stop.",
        ),
        flag(
            name="verbose",
            kind=bool,
            default=False,
            meaning="Show the logs of libraries and actors also on the terminal, not only in files.",
        ),
    ]


def _flags(program_flags: Sequence[help.ProgramFlag], base: "RunConfig") -> type:
    """A dataclass for tyro: a field for each program flag, and one for the config.

    tyro makes the flags of the config from the dotted names of its fields.
    """
    flags: list[tuple[str, Annotation, object]] = []
    for each in program_flags:
        shape = tyro.conf.arg(help=each.meaning, name=each.shown)
        flags.append(
            (each.name, Annotated[each.kind, shape, tyro.conf.FlagCreatePairsOff], field(default=each.default))
        )
    flags.append(("config", Annotated[type(base), tyro.conf.arg(name="")], field(default_factory=lambda: base)))
    return make_dataclass("Flags", flags)


def _require_same(before: Mapping[str, object], after: Mapping[str, object], fixed: Sequence[str]) -> None:
    """Raise ValueError if a fixed value has changed; trainer.model also fixes
    trainer.model.head_dim."""
    for name in sorted(before.keys() | after.keys()):
        is_fixed = any(f"{name}.".startswith(f"{prefix}.") for prefix in fixed)
        if is_fixed and before.get(name) != after.get(name):
            change = f"from {before.get(name)!r} to {after.get(name)!r}"
            raise ValueError(f"{name} cannot change {change} in a resumed run; start a new run")


def require_writable(flag: str, folder: Path) -> None:
    """Raise ValueError if the folder cannot be made or written to."""
    existing = folder
    # If this user may not enter the parent folder, Path.exists would raise an error, but os.path.exists returns False.
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


def _require_no_run(prog: str, output_dir: Path) -> None:
    """Raise ValueError, with the command that continues it, if the folder holds a run."""
    if RunFolder(output_dir).holds_run:
        command = f"{prog} --resume {shlex.quote(str(output_dir))}"
        raise ValueError(f"{output_dir} holds a run; to continue it: {command}")


def print_config(config: "RunConfig") -> None:
    """To stdout, as JSON that `--config` takes."""
    Console().print_json(config_file.to_json(config))
