"""Imports the user's functions and tasks by module:function, and checks them before a run."""

import importlib
import inspect
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any


def imported(field_name: str, name: str) -> Callable:
    """ "module:function" -> the function. Raises ValueError, naming the config field."""
    module, _, function = name.partition(":")
    where = f"{field_name}={name!r}"
    found = tried(f"{where} cannot be imported:", lambda: getattr(importlib.import_module(module), function))
    if not callable(found):
        raise ValueError(f"{where} is {type(found).__name__} {found!r}, not a function or a class")
    return found


def tried(failure: str, function: Callable, /, *arguments: object, **named: object) -> Any:
    """The result of a user's function. Raises ValueError, beginning with `failure`, if it raises."""
    try:
        return function(*arguments, **named)
    except Exception as error:  # the user's code may raise anything
        raise ValueError(f"{failure} {described(error)}") from error


def require_takes(name: str, function: object, *parameters: str) -> None:
    """Raises ValueError unless `function` can be called with these arguments."""
    if not callable(function):
        raise ValueError(f"{name} is {type(function).__name__} {function!r}, not a function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions in C have no signature
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise ValueError(f"{name} must take ({', '.join(parameters)}): {error}") from None


def described(error: BaseException) -> str:
    """described(KeyError("x")) -> "KeyError: 'x' (my_task.py:12)", the innermost place of the user's."""
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib"))
    hidden = (__file__, importlib.__file__, "<frozen")
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(hidden)]
    frames = [each for each in frames if not each.filename.startswith(libraries)] or frames
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
