"""Tests of the installed project: its command, its version, its requirements, and conflicts with other installed
packages.
"""

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from waiting import GUARD

import rl_actors
from controllers import command
from rl_actors.transports import index
from rl_actors.transports.index import IndexTransport
from rl_actors.transports.torchstore import TorchStoreTransport

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def start(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["rl-actors", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    command.main()


def test_the_command_lists_its_programs_and_each_program_prints_its_help(monkeypatch, capsys):
    start(monkeypatch)
    listed = capsys.readouterr().out
    for name in [*command.LOOPS, *command.PROGRAMS]:
        assert f"\n  {name} " in listed
        with pytest.raises(SystemExit) as exit:
            start(monkeypatch, name, "--help")
        shown = capsys.readouterr().out
        assert exit.value.code == 0 and shown.startswith(f"usage: rl-actors {name} ") and len(shown) > 100
    start(monkeypatch, "--version")
    assert capsys.readouterr().out == f"{rl_actors.__version__}\n"
    assert PROJECT["project"]["scripts"] == {"rl-actors": "controllers.command:main"}


def test_an_unknown_program_is_refused_and_a_similar_name_is_suggested(monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit:
        start(monkeypatch, "gpro")
    assert exit.value.code == 2 and "there is no command gpro; did you mean grpo?" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_printed_lock_has_every_package_that_the_project_requires(monkeypatch, capsys, device):
    start(monkeypatch, "requirements", device)
    pinned = {line.split("==")[0].lower() for line in capsys.readouterr().out.splitlines() if "==" in line}
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    asked = project["dependencies"] + extras["loop"] + extras["torchstore"] + extras["dev"] + extras[device]
    names = {requirement.split("=")[0].split(">")[0].split("<")[0].lower() for requirement in asked}
    assert names - pinned == set()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_overrides_for_uv_are_the_versions_of_the_lock(monkeypatch, capsys, device):
    start(monkeypatch, "requirements", device)
    locked = capsys.readouterr().out.splitlines()
    start(monkeypatch, "requirements", f"{device}-overrides")
    overrides = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert {line for line in overrides if "==" in line} <= set(locked)
    torch, monarch = (
        name for name in PROJECT["project"]["dependencies"] if name.startswith(("torch==", "torchmonarch"))
    )
    assert overrides[0].removesuffix("+cpu") == torch and overrides[1] == monarch


def test_the_packages_that_uv_excludes_are_not_in_the_lock(monkeypatch, capsys):
    start(monkeypatch, "requirements", "cpu")
    locked = {line.split("==")[0] for line in capsys.readouterr().out.splitlines()}
    start(monkeypatch, "requirements", "cpu-excludes")
    excludes = {line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")}
    assert len(excludes) == 3 and not excludes & locked


@pytest.mark.slow
@pytest.mark.parametrize("name", ["program.export", "observe.compare"])
def test_the_usage_of_a_program_that_is_started_as_a_module_names_the_module(name):
    program = (
        f"import runpy, sys; sys.argv = ['x', '--help']; runpy.run_module('controllers.{name}', run_name='__main__')"
    )
    done = run(program, ROOT)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: python -m controllers.{name} "), done.stderr


def run(program: str, folder: Path) -> subprocess.CompletedProcess:
    command_line = [sys.executable, "-c", program]
    return subprocess.run(command_line, cwd=folder, capture_output=True, text=True, timeout=GUARD)


@pytest.mark.slow
def test_a_package_named_configs_in_the_current_folder_does_not_shadow_ours(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").write_text("raise RuntimeError('not ours')")
    # `python -c` puts the current folder first on sys.path, but a script that pip has installed does not. So the
    # program replaces the current folder with the folder of this project.
    program = f"import sys; sys.path[0] = {str(ROOT)!r}; sys.argv = ['rl-actors', 'grpo', '--dry-run']\n"
    done = run(program + "from controllers.command import main; main()", tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_package_named_configs_before_ours_on_sys_path_is_refused_and_both_folders_are_named(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").write_text("")
    program = f"import sys; sys.path[:1] = [{str(tmp_path)!r}, {str(ROOT)!r}]; sys.argv = ['rl-actors', 'grpo']\n"
    done = run(program + "from controllers.command import main; main()", Path("/"))
    assert done.returncode == 2
    assert f"configs of rl-actors is {ROOT / 'configs'}, but Python finds {tmp_path / 'configs'} first" in done.stderr


def test_without_torchstore_a_small_actor_keeps_the_index_and_the_log_says_so(monkeypatch, caplog):
    caplog.set_level("INFO")
    assert isinstance(index.default_transport(), TorchStoreTransport)
    monkeypatch.setattr(index, "find_spec", lambda name: None if name == "torchstore" else find_spec(name))
    made = index.default_transport()
    assert isinstance(made, IndexTransport)
    assert "torchstore is not installed: a small actor keeps the index" in caplog.text


def test_the_wheel_has_every_file_that_the_installation_page_names():
    named = set(re.findall(r"unpacked/(\S+\.txt)", (ROOT / "docs/install.md").read_text()))
    assert len(named) == 4 and all((ROOT / name).is_file() for name in named), named
    assert PROJECT["tool"]["setuptools"]["package-data"]["rl_actors"] == ["requirements/*.txt"]
