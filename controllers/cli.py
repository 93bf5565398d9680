"""The command line of a run: flags -> a checked config and where the run goes. Starts nothing and writes nothing.

Works on any dataclass with `steps: int`, `seed: int` and a `validate()` that raises ValueError.
"""

import contextlib
import difflib
import json
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, make_dataclass
from datetime import datetime
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from rich.console import Console

from controllers.run_folder import RunFolder

FIXED_ON_RESUME = ("seed", "environment", "alphabet", "sft_steps", "trainer.model", "trainer.hf_path")
"""A change of these makes no sense in a resumed run: its weights would not fit, or held-out problems were trained on."""

Configs = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True, kw_only=True)
class Invocation:
    config: Any
    config_name: str
    output_dir: Path  # the folder of `resume` when there is one
    resume: Path | None
    eval_only: Path | None
    dry_run: bool
    plan: bool
    verbose: bool


def parse(
    prog: str, configs: Configs, argv: Sequence[str] | None = None, fixed_on_resume: Sequence[str] = FIXED_ON_RESUME
) -> Invocation:
    """Parse `argv` (None: sys.argv); `prog` is what the user types before it, such as "python -m controllers.grpo".

    `--config` names one of `configs`, the first by default, or a config.json; every dotted flag edits what it gives.
    Exits with status 2 and a message on stderr for anything that cannot run, and with 0 after `--help`.
    """
    try:
        return _parse(prog, configs, sys.argv[1:] if argv is None else list(argv), fixed_on_resume)
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(2)


def _parse(prog: str, configs: Configs, argv: list[str], fixed_on_resume: Sequence[str]) -> Invocation:
    # These flags say whose fields the others edit, so they are read first and checked with the others below.
    source = ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    source.add_argument("--config")
    source.add_argument("--resume", type=Path)
    source.add_argument("--eval-only", "--eval_only", type=Path)
    chosen, _ = source.parse_known_args(argv)
    if chosen.resume and (chosen.config or chosen.eval_only):
        raise ValueError("--resume takes the config of its run, so neither --config nor --eval-only goes with it")
    if chosen.eval_only and not chosen.eval_only.is_dir():
        raise ValueError(f"--eval-only {chosen.eval_only} is not a folder")

    name, base = _base(configs, chosen.config, chosen.resume, chosen.eval_only)
    before = dict(_leaves(json.loads(config_to_json(base))))
    about = "Any field of the config can be set by its dotted name, with - or _. Defaults are those of --config."
    flags: Any = tyro.cli(_flags(configs, name, base), prog=prog, description=about, args=argv)
    config = flags.config
    if chosen.resume:
        if flags.output_dir and flags.output_dir.resolve() != chosen.resume.resolve():
            raise ValueError(f"--output-dir {flags.output_dir}: --resume {chosen.resume} goes on in its own folder")
        after = dict(_leaves(json.loads(config_to_json(config))))
        for changed in sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key)):
            if any(f"{changed}.".startswith(f"{prefix}.") for prefix in fixed_on_resume):
                change = f"{before.get(changed)!r} to {after.get(changed)!r}"
                raise ValueError(f"{changed} cannot go from {change} in a resumed run; start a new one")
    config.validate()

    output_dir = chosen.resume or flags.output_dir or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    if not chosen.resume and RunFolder(output_dir).holds_run:
        command = f"{prog} --resume {shlex.quote(str(output_dir))}"
        raise ValueError(f"{output_dir} holds a run; to go on with it: {command}")
    return Invocation(
        config=config,
        config_name=name,
        output_dir=output_dir,
        resume=chosen.resume,
        eval_only=chosen.eval_only,
        dry_run=flags.dry_run,
        plan=flags.plan,
        verbose=flags.verbose,
    )


def _base(configs: Configs, config: str | None, resume: Path | None, eval_only: Path | None) -> tuple[str, Any]:
    """The name and value of the config that the flags edit."""
    default = next(iter(configs))
    file = Path(config) if config and config.endswith(".json") else None
    if resume:
        file = resume / "config.json"
    elif eval_only and not config:
        # run/checkpoints/step-N
        run = eval_only.resolve().parents[1] if eval_only.resolve().parent.name == "checkpoints" else eval_only
        file = run / "config.json"
    if file is None:
        if (name := config or default) in configs:
            return name, configs[name]()
        near = difflib.get_close_matches(name, configs) or list(configs)
        raise ValueError(f"--config {name} is neither a .json file nor a config; did you mean {' or '.join(near)}?")
    if not file.is_file():
        remedy = ", so no run can be resumed from there" if resume else "; name a config with --config"
        raise ValueError(f"{file} does not exist{remedy}")
    try:
        loaded = config_from_json(type(configs[default]()), file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return (file.resolve().parent.name if file.name == "config.json" else file.stem), loaded


def _flags(configs: Configs, name: str, base: Any) -> type:
    """A dataclass of the run's own flags beside the fields of the config, which keep their own dotted names."""

    def flag(kind: Any, meaning: str, shown: str | None = None) -> Any:
        return Annotated[kind, tyro.conf.arg(help=meaning, name=shown), tyro.conf.FlagCreatePairsOff]

    fields = [
        ("config_name", flag(str, f"One of {', '.join(configs)}, or a config.json of a former run.", "config"), name),
        ("output_dir", flag(Path | None, "Folder of the run; None: runs/<config>-<time>."), None),
        ("resume", flag(Path | None, "Go on with the run of this folder, from its newest complete checkpoint."), None),
        ("eval_only", flag(Path | None, "Score this checkpoint and stop; its run's config, unless --config."), None),
        ("dry_run", flag(bool, "Check everything, print the config and stop."), False),
        ("plan", flag(bool, "Print the layout, the memory of a rank and what would run where, and stop."), False),
        ("verbose", flag(bool, "Show the logs of libraries and actors instead of only filing them."), False),
    ]
    config = ("config", Annotated[type(base), tyro.conf.arg(name="")], field(default_factory=lambda: base))
    return make_dataclass("Flags", [*((key, kind, field(default=value)) for key, kind, value in fields), config])


def print_config(config: Any) -> None:
    """Show the resolved config on stdout, as the JSON that `--config FILE.json` takes."""
    Console().print_json(config_to_json(config))


def config_to_json(config: Any) -> str:
    return json.dumps(asdict(config), indent=2, default=_path_to_str) + "\n"


def config_from_json(cls: type, text: str) -> Any:
    """The inverse of `config_to_json`; a missing field takes its default. Raises ValueError for an unknown or ill-typed one."""
    return _from_plain(cls, json.loads(text), "")


def _path_to_str(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise ValueError(f"{value!r} of the config has no JSON form")


def _leaves(value: Any, name: str = ""):
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else key)
    else:
        yield name, value


def _from_plain(kind: Any, value: Any, name: str) -> Any:
    origin, args = get_origin(kind) or kind, get_args(kind)
    if kind is Any or (origin is Literal and value in args) or (kind is NoneType and value is None):
        return value
    if origin in (Union, UnionType):
        for option in args:
            if is_dataclass(option) and isinstance(value, dict):
                return _dataclass_from_plain(option, value, name)  # whose error names the field
            with contextlib.suppress(ValueError):
                return _from_plain(option, value, name)
    if is_dataclass(origin) and isinstance(value, dict):
        return _dataclass_from_plain(origin, value, name)
    if origin in (list, tuple) and isinstance(value, list):
        fixed = origin is tuple and args and args[-1] is not ...
        kinds = args if fixed else (args[:1] or (Any,)) * len(value)
        if len(kinds) == len(value):
            return origin(
                _from_plain(kind, item, f"{name}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
            )
    if origin is dict and isinstance(value, dict):
        key_kind, item_kind = args or (str, Any)
        return {key_kind(key): _from_plain(item_kind, item, f"{name}.{key}") for key, item in value.items()}
    if origin is Path and isinstance(value, str):
        return Path(value)
    if origin is float and type(value) in (int, float):
        return float(value)
    if origin in (int, str, bool) and type(value) is origin:
        return value
    raise ValueError(f"{name or 'the config'}={value!r} is not {getattr(kind, '__name__', kind) if not args else kind}")


def _dataclass_from_plain(cls: Any, values: dict, name: str) -> Any:
    kinds, prefix = get_type_hints(cls), f"{name}." if name else ""
    if unknown := [key for key in values if key not in cls.__dataclass_fields__]:
        near = difflib.get_close_matches(unknown[0], cls.__dataclass_fields__) or list(cls.__dataclass_fields__)
        raise ValueError(f"{prefix}{unknown[0]} is not a field; did you mean {' or '.join(near)}?")
    try:
        return cls(**{key: _from_plain(kinds[key], value, f"{prefix}{key}") for key, value in values.items()})
    except TypeError as error:
        raise ValueError(f"{name or 'the config'}: {error}") from error
