"""The default run starts before the first test and is read by the last: it takes as long as all others together."""

import subprocess
import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def tiny_run(tmp_path_factory):
    """(process, its run's folder, its output's file)."""
    folder = tmp_path_factory.mktemp("tiny")
    command = [sys.executable, "-m", "controllers.grpo", "--config", "tiny", "--output-dir", str(folder / "run")]
    # A size of the cache: the trainers of other tests come and go while vLLM would measure what is left.
    command += ["--steps", "8", "--generator.kv-cache-bytes", str(1 << 28)]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    yield process, folder / "run", folder / "output"
    process.terminate()
    process.wait()
