"""Command line of a run: it turns flags into a checked config and the run's folder. Starts nothing and writes nothing.

It works on any dataclass with `steps: int`, `seed: int`, a `with_local_models()` that returns the config with directories for ids of
models, and a `validate()`. Both methods raise ValueError.
"""

import contextlib
import difflib
import json
import os
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, make_dataclass
from datetime import datetime
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro
from rich.console import Console

from controllers.run_folder import RunFolder

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from controllers.run import RunConfig

FIXED_ON_RESUME = ("seed", "environment", "chat", "alphabet", "sft_steps", "trainer.model", "trainer.hf_path")
"""Fields that a resumed run cannot change: its weights would not fit, or it would be validated on problems that it was trained on."""

Configs = Mapping[str, "Callable[[], RunConfig]"]
Config = TypeVar("Config")
Annotation = object  # a class, `int | None`, `list[int]`: annotations have no narrower common type


@dataclass(frozen=True, kw_only=True)
class Invocation:
    config: "RunConfig"
    config_name: str
    output_dir: Path  # with `resume`, that folder
    resume: Path | None
    eval_only: Path | None
    dry_run: bool
    plan: bool
    verbose: bool


class _Flags(Protocol):
    """Fields of the class that `_flags` makes. `config_name`, `resume` and `eval_only` are read before that class exists."""

    config: "RunConfig"
    output_dir: Path | None
    dry_run: bool
    plan: bool
    verbose: bool


def parse(
    prog: str, configs: Configs, argv: Sequence[str] | None = None, fixed_on_resume: Sequence[str] = FIXED_ON_RESUME
) -> Invocation:
    """Parse `argv` (None: sys.argv). `prog` is how the user starts the program, such as "python -m controllers.grpo".

    `--config` names one of `configs` (default: the first) or a config.json. Every other dotted flag edits a field of this config.
    Exits with status 2 and a message on stderr when the run is not possible, and with status 0 after `--help`.
    """
    try:
        return _parse(prog, configs, sys.argv[1:] if argv is None else list(argv), fixed_on_resume)
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(2)


def _parse(prog: str, configs: Configs, argv: list[str], fixed_on_resume: Sequence[str]) -> Invocation:
    # These three flags choose the config whose fields the other flags edit. So they are read first, and again with the others below.
    source = ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    source.add_argument("--config")
    source.add_argument("--resume", type=Path)
    source.add_argument("--eval-only", "--eval_only", type=Path)
    chosen, _ = source.parse_known_args(argv)
    if chosen.resume and (chosen.config or chosen.eval_only):
        raise ValueError("--resume takes the config of its run, so it cannot be combined with --config or --eval-only")
    if chosen.eval_only and not chosen.eval_only.is_dir():
        raise ValueError(f"--eval-only {chosen.eval_only} is not a folder")

    name, base = _base(configs, chosen.config, chosen.resume, chosen.eval_only)
    before = _leaves_of(base)
    about = (
        "Any field of the config can be set by its dotted name, with - or _. The defaults below are those of --config."
    )
    flags = cast(_Flags, tyro.cli(_flags(configs, name, base), prog=prog, description=about, args=argv))
    config = flags.config.with_local_models()
    if chosen.resume:
        if flags.output_dir and flags.output_dir.resolve() != chosen.resume.resolve():
            raise ValueError(f"--output-dir {flags.output_dir}: --resume {chosen.resume} continues in its own folder")
        _require_same(before, _leaves_of(config), fixed_on_resume)
    config.validate()

    output_dir = chosen.resume or flags.output_dir or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    _require_writable(output_dir)
    if not chosen.resume and RunFolder(output_dir).holds_run:
        command = f"{prog} --resume {shlex.quote(str(output_dir))}"
        raise ValueError(f"{output_dir} holds a run; to continue it: {command}")
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


def _base(configs: Configs, config: str | None, resume: Path | None, eval_only: Path | None) -> tuple[str, "RunConfig"]:
    """Name and value of the config that the flags edit."""
    default = next(iter(configs))
    file = Path(config) if config and config.endswith(".json") else None
    if resume:
        file = resume / "config.json"
    elif eval_only and not config:
        # run/checkpoints/step-N
        run = eval_only.resolve().parents[1] if eval_only.resolve().parent.name == "checkpoints" else eval_only
        file = run / "config.json"
    if file is None:
        name = config or default
        if name in configs:
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


def _flags(configs: Configs, name: str, base: "RunConfig") -> type:
    """A dataclass with the run's own flags and the config. The config's fields keep their dotted names."""
    names = ", ".join(configs)
    flags = [
        _flag("config_name", str, name, f"One of {names}, or a config.json of an earlier run.", shown="config"),
        _flag("output_dir", Path | None, None, "Folder of the run; None: runs/<config>-<time>."),
        _flag("resume", Path | None, None, "Continue the run of this folder from its newest complete checkpoint."),
        _flag(
            "eval_only",
            Path | None,
            None,
            "Score this checkpoint and stop. Without --config, its run's config is used.",
        ),
        _flag("dry_run", bool, False, "Check everything, print the config and stop."),
        _flag("plan", bool, False, "Print the layout, the memory of a rank and which process runs where, and stop."),
        _flag("verbose", bool, False, "Show the logs of libraries and actors on the terminal, too, not only in files."),
        ("config", Annotated[type(base), tyro.conf.arg(name="")], field(default_factory=lambda: base)),
    ]
    return make_dataclass("Flags", flags)


def _flag(
    name: str, kind: Annotation, default: object, meaning: str, shown: str | None = None
) -> tuple[str, Annotation, object]:
    """A field for make_dataclass. `shown` replaces the name on the command line."""
    shape = tyro.conf.arg(help=meaning, name=shown)
    return name, Annotated[kind, shape, tyro.conf.FlagCreatePairsOff], field(default=default)


def _require_same(before: Mapping[str, object], after: Mapping[str, object], fixed: Sequence[str]) -> None:
    """Raise ValueError when a leaf under one of the `fixed` prefixes has changed."""
    for name in sorted(before.keys() | after.keys()):
        is_fixed = any(f"{name}.".startswith(f"{prefix}.") for prefix in fixed)
        if is_fixed and before.get(name) != after.get(name):
            change = f"from {before.get(name)!r} to {after.get(name)!r}"
            raise ValueError(f"{name} cannot change {change} in a resumed run; start a new one")


def _require_writable(output_dir: Path) -> None:
    """Raise ValueError when the folder cannot be made, or when nothing can be written to it."""
    existing = output_dir
    # Not Path.exists, which raises under a folder that may not be read.
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"--output-dir {output_dir}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
        raise ValueError(f"--output-dir {output_dir}: {existing} is not writable")


def print_config(config: "RunConfig") -> None:
    """Print the resolved config to stdout, as the JSON that `--config FILE.json` takes."""
    Console().print_json(config_to_json(config))


def config_to_json(config: "RunConfig") -> str:
    return json.dumps(asdict(config), indent=2, default=_path_to_str) + "\n"


def config_from_json(cls: type[Config], text: str) -> Config:
    """The inverse of `config_to_json`. A missing field takes its default; an unknown or ill-typed one raises ValueError."""
    return cast(Config, _read(cls, json.loads(text), ""))


def _path_to_str(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise ValueError(f"{value!r} of the config has no JSON form")


def _leaves_of(config: "RunConfig") -> dict[str, object]:
    """Every value of the config that is not an object of JSON, by its dotted name."""
    return dict(_leaves(json.loads(config_to_json(config))))


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else key)
    else:
        yield name, value


# The readers below turn JSON into a value of an annotated type. `name` is the dotted name of the field, for errors.
def _read(kind: Annotation, value: object, name: str) -> object:
    origin = get_origin(kind) or kind
    if isinstance(origin, type) and is_dataclass(origin):
        return _read_dataclass(origin, value, name)
    if origin not in _READERS:
        raise _mismatch(kind, value, name)
    return _READERS[origin](kind, value, name)


def _mismatch(kind: Annotation, value: object, name: str) -> ValueError:
    shown = kind if get_args(kind) else getattr(kind, "__name__", kind)
    return ValueError(f"{name or 'the config'}={value!r} is not {shown}")


def _read_dataclass(cls: "type[DataclassInstance]", values: object, name: str) -> object:
    if not isinstance(values, dict):
        raise _mismatch(cls, values, name)
    names, kinds = [each.name for each in fields(cls)], get_type_hints(cls)
    prefix = f"{name}." if name else ""
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names) or names
            raise ValueError(f"{prefix}{key} is not a field; did you mean {' or '.join(near)}?")
    try:
        return cls(**{key: _read(kinds[key], value, f"{prefix}{key}") for key, value in values.items()})
    except TypeError as error:
        raise ValueError(f"{name or 'the config'}: {error}") from error


def _read_union(kind: Annotation, value: object, name: str) -> object:
    for option in get_args(kind):
        if is_dataclass(option) and isinstance(value, dict):
            return _read(option, value, name)  # not suppressed: the error names the wrong field
        with contextlib.suppress(ValueError):
            return _read(option, value, name)
    raise _mismatch(kind, value, name)


def _read_list(kind: Annotation, value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        raise _mismatch(kind, value, name)
    item_kind = get_args(kind)[0] if get_args(kind) else object
    return [_read(item_kind, item, f"{name}[{index}]") for index, item in enumerate(value)]


def _read_tuple(kind: Annotation, value: object, name: str) -> tuple[object, ...]:
    item_kinds = get_args(kind)
    if not item_kinds or item_kinds[-1] is ...:  # any length
        return tuple(_read_list(kind, value, name))
    if not isinstance(value, list) or len(value) != len(item_kinds):
        raise _mismatch(kind, value, name)
    items = []
    for index, (item_kind, item) in enumerate(zip(item_kinds, value, strict=True)):
        items.append(_read(item_kind, item, f"{name}[{index}]"))
    return tuple(items)


def _read_dict(kind: Annotation, value: object, name: str) -> object:
    if not isinstance(value, dict):
        raise _mismatch(kind, value, name)
    key_kind, item_kind = get_args(kind) or (str, object)
    return {key_kind(key): _read(item_kind, item, f"{name}.{key}") for key, item in value.items()}


def _read_any(kind: Annotation, value: object, name: str) -> object:
    return value


def _read_literal(kind: Annotation, value: object, name: str) -> object:
    if value not in get_args(kind):
        raise _mismatch(kind, value, name)
    return value


def _read_path(kind: Annotation, value: object, name: str) -> Path:
    if not isinstance(value, str):
        raise _mismatch(kind, value, name)
    return Path(value)


def _read_float(kind: Annotation, value: object, name: str) -> float:
    # type(), not isinstance(): True is an int.
    if type(value) is int or type(value) is float:
        return float(value)
    raise _mismatch(kind, value, name)


def _read_exactly(kind: Annotation, value: object, name: str) -> object:
    if type(value) is not kind:
        raise _mismatch(kind, value, name)
    return value


_READERS: dict[object, Callable[[Annotation, object, str], object]] = {
    Any: _read_any,
    object: _read_any,
    Union: _read_union,
    UnionType: _read_union,
    Literal: _read_literal,
    list: _read_list,
    tuple: _read_tuple,
    dict: _read_dict,
    Path: _read_path,
    float: _read_float,
    int: _read_exactly,
    str: _read_exactly,
    bool: _read_exactly,
    NoneType: _read_exactly,
}
