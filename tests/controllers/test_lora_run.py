"""A test of GRPO that trains LoRA adapters on the weights of an exported Hugging Face directory.

The generator pulls merged weights, or only the adapters.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from waiting import GUARD

from configs.tiny import tiny
from controllers.observe.run_folder import read_jsonl
from rl_actors import MemoryTransport, TrainerClient

ROOT = Path(__file__).parents[2]
FLAGS = {
    "--steps": 4,
    "--sft-steps": 0,
    "--evaluate-every": 2,
    "--checkpoint-every": 4,
    "--rollouts.groups-per-step": 16,
    "--schedule.learning-rate": 2e-2,
    "--updates-per-step": 1,
    "--epochs-per-step": 1,
    # The reference model has the weights of hf_path. So the KL divergence from the reference model shows how far the
    # adapters have moved the policy.
    "--reference-kl": 0.01,
    "--reference-kl-in": "reward",
    # With random weights about half of the completions get this reward, so every step has a gradient.
    "--environment.task": "tests.fakes:parity_reward",
    "--environment.options": "{}",
    "--trainer.lora.rank": 4,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A Hugging Face directory with the random weights of the config `tiny`, written by export_hf."""
    path = str(tmp_path_factory.mktemp("base") / "exported")
    with TrainerClient.spawn(tiny().trainer, transport=MemoryTransport()) as trainer:
        trainer.export_hf(path).result()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_a_run_samples_with_the_adapters_that_it_trains(base, tmp_path, sync):
    before = load_file(f"{base}/model.safetensors")
    options = FLAGS | {"--trainer.lora.sync": sync, "--trainer.hf-path": base}
    flags = ["--config", "tiny", "--output-dir", tmp_path / "run", *(item for flag in options.items() for item in flag)]
    command = [sys.executable, "-m", "controllers.grpo", *map(str, flags)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=GUARD)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    _, *records = read_jsonl(tmp_path / "run/metrics.jsonl")  # step 0 trains nothing
    assert [record.get("policy_version") for record in records] == [1, 2, 3, 4]
    assert all(0 < record["reward/mean"] < 1 and record["grad_norm"] > 0 for record in records)
    assert all(record["logprob_diff/max"] < 1e-4 and record["policy_lag"] == 0 for record in records), records
    assert abs(records[0]["kl/reference"]) < 1e-5 and abs(records[-1]["kl/reference"]) > 1e-2, records
    assert all("eval/reward" in record for record in records[1::2])
    after = load_file(f"{base}/model.safetensors")
    assert all(before[name].equal(tensor) for name, tensor in after.items())
