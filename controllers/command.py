"""The command `rl-actors`. It starts the programs of this package by name, each with its own arguments, and does nothing else.

rl-actors grpo --config tiny
"""

import argparse
import difflib
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import rl_actors

LOOPS = {
    "grpo": "train by group-relative policy optimization and its relatives",
    "sft": "train on the answers of problems",
    "dpo": "train on pairs of a chosen and a rejected answer",
}
"""Controllers and their meanings. launch.main starts them."""

PROGRAMS = {
    "export": ("controllers.export", "write the weights or adapters of a run as a Hugging Face directory"),
    "compare": ("controllers.compare", "draw the curves of runs over each other"),
    "requirements": ("controllers.command:requirements", "print the lock, for pip install --no-deps -r"),
}
"""Other programs and their meanings. A program is a module with a function `main`, or a function as module:function."""


def main() -> None:
    """Start the program that the first argument names. Exits with 2 and one line for a name that is unknown."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return
    if arguments[0] == "--version":
        print(rl_actors.__version__)
        return
    name = arguments[0]
    if name not in LOOPS and name not in PROGRAMS:
        known = [*LOOPS, *PROGRAMS]
        near = difflib.get_close_matches(name, known) or known
        print(f"rl-actors: error: there is no command {name}; did you mean {' or '.join(near)}?", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"rl-actors {name}", *arguments[1:]]
    # A user's module:function may lie in the current folder. The folder comes last, so that a `configs` there is not taken for ours.
    sys.path.append(os.getcwd())
    try:
        require_own_packages()
        program = program_of(name)
    except ModuleNotFoundError as error:
        remedy = "the programs need the packages of the extra `loop`; docs/install.md says how to install them"
        print(f"rl-actors: error: {error}; {remedy}", file=sys.stderr)
        sys.exit(2)
    except ImportError as error:
        print(f"rl-actors: error: {error}", file=sys.stderr)
        sys.exit(2)
    program()


def program_of(name: str) -> Callable[[], None]:
    """The function that starts a program. Raises ModuleNotFoundError if a package that the program needs is not installed."""
    if name in LOOPS:
        import_module("configs")  # this imports all controllers
        return partial(import_module("controllers.launch").main, f"controllers.{name}")
    module, _, function = PROGRAMS[name][0].partition(":")
    return getattr(import_module(module), function or "main")


def usage() -> str:
    lines = ["usage: rl-actors COMMAND …; rl-actors COMMAND --help says more", ""]
    meanings = LOOPS | {name: meaning for name, (_, meaning) in PROGRAMS.items()}
    lines += [f"  {name:<14}{meaning}" for name, meaning in meanings.items()]
    return "\n".join([*lines, "", "  --version     print the version"])


def require_own_packages() -> None:
    """Raise ImportError, naming both paths, if `controllers` or `configs` is another package than the one beside rl_actors."""
    own = Path(rl_actors.__file__).parents[1]
    for name in ("controllers", "configs"):
        spec = find_spec(name)
        found = Path(spec.origin).parent if spec and spec.origin else None
        if found != own / name:
            raise ImportError(
                f"the package {name} of rl-actors is {own / name}, but Python finds {found} first; remove one"
            )


def requirements() -> None:
    """Print the lock of a device: every package with its version. No resolver accepts these versions together, so pip needs --no-deps."""
    parser = argparse.ArgumentParser(prog="rl-actors requirements", description=requirements.__doc__)
    parser.add_argument("device", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    print((files("rl_actors") / "requirements" / f"{device}.txt").read_text(), end="")
