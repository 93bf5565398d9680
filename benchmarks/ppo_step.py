"""Times each part of a PPO step by itself. Adds up the seconds of the parts that each GPU runs, and compares the largest sum with the
seconds of a whole step.

python -m benchmarks ppo_step --config qwen3_0_6b_ppo

First controllers.ppo trains for some steps, with the actors on the GPUs that the config gives them. Then the same
actors run each part of a step by itself, and the program times the part. The parts work on new completions, as many as
in a step and with the same limit of length. The parts are
  generate: the completions
  logprobs: the logprobs of the trainer's policy, if the loss corrects for the difference between generator and trainer
  reference: the logprobs of the reference model
  values: the values of the value model
  policy, critic: the training of the policy and of the value model
  push: the trainer publishes its weights
  pull: the generator loads the published weights
The slowest GPU is the GPU with the largest sum. A step takes at least as long as this sum, and exactly as long if the
slowest GPU never waits. On a CPU all parts share one device. They may overlap on its cores, so a step can take less
time than the sum.
The weights are random, and only the times matter. The reward of a completion is the parity of its length.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.harness import results
from benchmarks.harness.gpus import Watch
from configs.qwen3_ppo import qwen3_0_6b_ppo, qwen3_4b_ppo
from configs.tiny_ppo import tiny_ppo
from controllers.algorithms.critic import Critic
from controllers.algorithms.reference import Reference
from controllers.environments import EnvironmentConfig, Problem, build_environment
from controllers.grpo import train_step, with_trainer_logprobs
from controllers.observe.logger import MetricsLogger
from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.ppo import PPOConfig, is_cut_off, minibatches, token_rewards, train
from controllers.program import describe_plan
from controllers.rollouts.evaluation import build_sets
from controllers.rollouts.groups import Group, RolloutBatch
from controllers.rollouts.tokenizer import build_character_tokenizer, load_tokenizer
from controllers.run.run import Run, open_run
from rl_actors import Sample

CONFIGS = {make.__name__: make for make in (tiny_ppo, qwen3_0_6b_ppo, qwen3_4b_ppo)}
DIGITS = "0123456789"
WARM_UP = 2
"""Number of first steps that are not counted, because they compile and fill the queue of rollouts. The last step is not counted either,
because it evaluates."""
ACTORS = {
    "generate": "generator",
    "logprobs": "trainer",
    "reference": "reference",
    "values": "critic",
    "policy": "trainer",
    "critic": "critic",
    "push": "trainer",
    "pull": "generator",
}
"""The actor on whose devices each part of a step runs."""


class Digits:
    """Prompts of `length` random digits. The answer plays no role: the reward is the parity of the completion's length."""

    def __init__(self, seed: int, num_held_out: int, length: int) -> None:
        self.seed, self.num_held_out, self.length = seed, num_held_out, length

    def problem(self, index: int) -> Problem:
        prompt = "".join(Random(f"{self.seed} {index}").choices(DIGITS, k=self.length))
        return Problem(prompt=prompt, answer="0", key=f"{index}")

    def held_out(self) -> list[Problem]:
        return [self.problem(-1 - index) for index in range(self.num_held_out)]

    def reward(self, problem: Problem, completion: str) -> float:
        return float(len(completion) % 2)


def make_config(name: str, *, samples: int, prompt_tokens: int, new_tokens: int, steps: int) -> PPOConfig:
    """The config of this name with the task `Digits`, `samples` problems in each step, and no supervised steps.

    A prompt has `prompt_tokens` digits, and each digit is a token.
    """
    config = CONFIGS[name]()
    return replace(
        config,
        alphabet=DIGITS,
        max_tokens=new_tokens,
        environment=EnvironmentConfig(
            task="benchmarks.ppo_step:Digits", options={"length": prompt_tokens}, num_held_out=8
        ),
        rollouts=replace(config.rollouts, groups_per_step=samples),
        critic=replace(config.critic, warmup_steps=0),
        reference_kl=config.reference_kl or 1e-3,  # so that every step has a reference
        sft_steps=0,
        steps=steps,
        evaluate_first=False,
        evaluate_every=steps,
        checkpoint_every=0,
        trackers=(),
    )


def devices(config: PPOConfig) -> dict[str, list[str]]:
    """The devices of every actor: {"trainer": ["GPU 0"], "critic": ["GPU 1"], …}. Without a GPU all actors have the device "CPU"."""
    gpus = {name: model.gpus() for name, model in config.models().items()} | {"generator": config.generator.gpus()}
    if not torch.cuda.is_available():
        return {name: [results.CPU] for name in gpus}
    return {name: [f"GPU {index}" for index in indices] for name, indices in gpus.items()}


def seconds_by_device(parts: Mapping[str, float], places: Mapping[str, list[str]]) -> dict[str, float]:
    """For each device, the sum of the seconds of the parts that run on it. places: the devices of every actor.

    seconds_by_device({"policy": 3.0, "critic": 2.0, "pull": 0.5}, {"trainer": ["GPU 0"], "critic": ["GPU 1"], "generator": ["GPU 1"]})
    -> {"GPU 0": 3.0, "GPU 1": 2.5}
    """
    totals: dict[str, float] = {}
    for part, seconds in parts.items():
        for device in places[ACTORS[part]]:
            totals[device] = totals.get(device, 0.0) + seconds
    return dict(sorted(totals.items()))


class Stopwatch:
    """Seconds of named parts. Each part has a list with one number for every time that the part ran."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds.setdefault(part, []).append(time.perf_counter() - start)

    def medians(self) -> dict[str, float]:
        return {part: statistics.median(seconds) for part, seconds in self.seconds.items()}


async def rollouts_alone(run: Run[PPOConfig], first: int, timed: Stopwatch) -> RolloutBatch:
    """Generate the completions of one step, for the problems from number `first` on, while no other actor works."""
    config = run.config.rollouts
    groups: dict[int, Group] = {}
    rollouts = run.rollouts(config)
    with timed("generate"):
        await rollouts.complete(range(first, first + config.groups_per_step), groups.__setitem__)
    version = (await run.generator.info()).policy_version
    return RolloutBatch.of(list(groups.values()), config, num_refills=0, num_retries=0, version=version)


async def parts_alone(run: Run[PPOConfig], *, first: int, timed: Stopwatch) -> None:
    """Run every part of a step once, one after the other."""
    config = run.config
    clients: dict[str, Any] = run.supervision.actors.clients if run.supervision.actors else {}
    critic = Critic(trainer=clients["critic"], config=config.critic, gae=config.gae, run_config=config)
    reference = Reference(
        model=clients["reference"], samples_per_forward=config.samples_per_forward_backward, timer=run.timer
    )
    batch = await rollouts_alone(run, first, timed)
    samples = list(batch.samples)
    loss = config.make_loss()
    if "generator_logprobs" in loss.columns()[0]:
        with timed("logprobs"):
            samples = await with_trainer_logprobs(run, samples)
    with timed("reference"):
        samples = await reference.with_logprobs(samples)
    with timed("values"):
        values = await critic.values(samples)
    rewards, _ = await token_rewards(config, batch, samples, None, config.kl())
    estimated = critic.estimate_advantages(samples, values, rewards, is_cut_off(batch))

    def parts(given: list[Sample]) -> Iterator[list[Sample]]:
        return minibatches(config, given, first)

    with timed("policy"):
        await train_step(run, parts(estimated.for_policy), loss, config.schedule.learning_rate)
    with timed("critic"):
        await critic.fit(parts(estimated.for_critic), config.critic.schedule.learning_rate)
    with timed("push"):
        version = await run.trainer.push_model_state_dict()
    with timed("pull"):
        await run.generator.pull_model_state_dict(version)


async def measure(config: PPOConfig, folder: RunFolder, *, repeats: int) -> dict[str, Any]:
    """Figures of the run's steps, and of each part when it runs by itself."""
    build_character_tokenizer(folder.path / "tokenizer", config.alphabet)
    tokenizer = load_tokenizer(folder.path / "tokenizer", config.chat)
    environment = build_environment(config.environment)
    sets = build_sets(environment, config.evaluation, seed=config.seed)
    timed, watch = Stopwatch(), Watch("utilization.gpu")
    with MetricsLogger(folder, total_steps=config.steps, trackers=(), prints_lines=True) as log:
        async with open_run(config, folder, environment, sets, tokenizer, log=log) as run:
            run.timer.reset()
            began = time.perf_counter()
            await train(run)
            busy = watch.between(began, time.perf_counter())
            for repeat in range(repeats):
                # No step has used the problem with this index, or a later problem.
                first = (config.steps + 2 + repeat) * config.rollouts.groups_per_step
                await parts_alone(run, first=first, timed=timed)
    watch.stop()
    steps = [record for record in read_jsonl(folder.metrics) if record["phase"] == "ppo"][WARM_UP:-1]
    return figures(config, steps, timed.medians()) | {
        f"gpu{gpu}_busy": statistics.fmean(shares) / 100 for gpu, shares in busy.items()
    }


def figures(config: PPOConfig, steps: list[dict[str, Any]], parts: dict[str, float]) -> dict[str, Any]:
    """The figures of a line of results.

    ratio: seconds of the slowest device divided by the seconds of a step. The ratio is 1 if that device never waits.
    """
    seconds = statistics.median(step["time/step"] for step in steps)
    of_devices = seconds_by_device(parts, devices(config))
    slowest = max(of_devices.values())
    return {
        "seconds": seconds,
        "slowest_seconds": slowest,
        "ratio": slowest / seconds,
        "of_devices": of_devices,
        "devices": devices(config),
        **{f"{part}_seconds": value for part, value in parts.items()},
        "step_seconds": [step["time/step"] for step in steps],
        "tokens_per_second": statistics.median(step["tokens/s"] for step in steps),
        "samples": config.rollouts.groups_per_step * config.rollouts.group_size,
        "gpus": torch.cuda.device_count(),
    }


def text(figures: Mapping[str, Any]) -> str:
    """The seconds of a step, of its slowest device, and of each part."""
    slowest = max(figures["of_devices"], key=figures["of_devices"].__getitem__)
    parts = [
        f"step {figures['seconds']:.3g} s{gpu_shares(figures)} against {figures['slowest_seconds']:.3g} s of {slowest}"
    ]
    parts += [f"{part} {figures[f'{part}_seconds']:.3g} s" for part in ACTORS if f"{part}_seconds" in figures]
    return "; ".join(parts)


def main() -> None:
    has_gpus = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny_ppo", choices=CONFIGS)
    parser.add_argument("--samples", type=int, default=1024 if has_gpus else 64, help="completions of a step")
    parser.add_argument("--prompt-tokens", type=int, default=128 if has_gpus else 16)
    parser.add_argument("--new-tokens", type=int, default=256 if has_gpus else 24, help="longest completion")
    parser.add_argument("--steps", type=int, default=WARM_UP + 4, help="steps; the first two and the last do not count")
    parser.add_argument("--repeats", type=int, default=3, help="number of times that every part is timed")
    given = parser.parse_args()
    if given.steps < WARM_UP + 2 or given.repeats < 1:
        parser.error(f"--steps must be at least {WARM_UP + 2}, --repeats at least 1")
    config = make_config(
        given.config,
        samples=given.samples,
        prompt_tokens=given.prompt_tokens,
        new_tokens=given.new_tokens,
        steps=given.steps,
    )
    config.validate()
    describe_plan.require_memory(config)
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measure(config, RunFolder(Path(directory) / "run"), repeats=given.repeats))
    results.add("ppo_step", given.config, found, text(found))


def gpu_shares(figures: dict[str, Any]) -> str:
    """ " (GPUs busy 96% and 3%)"; "" for figures without GPUs."""
    busy = [figures[name] for name in sorted(figures) if name.endswith("_busy")]
    return f" (GPUs busy {' and '.join(f'{share:.0%}' for share in busy)})" if busy else ""


if __name__ == "__main__":
    main()
