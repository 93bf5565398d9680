"""Tests of runs with turns: the order of the calls, the results, and the refused settings.

With --colocate, trainer and generator use the memory of the same GPU one after the other. While the trainer works, the generator sleeps.
While the generator works, parts of the trainer's state are in the host's memory.
"""

import asyncio
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import NearTrainer, ParityReward, RandomGenerator
from rich.console import Console
from test_grpo_loop import NUM_HELD_OUT, make_config, run_grpo
from waiting import GUARD

import rl_actors
from configs.tiny import tiny, tiny_dpo
from configs.tiny_ppo import tiny_ppo
from controllers import ppo
from controllers.algorithms.critic import CriticConfig
from controllers.observe.logger import MetricsLogger, Timer
from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.rollouts.evaluation import build_sets
from controllers.rollouts.tokenizer import build_character_tokenizer, load_tokenizer
from controllers.run.colocation import Colocated, Colocation, ColocationConfig
from controllers.run.run import open_run
from rl_actors.clients.call import in_background
from rl_actors.config import LoRAConfig
from rl_actors.parts import PARTS, HostMove
from rl_actors.types import DeviceMemory, ForwardBackwardOutput, GeneratorInfo

ROOT = Path(__file__).parents[2]
GIGABYTE = 10**9
TIMES = ("time/", "tokens/s", "busy/", "memory/")


class Gpu:
    """The state of a GPU. The fake trainer, critic and generator share this GPU, and their calls check and change its state.

    If `is_generators` is True, only the generator may work. Otherwise only the trainer and the critic may work.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_generators = True
        self.has_weights = False  # whether the generator has weights
        self.has_critic = False  # whether the critic has memory on the GPU

    def require(self, is_generators: bool, call: str) -> None:
        assert self.is_generators == is_generators, f"{call} in the other's turn, after {self.calls[-5:]}"


class OffloadingTrainer(NearTrainer):
    """A trainer whose optimizer state takes a gigabyte. The trainer may train, push and save only while the generator sleeps."""

    gpu: Gpu

    def __init__(self) -> None:
        super().__init__()
        self.offloaded = self.onloaded = HostMove()
        self.is_on_host = False

    async def offload(self, parts) -> HostMove:
        self.gpu.calls.append(f"offload {' '.join(parts)}")
        move = HostMove()
        if "optimizer" in parts and self.steps and not self.is_on_host:
            move, self.is_on_host = HostMove(num_bytes=GIGABYTE, seconds=1.0), True
        self.offloaded = self.offloaded.then(move)
        return move

    async def forward_backward(self, samples, loss):
        self.gpu.require(False, "forward_backward")
        # The activations need the memory of the optimizer's state. Before the first step there is no such state.
        assert self.is_on_host or not self.steps
        assert not self.gpu.has_critic
        return await super().forward_backward(samples, loss)

    async def optim_step(self, params):
        self.gpu.require(False, "optim_step")
        self.gpu.calls.append("optim_step")
        if self.steps and self.is_on_host:
            self.onloaded = self.onloaded.then(HostMove(num_bytes=GIGABYTE, seconds=0.5))
        self.is_on_host = False
        return await super().optim_step(params)

    async def push_model_state_dict(self) -> int:
        self.gpu.require(False, "push")
        return await super().push_model_state_dict()

    async def save_checkpoint(self, path: str, *, optimizer: bool = True):
        self.gpu.require(False, "save_checkpoint")
        self.gpu.calls.append("save")
        Path(path).mkdir(parents=True)
        saved = in_background(_nothing(), "saving")
        return SimpleNamespace(path=path, policy_version=len(self.steps), wait=lambda: saved)

    async def info(self):
        [info] = await super().info()
        return [replace(info, offloaded=self.offloaded, onloaded=self.onloaded)]


async def _nothing() -> None: ...


class SleepingGenerator(RandomGenerator):
    """A generator that loses its weights when it sleeps."""

    gpu: Gpu

    @classmethod
    def spawn(cls, config, **_):
        generator = cls()
        generator.config = config
        return generator

    async def sleep(self, level: int) -> DeviceMemory:
        self.gpu.require(True, "sleep")
        self.gpu.is_generators = self.gpu.has_weights = False
        self.gpu.calls.append(f"sleep {level}")
        return DeviceMemory(num_bytes=3 * GIGABYTE, seconds=0.1)

    async def wake(self) -> DeviceMemory:
        self.gpu.require(False, "wake")
        assert not self.gpu.has_critic
        self.gpu.is_generators = True
        self.gpu.calls.append("wake")
        return DeviceMemory(num_bytes=3 * GIGABYTE, seconds=0.2)

    async def pull_model_state_dict(self, version: int) -> int:
        self.gpu.require(True, "pull")
        self.gpu.has_weights = True
        self.gpu.calls.append(f"pull {version}")
        return await super().pull_model_state_dict(version)

    def _generate(self, prompts, params, indices):
        self.gpu.require(True, "generate")
        assert self.gpu.has_weights
        return super()._generate(prompts, params, indices)

    async def info(self) -> GeneratorInfo:
        return GeneratorInfo(policy_version=self.version, max_model_len=64, vocab_size=16, logs="")


class OffloadingCritic(NearTrainer):
    """A value model that takes memory at each call and releases the memory in `offload`. It may work only while the generator sleeps."""

    gpu: Gpu

    def take(self, call: str) -> None:
        self.gpu.require(False, call)
        self.gpu.has_critic = True
        self.gpu.calls.append(f"critic {call}")

    async def offload(self, parts) -> HostMove:
        assert set(parts) == set(PARTS)
        self.gpu.calls.append("critic offload")
        self.gpu.has_critic = False
        return HostMove()

    async def load_checkpoint(self, path: str, *, optimizer: bool = True) -> int:
        self.take("load")
        return 0

    async def forward(self, samples) -> ForwardBackwardOutput:
        self.take("values")
        rows = [torch.zeros(len(sample)) for sample in samples]
        return ForwardBackwardOutput(metrics={}, partials={}, logprobs=[], values=rows, policy_version=0)

    async def forward_backward(self, samples, loss):
        self.take("fit")
        return await super().forward_backward(samples, loss)


def ppo_records(path: Path, monkeypatch, **fields) -> list[dict]:
    """The lines of metrics.jsonl of a PPO run of two steps. The first step trains only the critic."""
    config = replace(
        tiny_ppo(),
        **{"steps": 1, "sft_steps": 0, "updates_per_step": 1, "epochs_per_step": 1, "checkpoint_every": 0},
        **{"transport": "memory", "rollouts": replace(tiny_ppo().rollouts, groups_per_step=6)},
        critic=CriticConfig(warmup_steps=1),
        **fields,
    )
    in_turns = config.colocation.enabled
    monkeypatch.setattr(rl_actors, "TrainerClient", OffloadingTrainer if in_turns else SavingTrainer, raising=False)
    monkeypatch.setattr(rl_actors, "GeneratorClient", SleepingGenerator if in_turns else RandomGenerator, raising=False)
    monkeypatch.setattr(rl_actors, "ValueTrainerClient", OffloadingCritic, raising=False)
    build_character_tokenizer(path / "tokenizer", config.alphabet)
    environment, tokenizer = ParityReward(0.0, NUM_HELD_OUT), load_tokenizer(path / "tokenizer")
    folder = RunFolder(path / "run")

    async def run() -> None:
        sets = build_sets(environment, {}, seed=0)
        with MetricsLogger(folder, trackers=(), console=Console(file=io.StringIO())) as log:
            async with open_run(config, folder, environment, sets, tokenizer, log=log) as run:
                await ppo.train(run)

    asyncio.run(run())
    return read_jsonl(folder.metrics)


class SavingTrainer(OffloadingTrainer):
    """An OffloadingTrainer for a run without turns. Its forward_backward does not check the memory of the GPU."""

    async def forward_backward(self, samples, loss):
        return await NearTrainer.forward_backward(self, samples, loss)


def run_with(path: Path, trainer: type, generator: type, **fields):
    config = replace(make_config(), **fields)
    build_character_tokenizer(path / "tokenizer", config.alphabet)
    environment, tokenizer = ParityReward(0.0, NUM_HELD_OUT), load_tokenizer(path / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl_actors, "TrainerClient", trainer, raising=False)
        patch.setattr(rl_actors, "GeneratorClient", generator, raising=False)
        return asyncio.run(run_grpo(config, RunFolder(path / "run"), environment, tokenizer))


def without_times(records: list[dict]) -> list[dict]:
    moves = ("offload/", "onload/", "sleep/", "wake/")
    return [{key: value for key, value in record.items() if not key.startswith((*TIMES, *moves))} for record in records]


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(OffloadingTrainer, "gpu", gpu, raising=False)
    monkeypatch.setattr(SleepingGenerator, "gpu", gpu, raising=False)
    return gpu


@pytest.mark.slow
def test_trainer_and_generator_take_turns_and_the_numbers_are_those_of_a_run_without_turns(gpu, tmp_path):
    usual = run_with(tmp_path / "usual", NearTrainer, RandomGenerator)
    turns = ColocationConfig(enabled=True, offload=("optimizer", "weights"))
    found = run_with(tmp_path / "turns", OffloadingTrainer, SleepingGenerator, colocation=turns)
    assert without_times(found.records) == without_times(usual.records)
    step = ["optim_step", "offload optimizer"]
    turns = [*step, "offload optimizer weights", "wake"]
    # A push brings the trainer's weights back to the GPU, so the generator sleeps during the push.
    push = ["sleep 2", "offload optimizer weights", "wake"]
    assert gpu.calls == [
        "offload optimizer weights",  # before the generator starts
        *[*push, "pull 0"],
        *["sleep 2", *step, *turns, "pull 2"],  # supervised steps
        *[*push, "pull 2"],  # the first GRPO step pulls the newest version
        *["sleep 2", *turns, "pull 3"],
        *["sleep 2", *turns, "pull 4"],
        *["sleep 2", *turns, "pull 5"],
    ]
    first, second = found.records[-2:]
    for record in (first, second):
        assert record["sleep/gigabytes"] == record["wake/gigabytes"] == 3
        assert record["offload/gigabytes"] == record["onload/gigabytes"] == 1
        assert (record["time/offload"], record["time/onload"]) == (1.0, 0.5)
        assert record["time/sleep"] >= 0 and record["time/sync"] >= record["time/wake"] >= 0
    assert found.records[0]["offload/gigabytes"] == 0


@pytest.mark.slow
def test_the_generator_sleeps_during_a_checkpoint_and_then_pulls_the_version_that_it_had(gpu, tmp_path):
    run_with(
        tmp_path, OffloadingTrainer, SleepingGenerator, colocation=ColocationConfig(enabled=True), checkpoint_every=1
    )
    saved = [index for index, call in enumerate(gpu.calls) if call == "save"]
    versions = []
    for index in saved[2:]:  # the first two saves are of supervised steps, in the trainer's turn
        assert gpu.calls[index - 1] == "sleep 2"
        assert gpu.calls[index + 1 : index + 3] == ["offload optimizer", "wake"]
        versions.append(gpu.calls[index + 3])
    assert versions == ["pull 3", "pull 4", "pull 5"]


@pytest.mark.parametrize(("sync", "level"), [("merged", 2), ("adapter", 1)])
def test_only_a_generator_that_pulls_adapters_keeps_its_weights_on_the_host_while_it_sleeps(gpu, sync, level):
    config = replace(tiny(), colocation=ColocationConfig(enabled=True)).generator
    generator = SleepingGenerator.spawn(replace(config, lora=LoRAConfig(rank=4, sync=sync)))
    turns = Colocated(ColocationConfig(enabled=True), OffloadingTrainer(), generator, Timer())
    asyncio.run(turns.to_trainer())
    assert gpu.calls == [f"sleep {level}"]


class NamedWorker:
    """A trainer whose calls are recorded under its name."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    async def offload(self, parts) -> HostMove:
        self.calls.append(f"{self.name} offloads {' '.join(parts)}")
        return HostMove()

    async def work(self) -> str:
        self.calls.append(f"{self.name} begins")
        await asyncio.sleep(0)
        self.calls.append(f"{self.name} ends")
        return self.name


@pytest.mark.parametrize("joins", [False, True])
def test_only_a_critic_that_takes_turns_works_before_the_trainer_and_then_frees_its_memory(joins):
    calls: list[str] = []
    trainer, critic = NamedWorker("trainer", calls), NamedWorker("critic", calls)
    generator = SimpleNamespace(config=replace(tiny(), colocation=ColocationConfig(enabled=True)).generator)
    turns = Colocated(ColocationConfig(enabled=True), trainer, generator, Timer())
    if joins:
        turns.join(critic)
    assert asyncio.run(turns.run_both(critic.work(), trainer.work())) == ("critic", "trainer")
    if joins:
        assert calls == [
            "critic begins",
            "critic ends",
            "critic offloads weights gradients optimizer",
            "trainer begins",
            "trainer ends",
        ]
    else:
        assert calls == ["critic begins", "trainer begins", "critic ends", "trainer ends"]
    both = asyncio.run(Colocation().run_both(critic.work(), trainer.work()))
    assert both == ("critic", "trainer") and calls[-4:] == [
        "critic begins",
        "trainer begins",
        "critic ends",
        "trainer ends",
    ]


@pytest.mark.slow
def test_policy_critic_and_generator_of_ppo_use_the_gpu_memory_one_after_the_other(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(OffloadingCritic, "gpu", gpu, raising=False)
    turns = ColocationConfig(enabled=True, offload=("optimizer", "weights"))
    found = ppo_records(tmp_path / "turns", monkeypatch, colocation=turns)
    release = ["critic offload", "offload optimizer weights", "wake"]
    assert gpu.calls == [
        "offload optimizer weights",  # before the generator starts
        *["sleep 2", "offload optimizer weights", "wake", "pull 0"],
        *["sleep 2", "save", "critic load", *release, "pull 0"],  # the critic starts
        *["sleep 2", *release, "pull 0"],  # the push before the first PPO step
        *["sleep 2", "critic values", "critic fit", "offload optimizer", *release, "pull 0"],  # trains only the critic
        *["sleep 2", "critic values", "critic fit", "critic offload", "optim_step", "offload optimizer"],
        *[*release, "pull 1"],
    ]
    # In the usual run each model has a GPU of its own. False lets policy and critic work at any time.
    gpu.is_generators = False
    usual = ppo_records(tmp_path / "usual", monkeypatch)
    assert [record["phase"] for record in found] == ["start", "ppo", "ppo"]
    assert without_times(found) == without_times(usual)


def test_turns_enable_the_sleep_mode_of_the_generator():
    assert not tiny().generator.sleep_mode
    assert replace(tiny(), colocation=ColocationConfig(enabled=True)).generator.sleep_mode


def test_impossible_turns_are_refused_with_the_name_of_the_setting():
    config = replace(tiny(), colocation=ColocationConfig(enabled=True))
    config.validate()
    ahead = replace(config, rollouts=replace(config.rollouts, max_staleness=6))
    with pytest.raises(
        ValueError, match=r"colocation.enabled=True with rollouts.max_staleness=6: the generator sleeps"
    ):
        ahead.validate()
    apart = replace(config, generator=replace(config.generator, gpu=1))
    with pytest.raises(
        ValueError,
        match=r"share no GPU, .* generator.gpu=1 gives the GPUs \[1\], and trainer.gpu=0 the GPUs \[0\]",
    ):
        apart.validate()
    with pytest.raises(ValueError, match="colocation.enabled=True, but this run has no generator"):
        replace(tiny_dpo(), colocation=ColocationConfig(enabled=True)).validate()
    with pytest.raises(
        ValueError, match=r"colocation.offload\[0\]='cache' is of type str; it must be one of 'weights'"
    ):
        replace(config, colocation=ColocationConfig(enabled=True, offload=("cache",))).validate()


@pytest.mark.slow
def test_a_real_run_with_turns_has_the_numbers_of_a_run_without_turns(tmp_path):
    records = {}
    # The run without turns takes 4 steps. The run with turns takes 2 steps, and is then resumed for 2 more steps.
    for name, flags in {
        "usual": [],
        "turns": ["--colocate", "--colocation.offload", "optimizer", "weights"],
        "resumed": [],
    }.items():
        folder = tmp_path / ("turns" if name == "resumed" else name)
        command = [sys.executable, "-m", "controllers.grpo"]
        if name == "resumed":
            command += ["--resume", str(folder), "--steps", "4"]
        else:
            command += ["--config", "tiny", "--output-dir", str(folder), "--steps", "2" if name == "turns" else "4"]
            command += ["--sft-steps", "3", "--rollouts.groups-per-step", "32", "--environment.num-held-out", "32"]
            command += ["--environment.task", "tests.fakes:parity_reward", "--environment.options", "{}"]
            command += ["--schedule.kind", "constant", "--checkpoint-every", "1", "--evaluate-every", "2"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=GUARD
        )
        assert done.returncode == 0, done.stdout + done.stderr
        records[name] = read_jsonl(folder / "metrics.jsonl")
    moved = [record["offload/gigabytes"] for record in records["resumed"] if record["phase"] == "grpo"]
    assert min(moved) > 0
    for usual, turns in zip(records["usual"], records["resumed"], strict=True):
        # The metrics weights/… are not compared: they contain speeds, and a run with turns pulls the weights again after a checkpoint.
        skipped = "weights/"
        assert {key: value for key, value in without_times([turns])[0].items() if not key.startswith(skipped)} == {
            key: value for key, value in without_times([usual])[0].items() if not key.startswith(skipped)
        }
