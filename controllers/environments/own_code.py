"""Imports the user's functions and tasks by module:function, and checks them before a run."""

import importlib
import inspect
import traceback
from collections.abc import Callable

from controllers.environments.base import Problem


def imported(field_name: str, name: str) -> Callable:
    """ "module:function" -> the function. Raises ValueError, naming the config field."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # the user's module may raise anything
        raise ValueError(f"{field_name}={name!r} cannot be imported: {described(error)}") from error
    if not callable(found):
        raise ValueError(f"{field_name}={name!r} is {type(found).__name__} {found!r}, not a function or a class")
    return found


def called(field_name: str, name: str, **arguments: object) -> object:
    """The result of the function. Raises ValueError, naming the config field, if it raises."""
    function = imported(field_name, name)
    try:
        return function(**arguments)
    except Exception as error:  # the user's function may raise anything
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ValueError(f"{field_name}={name!r} called with {given}: {described(error)}") from error


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


def require_problems(name: str, environment: object, *, trains: bool) -> None:
    """Raises ValueError if held-out problems or problem(0) break the protocol, or keys repeat.

    trains=False: evaluation only, which needs no training problems.
    """
    held_out = _asked(name, environment, "held_out")
    if not isinstance(held_out, list) or not held_out:
        raise ValueError(f"{name}: held_out() returned {held_out!r}, not a list of at least one problem")
    keys: set[str] = set()
    for problem in held_out:
        _require_problem(f"{name}: held_out()", problem)
        if problem.key in keys:
            raise ValueError(f"{name}: held_out() returned two problems with the key {problem.key!r}")
        keys.add(problem.key)
    if trains:
        _require_problem(f"{name}: problem(0)", _asked(name, environment, "problem", 0))


def described(error: BaseException) -> str:
    """described(KeyError("x")) -> "KeyError: 'x' (my_task.py:12)".

    The place is the innermost frame outside this module and the import system.
    """
    hidden = (__file__, importlib.__file__)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in hidden and not frame.filename.startswith("<frozen")
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _asked(name: str, environment: object, method: str, *arguments: int) -> object:
    try:
        return getattr(environment, method)(*arguments)
    except Exception as error:  # the user's method may raise anything
        given = ", ".join(map(str, arguments))
        raise ValueError(f"{name}: {method}({given}) raised {described(error)}") from error


def _require_problem(where: str, problem: object) -> None:
    if not isinstance(problem, Problem):
        raise ValueError(f"{where} gave {problem!r}, not a Problem")
    for field_name in ("prompt", "answer", "key"):
        value = getattr(problem, field_name)
        if not isinstance(value, str):
            raise ValueError(f"{where} gave a problem whose {field_name} is {type(value).__name__} {value!r}, not text")
