"""Checks the fields of a dataclass against their annotations, as strictly as a config file is
checked, and the ranges of numbers.

A bool is no number, an int is a float, and NaN is neither. A number with a range is finite.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from annotated_types import Interval

PositiveInt = Annotated[int, Interval(gt=0), tyro.conf.arg(metavar="INT>0")]
CountingInt = Annotated[int, Interval(ge=1), tyro.conf.arg(metavar="INT>=1")]
NaturalInt = Annotated[int, Interval(ge=0), tyro.conf.arg(metavar="INT>=0")]
PositiveFloat = Annotated[float, Interval(gt=0), tyro.conf.arg(metavar="FLOAT>0")]
NonNegativeFloat = Annotated[float, Interval(ge=0), tyro.conf.arg(metavar="FLOAT>=0")]
Share = Annotated[float, Interval(ge=0, le=1), tyro.conf.arg(metavar="0..1")]
PositiveShare = Annotated[float, Interval(gt=0, le=1), tyro.conf.arg(metavar="0<FLOAT<=1")]
Temperature = Annotated[float, Interval(ge=0.01, le=2), tyro.conf.arg(metavar="0.01..2")]
"""Types of fields. The range is in the text of --help."""


def require_field_types(config: Any, prefix: str = "") -> None:
    """Raises ValueError naming the first field of a wrong type, NaN or out of range, also in nested
    dataclasses. prefix: of names, such as "generator.".
    """
    hints = _hints(config.__class__)
    for field in fields(config):
        if field.name in hints:
            _require(f"{prefix}{field.name}", getattr(config, field.name), hints[field.name])


@cache
def _hints(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls, include_extras=True)
    except NameError:  # a caller's class that imports an annotation only for type checkers
        return {}


def _require(name: str, value: object, hint: Any) -> None:
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{name}={value}; it must be a number")
    chosen = next((each for each in _alternatives(hint) if _is_of(value, _bare(each))), None)
    if chosen is None:
        raise ValueError(f"{name}={value!r} is of type {type(value).__name__}; it must be {_words(hint)}")
    _require_in_range(name, value, chosen)
    if is_dataclass(value) and not isinstance(value, type):
        require_field_types(value, f"{name}.")
    for place, item, of_item in _items(value, _bare(chosen)):
        _require(f"{name}[{place!r}]", item, of_item)


def _require_in_range(name: str, value: Any, hint: Any) -> None:
    for limits in getattr(hint, "__metadata__", ()):
        if isinstance(limits, Interval) and not _is_within(value, limits):
            raise ValueError(f"{name}={value}; it must be {_range_words(limits, _bare(hint))}")


def _is_within(value: Any, limits: Any) -> bool:
    return (
        (limits.gt is None or value > limits.gt)
        and (limits.ge is None or value >= limits.ge)
        and value <= (math.inf if limits.le is None else limits.le)
        and value < math.inf
    )


def _range_words(limits: Interval, kind: type) -> str:
    if limits.le is not None and kind is int:
        return f"{limits.ge} to {limits.le}"
    if limits.le is not None:
        return f"in [{limits.ge}, {limits.le}]" if limits.gt is None else f"in ({limits.gt}, {limits.le}]"
    if limits.gt is not None:
        return "positive and finite"
    return f"finite and at least {limits.ge}" if kind is float else f"at least {limits.ge}"


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _alternatives(hint: Any) -> Iterable[Any]:
    bare = _bare(hint)
    return get_args(bare) if get_origin(bare) in (Union, UnionType) else (hint,)


def _is_of(value: object, hint: Any) -> bool:
    """True if the value, without its items, has the type, or none can be compared with it."""
    if hint is None or hint is NoneType:
        return value is None
    if get_origin(hint) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    kind = get_origin(hint) or hint
    arguments = get_args(hint)
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        return isinstance(value, tuple) and len(value) == len(arguments)
    if kind in (int, float):
        return isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
    if kind is Callable or kind is type(Callable):
        return callable(value)
    if isinstance(hint, TypeVar) or kind is Any or not isinstance(kind, type) or Protocol in kind.__mro__:
        return True
    return isinstance(value, kind)


def _items(value: Any, hint: Any) -> Iterable[tuple[object, object, Any]]:
    """(key or index, item, its type) of a container."""
    kind = get_origin(hint)
    arguments = get_args(hint)
    if not isinstance(kind, type) or not arguments:
        return
    if issubclass(kind, Mapping):
        for key, item in value.items():
            yield key, key, arguments[0]
            yield key, item, arguments[1]
    elif issubclass(kind, tuple) and arguments[-1] is not Ellipsis:
        yield from zip(range(len(value)), value, arguments, strict=True)
    elif issubclass(kind, Sequence | Set):
        yield from ((index, item, arguments[0]) for index, item in enumerate(value))


def _words(hint: Any) -> str:
    hint = _bare(hint)
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_words, get_args(hint)))
    if hint is NoneType:
        return "None"
    names = {int: "an integer", float: "a number", bool: "True or False", str: "a string"}
    return names.get(hint) or (hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint))
