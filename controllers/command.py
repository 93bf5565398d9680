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

# name -> line for the help
LOOPS = {
    "grpo": "train by group-relative policy optimization and its relatives",
    "ppo": "train by proximal policy optimization with a value model",
    "sft": "train on the answers of problems",
    "dpo": "train on pairs of a chosen and a rejected answer",
}

# name -> (module or module:function, line for the help). Without a function: `main`.
PROGRAMS = {
    "service": ("controllers.service.command", "run a trainer and a generator that other programs can attach to"),
    "tinker-server": ("controllers.tinker_server.command", "run a server for programs of the SDK tinker"),
    "export": ("controllers.program.export", "write the weights or adapters of a run as a Hugging Face directory"),
    "compare": ("controllers.observe.compare", "show the curves of several runs in the same charts"),
    "requirements": (
        "controllers.command:requirements",
        "print a file of requirements: a lock for pip, or overrides or excludes for uv",
    ),
}

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
    names = [*LOOPS, *PROGRAMS]
    if name not in names:
        near = difflib.get_close_matches(name, names) or names
        sys.exit(_error(f"there is no command {name}; did you mean {' or '.join(near)}?"))
    sys.argv = [f"{COMMAND} {name}", *arguments[1:]]
    sys.path.append(os.getcwd())  # for --task my_task:MyTask; last, so that a package `configs` there hides nothing
    try:
        require_own_packages()
        program = program_of(name)
    except ImportError as error:
        remedy = "; the programs need the packages of the extra `loop`; docs/install.md says how to install them"
        sys.exit(_error(f"{error}{remedy if isinstance(error, ModuleNotFoundError) else ''}"))
    program()


def _error(text: str) -> int:
    print(f"{COMMAND}: error: {text}", file=sys.stderr)
    return 2


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
        first = Path(spec.origin).parent if spec and spec.origin else None
        if first != own / name:
            raise ImportError(
                f"the package {name} of rl-actors is {own / name}, but Python finds {first} first; remove one of them"
            )


def requirements() -> None:
    """Print a lock for pip install --no-deps -r, or a file for uv's --overrides or --excludes."""
    folder = files("rl_actors") / "requirements"
    parser = argparse.ArgumentParser(prog=f"{COMMAND} requirements", description=requirements.__doc__)
    parser.add_argument("file", choices=sorted(file.name.removesuffix(".txt") for file in folder.iterdir()))
    print((folder / f"{parser.parse_args().file}.txt").read_text(), end="")
