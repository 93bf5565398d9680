"""Folders in which torch, Triton, vLLM, FlashAttention 4 and Python keep what they compile for later processes."""

import logging
import os
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "RL_ACTORS_CACHE"
"""Environment variable with the folder, by default rl_actors in $XDG_CACHE_HOME or ~/.cache."""
FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attention",
    "QUACK_CACHE_DIR": "quack",
}
SWITCHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}  # by default every process compiles anew
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
TORCHS_OWN = "torchinductor_"  # prefix of the name of torch's folder in /tmp
logger = logging.getLogger(__name__)


def environment() -> dict[str, str]:
    """For a new process on this host, without variables that the user has set.

    Empty if the folder cannot be written: the packages then use folders of their own.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get(VARIABLE) or caches / "rl_actors").expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except OSError as error:
        logger.info("no folder for compiled kernels: %s", error)
        return {}
    wanted = SWITCHES | {name: str(folder / part) for name, part in FOLDERS.items()}
    # in many images: packages without bytecode, so every process would compile all modules again
    if os.environ.get(NO_BYTECODE) and not Path(str(find_spec("torch").cached)).is_file():  # type: ignore[union-attr]
        wanted |= {NO_BYTECODE: "", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    # torch itself sets its variable, in a process that has asked for its folder
    given = {name for name in wanted if not Path(os.environ.get(name, TORCHS_OWN)).name.startswith(TORCHS_OWN)}
    given -= {NO_BYTECODE}
    return {name: value for name, value in wanted.items() if name not in given}
