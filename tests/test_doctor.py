"""Tests scripts/doctor.py, which checks a machine and its .venv. The test uses the lock files of this repository."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts/doctor.py"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_in_an_empty_venv_the_packages_of_the_lock_file_are_reported_as_missing(device, tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("doctor", SCRIPT)
    doctor = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(doctor)
    monkeypatch.setattr(doctor, "VENV", tmp_path)
    report = doctor.Report()
    assert not doctor.check_packages(report, device)
    assert report.problems > 200
    assert "torch 2.13.0" in capsys.readouterr().out
