"""The help of a run's command line: one screen with the groups of flags, the flags of one group, and flags like a wrong one.

A group is a field of the config that has fields of its own, such as "rollouts" or "trainer.lora". The group "run" has the
config's own plain fields.
"""

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import tyro

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

WIDTH = 80
OWN_GROUP = "run"
MAX_NEAR = 3
LEAST_LIKENESS = 0.7


@dataclass(frozen=True, kw_only=True)
class ProgramFlag:
    """A flag that is no field of the config, such as --resume."""

    name: str
    kind: object  # its annotation
    default: object
    meaning: str
    shown: str | None = None  # the name on the command line; None: `name`

    def flag(self) -> str:
        return _flag(self.shown or self.name)


def asked(argv: Sequence[str]) -> str | None:
    """The group that `--help GROUP` names; "" if no group is named, None if there is no --help."""
    for index, argument in enumerate(argv):
        if argument in ("-h", "--help"):
            named = argv[index + 1] if index + 1 < len(argv) else ""
            return "" if named.startswith("-") else named
    return None


def overview(
    prog: str, config: "DataclassInstance", program_flags: Sequence[ProgramFlag], short_flags: Mapping[str, str]
) -> str:
    """One screen."""
    lines = [f"usage: {prog} [--FLAG VALUE …]", ""]
    lines += [_line(each.flag(), each.meaning) for each in program_flags]
    shorts = ", ".join(f"{short} ({whole})" for short, whole in short_flags.items())
    lines += ["", *textwrap.wrap(f"Short flags: {shorts}", WIDTH, break_on_hyphens=False)]
    lines += ["", "Groups of the other flags; --help GROUP shows one group, --help all every flag:"]
    own = ", ".join(_words(name) for name, value in _values(config).items() if not is_dataclass(value))
    lines.append(_line(OWN_GROUP, own))
    docs = field_docs(type(config))
    lines += [_line(_words(name), docs.get(name, "")) for name, value in _values(config).items() if is_dataclass(value)]
    return "\n".join(lines) + "\n"


def show_group(prog: str, config: "DataclassInstance", group: str) -> None:
    """Print the flags of one group, and exit with status 0. Raises ValueError if the config has no such group."""
    name = group.removeprefix("--").replace("-", "_")
    groups = dict(_groups(config))
    if name == OWN_GROUP:
        plain = {name: value for name, value in _values(config).items() if not is_dataclass(value)}
        shown = [_for_tyro(config, name, value, name) for name, value in plain.items()]
    elif name in groups:
        owner, last = groups[name]
        shown = [_for_tyro(owner, last, getattr(owner, last), name)]
    else:
        known = [OWN_GROUP, *map(_words, groups), "all"]
        near = difflib.get_close_matches(group, known) or [each for each in known if "." not in each]
        raise ValueError(f"--help {group}: there is no such group of flags; did you mean {', '.join(near)}?")
    tyro.cli(make_dataclass("Flags", shown), prog=prog, description="", args=["--help"])


def unknown(
    arguments: Sequence[str],
    config: "DataclassInstance",
    program_flags: Sequence[ProgramFlag],
    short_flags: Mapping[str, str],
) -> str:
    """The text of the error for arguments that no flag takes."""
    names = [each.flag() for each in program_flags] + [_flag(name) for name in _leaves(config)]
    shorts = {whole: short for short, whole in short_flags.items()}
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
    """The names that are most like a wrong flag. A name is also like a flag if its end is, or if its short flag is."""
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


def _for_tyro(owner: "DataclassInstance", name: str, value: object, shown: str) -> tuple[str, Any, Any]:
    """A field for make_dataclass that shows a field of `owner` under the whole name of its flag."""
    annotation = type(value) if is_dataclass(value) else get_type_hints(type(owner), include_extras=True)[name]
    argument = tyro.conf.arg(name=_words(shown), help=field_docs(type(owner)).get(name))
    return name, Annotated[annotation, argument], field(default_factory=lambda: value)


def _groups(config: "DataclassInstance", prefix: str = "") -> Iterator[tuple[str, tuple["DataclassInstance", str]]]:
    """The dotted name of each group, with the object that has the group and the name of the field there."""
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


def _flag(name: str) -> str:
    return f"--{_words(name)}"


def _words(name: str) -> str:
    return name.replace("_", "-")


def _plain(flag: str) -> str:
    return flag.removeprefix("--").replace("_", "-").replace(".", "-")


def _line(name: str, meaning: str) -> str:
    first = meaning.split(". ")[0].removesuffix(".")
    return f"  {name:<14} " + textwrap.shorten(first, WIDTH - 17, placeholder=" …")
