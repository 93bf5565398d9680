"""The help of a command line: a screen with the groups of flags, one group's flags, and flags like a wrong one.

A group is a field of the config with fields of its own, such as "trainer.lora"; "run" has the config's plain fields.
"""

import ast
import difflib
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import tyro

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from controllers.program.cli import Invocation

WIDTH = 80
OWN_GROUP = "run"
MAX_NEAR = 3
LEAST_LIKENESS = 0.7
ABOUT_FLAGS = (
    "The defaults below are the values of the chosen config. "
    "Every field of the config is a flag: trainer.hf_path is --trainer.hf-path or --trainer.hf_path."
)


def asked(argv: Sequence[str]) -> str | None:
    """The group that `--help GROUP` names, "" without one; None without --help."""
    for index, argument in enumerate(argv):
        if argument in ("-h", "--help"):
            named = argv[index + 1] if index + 1 < len(argv) else ""
            return "" if named.startswith("-") else named
    return None


def show(prog: str, program: "Invocation", group: str, configs: Iterable[str]) -> NoReturn:
    """Exits with status 0. group: as `asked` returns it. Raises ValueError for an unknown one."""
    if group == "all":
        tyro.cli(type(program), default=program, prog=prog, description=ABOUT_FLAGS, args=["--help"])
    elif group:
        shown = make_dataclass("Flags", _flags_of_group(program.config, group))
        tyro.cli(shown, prog=prog, description="", args=["--help"])
    else:
        print(_overview(prog, program, configs))
    sys.exit(0)


def _overview(prog: str, program: "Invocation", configs: Iterable[str]) -> str:
    """One screen."""
    config = program.config
    docs = field_docs(type(program)) | {"config": f"Name of a config ({', '.join(configs)}), or a file."}
    lines = [f"usage: {prog} [--FLAG VALUE …]", *textwrap.wrap(inspect.getdoc(type(program)) or "", WIDTH), ""]
    lines += [_line(_flag(name), docs[name]) for name in _program_flags(program)]
    shorts = ", ".join(f"{short} ({whole})" for short, whole in config.short_flags.items())
    lines += ["", *textwrap.wrap(f"Short flags: {shorts}", WIDTH, break_on_hyphens=False)]
    lines += ["", "Groups of the other flags; --help GROUP shows one group, --help all every flag:"]
    lines.append(_line(OWN_GROUP, ", ".join(map(_words, _plain_fields(config)))))
    docs = field_docs(type(config))
    lines += [_line(_words(name), docs.get(name, "")) for name, value in _values(config).items() if is_dataclass(value)]
    return "\n".join(lines)


def _program_flags(program: "Invocation") -> list[str]:
    names = [name for name in _values(program) if name != "config"]
    return ["config" if name == "config_name" else name for name in names]


def _flags_of_group(config: "DataclassInstance", group: str) -> list[tuple[str, Any, Any]]:
    """Fields for make_dataclass."""
    name = group.removeprefix("--").replace("-", "_")
    if name == OWN_GROUP:
        return [_for_tyro(config, plain, plain) for plain in _plain_fields(config)]
    groups = dict(_groups(config))
    if name in groups:
        return [_for_tyro(*groups[name], name)]
    known = [OWN_GROUP, *map(_words, groups), "all"]
    near = difflib.get_close_matches(group, known) or [each for each in known if "." not in each]
    raise ValueError(f"--help {group}: there is no such group of flags; did you mean {', '.join(near)}?")


def unknown(arguments: Sequence[str], program: "Invocation") -> str:
    """The text of the error for arguments that no flag takes."""
    names = [_flag(name) for name in (*_program_flags(program), *_leaves(program.config))]
    shorts = {whole: short for short, whole in program.config.short_flags.items()}
    lines = []
    for argument in arguments:
        flag = argument.partition("=")[0]
        if not flag.startswith("--"):
            continue
        near = [f"{name} (short: {shorts[name]})" if name in shorts else name for name in _near(flag, names, shorts)]
        remedy = f"did you mean {' or '.join(near)}?" if near else "--help shows the groups of flags"
        lines.append(f"there is no flag {flag}; {remedy}")
    return "\n".join(lines) or f"no flag takes {' '.join(arguments)}"


def field_docs(cls: type) -> dict[str, str]:
    """The text under each field of a dataclass, also of its base classes, by the field's name."""
    docs = {}
    for base in reversed(cls.__mro__[:-1]):
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for pair in pairwise(tree.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def _near(flag: str, names: Sequence[str], shorts: Mapping[str, str]) -> list[str]:
    """The names most like a wrong flag, by their whole, their end or their short flag."""
    wrong = _plain(flag)
    likeness = {}
    for name in names:
        parts = name.removeprefix("--").split(".")
        forms = {"-".join(parts[start:]) for start in range(len(parts))}
        if name in shorts:
            forms.add(_plain(shorts[name]))
        likeness[name] = max(difflib.SequenceMatcher(None, wrong, form).ratio() for form in forms)
    best = sorted(names, key=lambda name: -likeness[name])[:MAX_NEAR]
    least = max(LEAST_LIKENESS, likeness[best[0]] - 0.1)
    return [name for name in best if likeness[name] >= least]


def _for_tyro(owner: "DataclassInstance", name: str, shown: str) -> tuple[str, Any, Any]:
    """A field for make_dataclass that shows a field of `owner` under the whole name of its flag."""
    value = getattr(owner, name)
    annotation = type(value) if is_dataclass(value) else get_type_hints(type(owner), include_extras=True)[name]
    argument = tyro.conf.arg(name=_words(shown), help=field_docs(type(owner)).get(name))
    return name, Annotated[annotation, argument], field(default_factory=lambda: value)


def _groups(config: "DataclassInstance", prefix: str = "") -> Iterator[tuple[str, tuple["DataclassInstance", str]]]:
    """(dotted name of a group, (the object that has it, its field there))."""
    for name, value in _values(config).items():
        if is_dataclass(value) and not isinstance(value, type):
            yield prefix + name, (config, name)
            yield from _groups(value, f"{prefix}{name}.")


def _leaves(config: "DataclassInstance", prefix: str = "") -> Iterator[str]:
    for name, value in _values(config).items():
        if is_dataclass(value) and not isinstance(value, type):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _values(config: "DataclassInstance") -> dict[str, object]:
    return {each.name: getattr(config, each.name) for each in fields(config)}


def _plain_fields(config: "DataclassInstance") -> list[str]:
    return [name for name, value in _values(config).items() if not is_dataclass(value)]


def _flag(name: str) -> str:
    return f"--{_words(name)}"


def _words(name: str) -> str:
    return name.replace("_", "-")


def _plain(flag: str) -> str:
    return flag.removeprefix("--").replace("_", "-").replace(".", "-")


def _line(name: str, meaning: str) -> str:
    first = meaning.split(". ")[0].removesuffix(".")
    return f"  {name:<14} " + textwrap.shorten(first, WIDTH - 17, placeholder=" …")
