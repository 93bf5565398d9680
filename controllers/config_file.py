"""Configs as files of JSON, YAML and TOML, checked by pydantic.

A missing field takes its default. TOML has no null, so a TOML file leaves out fields that are None.
"""

import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config")


def to_json(config: "DataclassInstance") -> str:
    return json.dumps(asdict(config), indent=2, default=str) + "\n"  # str: of a Path


def from_json(cls: type[Config], text: str) -> Config:
    """Raises ValueError as `from_values` does."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    return from_values(cls, values)


def from_values(cls: type[Config], values: object) -> Config:
    """Neither "3" nor true is an integer. Raises ValueError with a line for each wrong field."""
    # the config is a plain dataclass, so its settings for pydantic stand on a model around it
    around = create_model("ConfigFile", __config__=ConfigDict(extra="forbid", strict=True), config=(cls, ...))
    try:
        # strict mode takes a list for a tuple, or a string for a path, only in JSON
        text = json.dumps({"config": values}, default=_refuse)
        return around.model_validate_json(text).config  # type: ignore[attr-defined]
    except ValidationError as error:
        raise ValueError("\n".join(_message(cls, fault) for fault in error.errors())) from None


def read(cls: type[Config], file: Path) -> Config:
    """From .json, .yaml, .yml or .toml. Raises ValueError, naming the file, field and fault."""
    try:
        values = _LOADERS[file.suffix](file.read_text(encoding="utf-8"))
        return from_values(cls, values)
    # tomllib and json raise ValueErrors; a YAML key that is a mapping or a date gives a TypeError
    except (ValueError, TypeError, yaml.YAMLError, OSError) as error:
        raise ValueError(f"{file}: {error}") from None


def write(config: "DataclassInstance", file: Path) -> None:
    """As JSON or YAML, by the ending."""
    text = to_json(config)
    if file.suffix != ".json":
        text = yaml.safe_dump(json.loads(text), sort_keys=False, allow_unicode=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def require_format(flag: str, file: Path) -> None:
    """Raises ValueError, naming the flag, for an ending that `write` does not know."""
    if file.suffix not in WRITTEN:
        raise ValueError(f"{flag} {file} does not end in one of {', '.join(WRITTEN)}")


def is_file_name(name: str) -> bool:
    return Path(name).suffix in _LOADERS


def leaves_of(config: "DataclassInstance") -> dict[str, object]:
    """{"steps": 72, "trainer.compute_dtype": "float32"}. A list or an empty dict is a value."""
    return dict(leaves(json.loads(to_json(config))))


def leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{name}.{key}" if name else key)
    else:
        yield name, value


class _StrictYaml(yaml.SafeLoader):
    """YAML in which a repeated key is an error, and 1e-3 a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} appears twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 takes 1e-3 for a text, because it has no dot
_EXPONENT = re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$")
_StrictYaml.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


_LOADERS: dict[str, Callable[[str], object]] = {".json": json.loads, ".toml": tomllib.loads}
_LOADERS |= dict.fromkeys((".yaml", ".yml"), partial(yaml.load, Loader=_StrictYaml))
WRITTEN = (".json", ".yaml", ".yml")


def _refuse(value: object) -> str:
    raise ValueError(f"{value!r} is a {type(value).__name__}, which no field takes")


def _message(cls: Any, error: "ErrorDetails") -> str:
    """One line, with the dotted name of the field."""
    path = error["loc"][1:]  # without `config` of the model in from_values
    name = ""
    for part in path:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    if error["type"] == "unexpected_keyword_argument":
        names = _field_names(cls, path[:-1])
        near = difflib.get_close_matches(str(path[-1]), names) or names
        return f"{name} is not a field; did you mean {' or '.join(near)}?"
    reason = error["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
    return f"{name or 'the config'}={error['input']!r}: {reason}"


def _field_names(cls: Any, path: tuple[str | int, ...]) -> list[str]:
    """Of the dataclass at the end of a path of fields and keys; [] if it leads through a list."""
    for part in path:
        if get_origin(cls) is dict:  # a key
            cls = get_args(cls)[1]
            continue
        kind = get_type_hints(cls).get(str(part)) if cls else None
        inner = (arm for arm in (kind, *get_args(kind)) if dataclasses.is_dataclass(arm) or get_origin(arm) is dict)
        cls = next(inner, None)
    return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
