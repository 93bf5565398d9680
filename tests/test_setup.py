"""Tests of scripts/setup.sh in a checkout that has a .venv.

The tests check the messages, and whether the script keeps the .venv. They install nothing.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts/setup.sh"
LOCK = "torch==2.0.0\nsome-package==1.0\n"


class Checkout:
    """A folder with the script, two lock files (for CPU and CUDA) of the same two packages, and a .venv that has the metadata of these
    packages, but not their code.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, folder / "rl_actors/requirements/cpu.txt"
        self.venv, self.stamp = folder / ".venv", folder / ".venv/stamp"
        (folder / "scripts").mkdir(parents=True)
        shutil.copy(SCRIPT, folder / "scripts")
        for lock in (self.lock, folder / "rl_actors/requirements/cuda.txt"):
            lock.parent.mkdir(parents=True, exist_ok=True)
            lock.write_text(LOCK)
        (self.venv / "bin").mkdir(parents=True)
        (self.venv / "bin/python").symlink_to(sys.executable)
        for name in ("torch-2.0.0+cpu", "Some_Package-1.0", "pip-24.0", "rl_actors-0.1.0"):
            self.install(name)
        (self.venv / "lock.txt").write_text(LOCK)
        self.stamp.write_text(self.set_up("--stamp").stdout)

    def install(self, name: str) -> None:
        (self.venv / "lib/python3.11/site-packages" / f"{name}.dist-info").mkdir(parents=True)

    def set_up(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        variables = {**os.environ, "DEVICE": "cpu", "PYTHON": sys.executable, "PIP_NO_INDEX": "1", **environment}
        command = ["bash", str(self.folder / "scripts/setup.sh"), *arguments]
        return subprocess.run(command, env=variables, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path / "checkout")


def test_a_finished_environment_is_left_as_it_is(checkout):
    done = checkout.set_up()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert checkout.stamp.exists()


@pytest.mark.parametrize("change", ["move", "copy", "lock", "device", "python", "unfinished", "move and lock"])
def test_setup_says_why_it_replaces_an_environment_and_keeps_it_if_no_python_is_found(checkout, tmp_path, change):
    environment = {}
    old, lock = checkout.folder, "rl_actors/requirements/cpu.txt has changed since .venv was made"
    moved = f"it was made in {old} and refers to that folder"
    reason = {
        "move": moved,
        "copy": moved,
        "lock": lock,
        "device": "it is for cpu and not for cuda",
        "python": "its Python does not exist any more",
        "unfinished": "this script did not finish it",
        "move and lock": f"{lock}, {moved}",
    }[change]
    if "lock" in change:
        checkout.lock.write_text(LOCK + "another==1.0\n")
    if change == "device":
        environment["DEVICE"] = "cuda"
    if change == "python":
        (checkout.venv / "bin/python").unlink()
    if change == "unfinished":
        checkout.stamp.unlink()
    if "move" in change:
        checkout.folder = old.rename(tmp_path / "elsewhere")
    if change == "copy":
        checkout.folder = Path(shutil.copytree(old, tmp_path / "elsewhere", symlinks=True))
    failed = checkout.set_up(PYTHON="/nowhere/python", **environment)
    assert failed.stdout == f"[setup] replacing .venv: {reason}\n"
    assert failed.returncode == 1 and "none of /nowhere/python is Python 3.11 or 3.12" in failed.stderr
    assert (checkout.folder / ".venv/lock.txt").exists()


@pytest.mark.slow
def test_an_environment_with_packages_of_the_user_is_renamed_and_not_deleted(checkout):
    checkout.install("My_Tool-3.2")
    # Some_Package is not in the new lock. It does not count as a package of the user, because .venv/lock.txt, the lock of the old .venv, has it.
    checkout.lock.write_text("torch==2.1.0\n")
    failed = checkout.set_up()
    assert failed.returncode == 1 and "cannot install torch==2.1.0" in failed.stderr
    kept = [path for path in checkout.folder.glob(".venv-*") if path.is_dir()]
    assert len(kept) == 1 and (kept[0] / "lib/python3.11/site-packages/My_Tool-3.2.dist-info").is_dir()
    assert "packages that are not in the lock: my-tool\n" in failed.stdout
    assert f"so it was renamed {kept[0].name}" in failed.stdout
