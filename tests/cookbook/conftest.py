"""A Tinker server of the tiny model, for the recipes in this folder."""

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from data_sets import write_data_sets
from recipes import MODEL, PYTHON, ROOT, Cookbook, read_exports


@pytest.fixture(scope="session")
def cookbook(tmp_path_factory) -> Iterator[Cookbook]:
    if not PYTHON.is_file():
        pytest.skip("there is no .venv-cookbook; `make cookbook` makes it")
    folder = tmp_path_factory.mktemp("cookbook")
    write_data_sets(folder)
    state = folder / "state"
    command = [
        str(ROOT / ".venv/bin/python"),
        "-m",
        "controllers.serve",
        "--config",
        "tiny_chat",
        "--address",
        "127.0.0.1:0",
    ]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--serve-as", MODEL, "--state", str(state)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        exports = read_exports(server, folder / "server.log")
        # The tokenizer's loader takes a folder of this name for the model.
        (folder / MODEL).parent.mkdir(parents=True, exist_ok=True)
        (folder / MODEL).symlink_to(state / "base" / MODEL)
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}
        yield Cookbook(folder=folder, environment=os.environ | offline | exports)
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=120) == 0, (folder / "server.log").read_text()[-4000:]
