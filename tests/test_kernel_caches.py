"""Tests of the environment that tells packages where to keep compiled kernels."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from rl_actors.processes import kernel_caches


@pytest.fixture(autouse=True)
def no_caches(monkeypatch):
    for name in (kernel_caches.VARIABLE, *kernel_caches.FOLDERS, *kernel_caches.SWITCHES, kernel_caches.NO_BYTECODE):
        monkeypatch.delenv(name, raising=False)


def test_all_packages_keep_their_kernels_in_one_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = kernel_caches.environment()
    assert {Path(found[name]).parent for name in kernel_caches.FOLDERS} == {tmp_path / "rl_actors"}
    assert found["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    monkeypatch.setenv(kernel_caches.VARIABLE, str(tmp_path / "own"))
    assert kernel_caches.environment()["TRITON_CACHE_DIR"] == str(tmp_path / "own" / "triton")


def test_a_variable_of_the_user_stays(monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_caches.VARIABLE, str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    found = kernel_caches.environment()
    assert "TRITON_CACHE_DIR" not in found and "VLLM_CACHE_ROOT" in found


PRINTS_CACHED = "import json.tool; print(json.tool.__cached__)"


def test_where_python_may_not_write_bytecode_beside_the_modules_it_is_kept_with_the_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_caches.VARIABLE, str(tmp_path))
    found = SimpleNamespace(cached=str(tmp_path / "torch.pyc"))
    monkeypatch.setattr(kernel_caches, "find_spec", lambda name: found)
    assert "PYTHONPYCACHEPREFIX" not in kernel_caches.environment()
    monkeypatch.setenv(kernel_caches.NO_BYTECODE, "1")
    (tmp_path / "torch.pyc").touch()  # the packages were compiled when they were installed
    assert "PYTHONPYCACHEPREFIX" not in kernel_caches.environment()
    (tmp_path / "torch.pyc").unlink()
    environment = os.environ | kernel_caches.environment()
    printed = subprocess.run([sys.executable, "-c", PRINTS_CACHED], env=environment, capture_output=True, text=True)
    file = Path(printed.stdout.strip())
    assert file.is_relative_to(tmp_path / "bytecode") and file.is_file()


def test_torchs_own_folder_is_not_taken_for_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_caches.VARIABLE, str(tmp_path))
    cache_dir()  # sets the variable
    assert kernel_caches.environment()["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")


def test_without_a_writable_folder_the_packages_use_their_own(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(kernel_caches.VARIABLE, str(tmp_path / "file" / "below"))
    assert kernel_caches.environment() == {}
