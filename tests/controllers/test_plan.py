"""What --plan prints, and that it starts and writes nothing."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from configs.tiny import tiny
from controllers import plan
from rl_actors.footprint import memory

ROOT = Path(__file__).parents[2]


def test_the_plan_shows_layout_memory_and_every_process():
    config = tiny()
    config.trainer.parallelism.data_parallel_shard_degree = 2
    config.trainer.parallelism.tensor_parallel_degree = 2
    text = plan.describe(config)
    assert "layout: data_parallel_shard=2 x tensor_parallel=2\n" in text
    assert "rows: at most 64 positions, multiples of 64; packed, at most 128 in a microbatch\n" in text
    held = memory(config.trainer)
    for name in ("parameters", "gradients", "optimizer", "buffers", "activations", "total"):
        assert f"  {name:<12} {plan.size_text(getattr(held, name))}" in text
    places = [line.split(": ")[1] for line in text.splitlines() if line.startswith("  trainer-")]
    assert places == [
        f"data_parallel_shard {shard}, tensor_parallel {tensor}" for shard in range(2) for tensor in range(2)
    ]
    assert "  generator-0  " in text and "  controller   " in text


def test_a_reference_is_beside_the_trainer():
    assert "reference" not in plan.describe(tiny())
    text = plan.describe(replace(tiny(), reference_kl=0.1))
    assert re.search(
        r"  reference    as many processes as the trainer's, beside them, each with at most [\d.]+ MiB\n", text
    )


def test_a_long_list_of_ranks_is_cut():
    config = tiny()
    config.trainer.parallelism.data_parallel_shard_degree = 40
    assert "trainer-15" in (text := plan.describe(config)) and "trainer-16" not in text
    assert "  and 24 more trainer processes" in text


def test_the_command_line_prints_it_and_writes_nothing(tmp_path):
    command = [sys.executable, "-m", "controllers.grpo", "--config", "tiny", "--plan"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout == plan.describe(tiny()) + "\n"
    assert list(tmp_path.iterdir()) == []
