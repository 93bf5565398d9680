"""A fixture starts a GRPO run with `--config tiny`. The run takes as long as all tests of this folder together. So the run starts before the
first test, and most tests run at the same time as the run.

test_tiny_run.py reads the results of the run. Tests that measure the GPU's free memory or the speed of copies wait for the end of the run.
"""

import subprocess
import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def tiny_run(tmp_path_factory):
    """(process of the run, folder of the run, file with the output of the process)."""
    folder = tmp_path_factory.mktemp("tiny")
    command = [sys.executable, "-m", "controllers.grpo", "--config", "tiny", "--output-dir", str(folder / "run")]
    # The KV cache has a fixed size, because vLLM cannot measure the free memory while trainers of other tests start and end.
    command += ["--steps", "8", "--generator.kv-cache-bytes", str(1 << 28)]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    yield process, folder / "run", folder / "output"
    process.terminate()
    process.wait()
