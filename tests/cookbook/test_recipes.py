"""Runs unmodified recipes (training programs) of tinker-cookbook against our Tinker server.

`make test-cookbook` runs these tests.
"""

import json
import re
from statistics import fmean

import pytest
from recipes import MODEL, serving
from supervised import supervised_start

pytestmark = pytest.mark.slow
NAMED = f"model_name={MODEL}"
RL_STEPS = 18


def test_sl_loop_lowers_its_loss(cookbook):
    arguments = ["batch_size=16", "max_length=256", "lora_rank=8", "learning_rate=1e-3", "max_steps=8", "save_every=4"]
    done = cookbook.run("recipes.sl_loop", NAMED, *arguments, log="sl_loop").require_success()
    losses = done.metrics("train_mean_nll")
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.1, losses


def test_sl_basic_runs_to_its_end(cookbook):
    cookbook.run("recipes.sl_basic", NAMED, "max_steps=2", "eval_every=0", log="sl_basic").require_success()


def test_chat_sl_resumes_from_its_checkpoint(cookbook):
    fixed = [NAMED, "renderer_name=qwen3", "save_every=1", "eval_every=0", "lora_rank=8", "max_length=512"]
    fixed += ["dataset=HuggingFaceH4/no_robots/train.jsonl", "batch_size=32", "behavior_if_log_dir_exists=resume"]
    done = cookbook.run("recipes.chat_sl.train", *fixed, "max_steps=2", log="chat_sl").require_success()
    # Remove the final checkpoint from the list of checkpoints. The list then looks as if the program had been killed.
    checkpoints = done.folder / "checkpoints.jsonl"
    lines = [line for line in checkpoints.read_text().splitlines() if json.loads(line)["name"] != "final"]
    checkpoints.write_text("".join(f"{line}\n" for line in lines))
    again = cookbook.run("recipes.chat_sl.train", *fixed, "max_steps=4", log="chat_sl").require_success()
    assert "Resumed training from" in again.output and len(again.metrics("train_mean_nll")) > 2


@pytest.mark.parametrize("loss", ["stable_reinforce", "importance_sampling"])
def test_rl_loop_runs_to_its_end_with_each_loss(cookbook, loss):
    sizes = ["batch_size=4", "group_size=4", "max_tokens=8", "max_steps=2", "lora_rank=8"]
    cookbook.run("recipes.rl_loop", NAMED, *sizes, f"loss_fn={loss}", log=f"rl_loop_{loss}").require_success()


MATH = ["env=arithmetic", "groups_per_batch=4", "group_size=4", "max_tokens=5", "max_steps=3", "lora_rank=8"]
STREAM = ["stream_minibatch_config.groups_per_batch=4", "stream_minibatch_config.num_minibatches=2"]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("default", []),
        ("asynchronous", ["max_steps_off_policy=2"]),
        ("streamed", STREAM),
        ("importance_sampling", ["loss_fn=importance_sampling", "compute_post_kl=True"]),
        ("ppo", ["loss_fn=ppo"]),
        ("cispo", ["loss_fn=cispo"]),
    ],
)
def test_math_rl_runs_to_its_end_with_each_option(cookbook, name, more):
    fixed = [NAMED, *MATH, "renderer_name=qwen3", "behavior_if_log_dir_exists=delete"]
    cookbook.run("recipes.math_rl.train", *fixed, *more, log=f"math_{name}").require_success()


def test_math_rl_raises_the_reward_of_a_supervised_start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("additions")
    fixed = [NAMED, "env=arithmetic", "renderer_name=qwen3", "lora_rank=0", "learning_rate=2e-4", "max_tokens=5"]
    sizes = ["groups_per_batch=32", "group_size=8", f"max_steps={RL_STEPS}", "eval_every=0", "save_every=0"]
    with serving(folder / "served", supervised_start(folder)) as cookbook:
        done = cookbook.run("recipes.math_rl.train", *fixed, *sizes, log="math_learns").require_success()
    rewards = done.metrics("env/all/reward/total")
    print(f"math_rl's rewards by step: {[round(reward, 3) for reward in rewards]}", flush=True)
    assert len(rewards) == RL_STEPS and 0.1 <= rewards[0] <= 0.6
    # The test compares the mean of the last four steps, because a batch has only 32 problems, and some batches are
    # harder than others.
    assert fmean(rewards[-4:]) >= rewards[0] + 0.2


def test_guess_number_runs_to_its_end(cookbook):
    arguments = ["renderer_name=qwen3", "batch_size=2", "group_size=2", "eval_every=0", "max_steps=2", "max_tokens=8"]
    module = "recipes.multiplayer_rl.guess_number.train"
    cookbook.run(module, NAMED, *arguments, log="guess_number").require_success()


def test_dpo_runs_to_its_end(cookbook):
    arguments = ["renderer_name=qwen3", "batch_size=16", "max_length=256", "max_steps=2"]
    cookbook.run("recipes.preference.dpo.train", NAMED, *arguments, log="dpo").require_success()


def test_rl_numerics_check_finds_sampler_and_trainer_equal(cookbook):
    task = ["task.num_pages_min=1", "task.num_pages_max=2", "task.page_chars=60", "task.words=tea"]
    sizes = ["group_size=2", "groups_per_batch=4", "max_tokens=16", "max_trajectory_tokens=2000", "max_steps=2"]
    fixed = [NAMED, "renderer_name=qwen3", "lora_rank=8"]
    done = cookbook.run("recipes.rl_numerics_check.train", *fixed, *task, *sizes, log="numerics").require_success()
    differences = done.metrics("optim/kl_sample_train_v2")
    assert len(differences) == 2 and max(differences) < 2e-4, differences


def test_logprobs_are_those_of_the_tempered_distribution(cookbook):
    # The program prints seven rows. Each of the first six rows is for one temperature. It compares the difference of
    # two tokens' logprobs at this temperature with their difference at temperature 1, divided by this temperature. For
    # the seventh row the program samples a sequence at consistency_check_temp, and then samples the token at each
    # position again. If the two tokens of a position are equal, the program compares their logprobs. The temperature
    # is low, so that even a model with random weights samples equal tokens.
    arguments = [f"base_model={MODEL}", "consistency_check_temp=0.01"]
    done = cookbook.run_program("validate_temperature_logprobs.py", *arguments).require_success()
    # The columns of a row: the temperature, two counts, the mean difference and the largest difference. The second
    # count is the number of comparisons.
    rows = [line.split() for line in done.output.splitlines() if re.match(r" +\d\.\d{3} ", line)]
    print("\n".join(" ".join(row) for row in rows), flush=True)
    assert len(rows) == 7 and all(int(row[2]) > 0 for row in rows), done.output
    assert max(float(row[4]) for row in rows) < 1e-4, done.output
