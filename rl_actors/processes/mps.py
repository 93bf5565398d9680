"""NVIDIA's Multi-Process Service (MPS): kernels of engines that share a GPU overlap instead of taking turns.

The first engine on a host starts a daemon for the engines of its program. The daemon ends after the last of them.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import IO

PROGRAM = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
SYSTEMS_OWN = Path("/tmp/nvidia-mps")  # where CUDA looks for a daemon by default
PREFIX = "rl_actors_mps_"
NAME = PREFIX + uuid.uuid4().hex[:12]  # of the folder for the engines of this program
ENGINES = "engines"  # a file on which every engine holds a shared lock, which the kernel drops at its death
STARTING = "starting"  # a file whose lock lets one engine at a time start the daemon
START_TIMEOUT = 30.0
GUARD = f'{PROGRAM} -f & exec 9> "$1/{ENGINES}"; flock 9; echo quit | {PROGRAM}; wait; rm -rf "$1"'
"""A script that runs the daemon until no engine is left. $1: the folder."""
_held: list[IO[str]] = []
logger = logging.getLogger(__name__)


def environment() -> dict[str, str]:
    """For a process that shares its GPU with others of this program. Empty if a daemon of the user serves
    it, or if the GPU is a part of one (MIG), which a daemon that sees all GPUs cannot serve.
    """
    is_part = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG")
    if is_part or PIPES in os.environ or (SYSTEMS_OWN / "control").exists():
        return {}
    folder = str(Path(tempfile.gettempdir()) / NAME)
    return {PIPES: folder, LOGS: folder}


def join() -> None:
    """Before CUDA is used, become a client of `environment`'s daemon, if it was given and can be started."""
    folder = Path(os.environ.get(PIPES, ""))
    if not folder.name.startswith(PREFIX):
        return
    try:
        _find_or_start(folder)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        logger.info("engines that share a GPU compute in turns: %s", error)
        del os.environ[PIPES], os.environ[LOGS]


def _find_or_start(folder: Path) -> None:
    if shutil.which(PROGRAM) is None or shutil.which("flock") is None:
        raise RuntimeError(f"there is no {PROGRAM} or no flock")
    _held.append(_lock_shared(folder))
    with (folder / STARTING).open("w") as starting:
        fcntl.flock(starting, fcntl.LOCK_EX)
        if _answers():
            return
        # The daemon numbers the GPUs for its clients, so it must see all of them.
        seen = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        null = subprocess.DEVNULL
        command = ["sh", "-c", GUARD, "sh", str(folder)]
        subprocess.Popen(command, env=seen, stdin=null, stdout=null, stderr=null, start_new_session=True)
        deadline = time.monotonic() + START_TIMEOUT
        while not _answers():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{PROGRAM} did not start within {START_TIMEOUT:g} s")
            time.sleep(0.05)


def _lock_shared(folder: Path) -> IO[str]:
    """An open file with the lock that keeps the daemon."""
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the guard of earlier engines removes the folder
            file = (folder / ENGINES).open("w")
            fcntl.flock(file, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
                return file


def _answers() -> bool:
    command = b"get_server_list\n"
    return subprocess.run([PROGRAM], input=command, capture_output=True, timeout=START_TIMEOUT).returncode == 0
