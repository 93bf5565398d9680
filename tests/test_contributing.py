"""The diff in CONTRIBUTING.md that adds a verb to the trainer applies to the code of today."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_diff_that_adds_a_trainer_verb_applies_and_touches_engine_actor_and_client():
    diff = (ROOT / "CONTRIBUTING.md").read_text().split("```diff\n")[1].split("```")[0]
    files = [line.removeprefix("+++ b/rl_actors/") for line in diff.splitlines() if line.startswith("+++ ")]
    assert files == ["engine/train_engine.py", "policy_trainer.py", "clients/training.py"]
    command = ["git", "apply", "--check", "-"]
    applied = subprocess.run(command, cwd=ROOT, input=diff, text=True, capture_output=True)
    assert applied.returncode == 0, applied.stderr
