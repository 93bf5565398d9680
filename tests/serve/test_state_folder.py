"""A folder of state belongs to one running server and to one base model."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import GUARD, wait_until

from controllers.tinker_server.start import claimed, require_base

ROOT = Path(__file__).parents[2]


def model(path: Path, weights: bytes = b"w" * 3_000_000) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_a_folder_of_another_base_is_refused_with_both_names(tmp_path):
    one = model(tmp_path / "one")
    require_base(tmp_path, "one", one)
    require_base(tmp_path, "one", one)
    require_base(tmp_path, "renamed", model(tmp_path / "copy"))  # the same weights at another place
    other = model(tmp_path / "other", b"w" * 2_999_999 + b"x")
    with pytest.raises(
        ValueError, match=r"holds runs of the base model 'renamed' \(.*copy\), so it cannot serve 'other'"
    ):
        require_base(tmp_path, "other", other)


def test_a_second_server_on_a_folder_is_refused_until_the_first_ends(tmp_path):
    with (
        claimed(tmp_path),
        pytest.raises(ValueError, match=rf"a server that is running \(process {os.getpid()}\)"),
        claimed(tmp_path),
    ):
        pass
    with claimed(tmp_path):
        pass


@pytest.mark.slow
def test_a_signal_ends_a_server_that_is_still_starting(tmp_path):
    command = [sys.executable, "-m", "controllers.tinker_server", "--config", "tiny_chat", "--address", "127.0.0.1:0"]
    command += ["--state", str(tmp_path / "state")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stderr=log, stdout=log)
    wait_until(lambda: "starting" in (tmp_path / "log").read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(GUARD) == 0
    text = (tmp_path / "log").read_text()
    assert "TINKER_BASE_URL" not in text and "Traceback" not in text
