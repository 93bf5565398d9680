"""The command `rl-actors`, which starts a program of this package by name.

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
    "ppo": "train by proximal policy optimization with a value model",
    "sft": "train on the answers of problems",
    "dpo": "train on pairs of a chosen and a rejected answer",
}
"""Loops, each with a line for the help."""

PROGRAMS = {
    "service": (
        "controllers.service.command",
        "run a trainer and a generator that other programs can attach to",
    ),
    "tinker-server": ("controllers.tinker_server.command", "run a server for programs of the SDK tinker"),
    "export": ("controllers.program.export", "write the weights or adapters of a run as a Hugging Face directory"),
    "compare": ("controllers.observe.compare", "show the curves of several runs in the same charts"),
    "requirements": (
        "controllers.command:requirements",
        "print a file of requirements: a lock for pip, or overrides or excludes for uv",
    ),
}
"""name -> (module or module:function, line for the help). Without a function: `main`."""

COMMAND = "rl-actors"


def main() -> None:
    """Exits with status 2 and a one-line error for an unknown name or a failed import."""
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
        print(f"{COMMAND}: error: there is no command {name}; did you mean {' or '.join(near)}?", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"{COMMAND} {name}", *arguments[1:]]
    # For `--task my_task:MyTask` in the current folder; last, so that a package `configs` there
    # hides nothing.
    sys.path.append(os.getcwd())
    try:
        require_own_packages()
        program = program_of(name)
    except ModuleNotFoundError as error:
        remedy = "the programs need the packages of the extra `loop`; docs/install.md says how to install them"
        print(f"{COMMAND}: error: {error}; {remedy}", file=sys.stderr)
        sys.exit(2)
    except ImportError as error:
        print(f"{COMMAND}: error: {error}", file=sys.stderr)
        sys.exit(2)
    program()


def program_of(name: str) -> Callable[[], None]:
    """The function that starts a program. Raises ModuleNotFoundError for a missing package."""
    if name in LOOPS:
        import_module("configs")  # imports all loops
        return partial(import_module("controllers.program.launch").start_loop, f"controllers.{name}")
    module, _, function = PROGRAMS[name][0].partition(":")
    return getattr(import_module(module), function or "main")


def started_as(module: str) -> str:
    """ "rl-actors export", "python -m controllers.program.export" or "python my_loop.py"."""
    first = sys.argv[0]
    if module.endswith(".py"):
        return f"python {module}"
    return first if first.startswith(f"{COMMAND} ") else f"python -m {module}"


def usage() -> str:
    lines = [f"usage: {COMMAND} COMMAND …; {COMMAND} COMMAND --help says more", ""]
    meanings = LOOPS | {name: meaning for name, (_, meaning) in PROGRAMS.items()}
    lines += [f"  {name:<15}{meaning}" for name, meaning in meanings.items()]
    return "\n".join([*lines, "", "  --version     print the version"])


def require_own_packages() -> None:
    """Raises ImportError, naming both, for a `controllers` or `configs` not beside rl_actors."""
    own = Path(rl_actors.__file__).parents[1]
    for name in ("controllers", "configs"):
        spec = find_spec(name)
        found = Path(spec.origin).parent if spec and spec.origin else None
        if found != own / name:
            raise ImportError(
                f"the package {name} of rl-actors is {own / name}, but Python finds {found} first; remove one of them"
            )


def requirements() -> None:
    """Print a file of requirements: the locks cpu and cuda, for pip install --no-deps -r, or a file
    for uv.

    uv's --overrides and --excludes take the others, to install the extras of rl-actors beside
    packages of your own.
    """
    folder = files("rl_actors") / "requirements"
    parser = argparse.ArgumentParser(prog=f"{COMMAND} requirements", description=requirements.__doc__)
    parser.add_argument("file", choices=sorted(file.name.removesuffix(".txt") for file in folder.iterdir()))
    print((folder / f"{parser.parse_args().file}.txt").read_text(), end="")
