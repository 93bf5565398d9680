"""A shortened default run on a GPU. conftest.py starts the run before the first test, and the test of this file waits for its end."""

import json

import pytest

pytestmark = pytest.mark.gpu


def test_the_default_run_learns_on_a_gpu(tiny_run):
    process, folder, output = tiny_run
    returncode = process.wait(timeout=400)
    print(output.read_text()[-4000:])
    assert returncode == 0
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    grpo = [record for record in records if record["phase"] == "grpo" and not record.get("skipped")]
    assert max(record["logprob_diff/mean"] for record in grpo) < 1e-3
    assert grpo[-1]["eval/reward"] > 0.2
