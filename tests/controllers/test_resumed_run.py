"""A GRPO run that is killed or interrupted and then resumed writes the same lines as an uninterrupted run.

The real controller and the real engine run in one process. The generator is a fake, whose completions depend on
the seed and not on the weights.
"""

import asyncio
import contextlib
import io
import json
import math
import os
import random
import re
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import pytest
from references import VOCAB_SIZE

from controllers import config_file
from controllers.algorithms.schedules import ScheduleConfig
from controllers.environments import Environment, Scorer
from controllers.environments.guessing import Game, GuessingGame
from controllers.grpo import GRPOConfig, train
from controllers.observe.logger import MetricsLogger
from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.program import cli, launch
from controllers.rollouts.evaluation import build_sets
from controllers.rollouts.groups import RolloutConfig
from controllers.rollouts.tokenizer import build_character_tokenizer, load_tokenizer
from controllers.run import checkpoints, interruption
from controllers.run.checkpoints import Checkpoints
from controllers.run.config import AdamConfig
from controllers.run.interruption import Interruption
from controllers.run.run import Run, Supervision
from controllers.sft import SFTPhaseConfig
from rl_actors import Completion, GeneratorConfig, ModelConfig, TrainerConfig
from rl_actors.clients.conversion import merge_outputs
from rl_actors.engine.train_engine import TrainEngine
from tests.fakes import ParityReward

ALPHABET = "0123456789+-=."


class Killed(Exception):
    """An exception that stands for SIGKILL."""


BeforeCall = Callable[[str, Interruption], Awaitable[None]]
"""A hook that EngineTrainer and RecordedGenerator await before a call. Its first argument is the name of the call:
"forward_backward", "generate", "refill" or "turns". A refill is a generate call for fewer prompts than a step has. In a
run of episodes, "turns" is the call that generates the next turns."""


@dataclass
class SignalAt:
    """A hook that sends SIGTERM to this process before one call of the trainer or the generator."""

    call: str  # name of the call
    number: int  # which of the calls with this name; 1 is the first
    times: int = 1  # number of signals
    answers: bool = True  # False: the call never ends
    calls: list[str] = field(default_factory=list)

    async def __call__(self, call: str, interruption: Interruption) -> None:
        self.calls.append(call)
        if call != self.call or self.calls.count(call) != self.number:
            return
        for _ in range(self.times):
            os.kill(os.getpid(), signal.SIGTERM)
            while interruption.received is None:
                await asyncio.sleep(0)
        if not self.answers:
            await asyncio.Event().wait()


async def nothing(call: str, interruption: Interruption) -> None:
    pass


class LateCheckpoints(Checkpoints):
    """Completes a checkpoint only while `finish` waits for it, as if the disk were slow."""

    is_waited_for = False

    async def finish(self) -> None:
        self.is_waited_for = True
        await super().finish()
        self.is_waited_for = False

    async def _commit(self, *arguments) -> None:
        while not self.is_waited_for:
            await asyncio.sleep(0)
        await super()._commit(*arguments)


class EngineTrainer:
    """Runs the calls of a TrainerClient on an engine in this process. After `last` optimizer steps, the next optim_step
    raises Killed.
    """

    def __init__(self, engine: TrainEngine, last: int | None, before: BeforeCall, interruption: Interruption) -> None:
        self.engine, self.last, self.before, self.interruption = engine, last, before, interruption

    async def forward(self, samples):
        return merge_outputs(len(samples), [self.engine.forward(samples)])

    async def forward_backward(self, samples, loss):
        await self.before("forward_backward", self.interruption)
        return merge_outputs(len(samples), [self.engine.forward_backward(samples, loss)])

    async def optim_step(self, params):
        if self.engine.policy_version == self.last:
            raise Killed
        return self.engine.optim_step(params)

    async def save_checkpoint(self, path):
        written = self.engine.save_checkpoint(path)
        return SimpleNamespace(wait=lambda: asyncio.wrap_future(written))

    async def load_checkpoint(self, path):
        return self.engine.load_checkpoint(path)

    async def push_model_state_dict(self):
        return self.engine.policy_version

    async def info(self):
        return [self.engine.info()]


class RecordedGenerator:
    """A generator whose completions depend on the seed but not on the weights, as if they were read from a file."""

    version = -1
    last_pull = None  # a pull of this generator moves no bytes
    returns = ()  # this generator never dies

    def on_news(self, tell): ...

    def __init__(self, before: BeforeCall, interruption: Interruption) -> None:
        self.before, self.interruption = before, interruption

    async def ready(self): ...

    async def pull_model_state_dict(self, version):
        self.version = version
        return version

    async def generate(self, prompts, params):
        return [self.group(index, params) for index in range(len(prompts))]

    async def generate_each(self, prompts, params, indices):
        if params.n > 1:
            is_refill = len(prompts) < grpo_config().rollouts.groups_per_step
            await self.before("refill" if is_refill else "generate", self.interruption)
        else:
            await self.before("turns", self.interruption)
        for place, index in enumerate(indices):
            await asyncio.sleep(0)
            yield place, self.group(index, params)

    def group(self, index, params):
        draws = [random.Random(f"{params.seed}/{index}/{sample}") for sample in range(params.n)]
        return [self.completion(draw, params) for draw in draws]

    def completion(self, draw, params):
        tokens = [draw.randrange(2, 16) for _ in range(draw.randint(1, params.max_tokens))]
        versions = [self.version] * len(tokens)
        logprobs = [-4 * draw.random() for _ in tokens]
        return Completion(tokens=tokens, logprobs=logprobs, policy_versions=versions, finish_reason="stop")


class NoisyReward(ParityReward):
    """An environment that draws from the global random state, as a user's environment may."""

    def reward(self, problem, completion):
        return float(super().reward(problem, completion) != (random.random() < 0.3))


class Hints(GuessingGame):
    """The guessing game with the alphabet of this file. A demonstration has a wrong guess and then the right one."""

    def problem(self, index):
        return replace(super().problem(index), prompt="=")

    def held_out(self):
        return [replace(problem, prompt="=") for problem in super().held_out()]

    def episode(self, problem):
        return HintsGame(int(problem.answer), self.num_guesses)

    def demonstration(self, problem):
        return [str(9 - int(problem.answer)), problem.answer]


class HintsGame(Game):
    def reset(self):
        return "="

    def step(self, completion):
        reply = super().step(completion[:1])
        return replace(reply, observation=".") if reply.observation == "?" else reply


class WrongReward(ParityReward):
    """An environment that gives the completions of one prompt a reward that is not a finite number."""

    def __init__(self, prompt: str, reward: object) -> None:
        super().__init__(0.0, 20)
        self.prompt, self.wrong_reward = prompt, reward

    def reward(self, problem, completion):
        return self.wrong_reward if problem.prompt == self.prompt else super().reward(problem, completion)


def grpo_config() -> GRPOConfig:
    model = ModelConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=128)
    return GRPOConfig(
        steps=6,
        seed=3,
        max_tokens=4,
        alphabet=ALPHABET,
        trainer=TrainerConfig(model=model, max_sequence_length=64, tokens_per_row=64),
        generator=GeneratorConfig(model=model, max_model_len=64),
        optimizer=AdamConfig(weight_decay=0.1),
        updates_per_step=2,
        samples_per_forward_backward=5,
        evaluate_every=2,
        checkpoint_every=2,
        rollouts=RolloutConfig(groups_per_step=4, group_size=4),
        schedule=ScheduleConfig(kind="linear_warmup_linear", learning_rate=1e-3, warmup_steps=2, min_ratio=0.2),
        sft=SFTPhaseConfig(batch_size=8, schedule=ScheduleConfig(learning_rate=1e-3, warmup_steps=3), stop_window=3),
        sft_steps=5,
    )


@pytest.fixture
def run(make_engine, monkeypatch):
    """run(folder) runs the controller and returns its exit status.

    last: number of optimizer steps after which the run raises Killed. None: the controller runs to the end.
    written: True if the newest checkpoint is complete when the run is killed.
    """
    monkeypatch.setattr("controllers.observe.report.write_report", lambda _: None)

    def run(
        folder: RunFolder,
        *,
        config: GRPOConfig | None = None,
        last: int | None = None,
        before: BeforeCall = nothing,
        written: bool = True,
        resume: bool = False,
        environment: Environment | None = None,
    ) -> int:
        interruption = Interruption()

        @contextlib.asynccontextmanager
        async def open_run(config, folder, environment, evaluation_sets, tokenizer, *, log, state, **others):
            saver_class = Checkpoints if written else LateCheckpoints
            saver = saver_class(folder.checkpoints, keep=config.keep_checkpoints)
            parts = {"config": config, "environment": environment, "evaluation_sets": evaluation_sets, "state": state}
            parts |= {"tokenizer": tokenizer, "log": log, "scorer": others["scorer"]}
            parts["supervision"] = Supervision(folder=folder, checkpoints=saver, interruption=interruption)
            trainer = EngineTrainer(make_engine(), last, before, interruption)
            try:
                yield Run(**parts, trainer=trainer, generator=RecordedGenerator(before, interruption))
            finally:
                if written:
                    await saver.finish()
                else:
                    saver._writing.cancel()
                    trainer.engine.checkpoint_writer.wait()

        monkeypatch.setattr(launch, "open_run", open_run)
        flags = {
            "config_name": "c",
            "eval_only": None,
            "save_config": None,
            "dry_run": False,
            "plan": False,
            "verbose": False,
        }
        path = folder.path if resume else None
        invocation = cli.Invocation(config=config or grpo_config(), output_dir=folder.path, resume=path, **flags)
        build_character_tokenizer(folder.path / "tokenizer", ALPHABET)
        tokenizer, task = load_tokenizer(folder.path / "tokenizer"), environment or NoisyReward(0.0, 20)
        random.seed(None if resume else 0)  # a new process has a random state of its own
        sets = build_sets(task, {}, seed=0)
        given = launch.Task(environment=task, evaluation_sets=sets, tokenizer=tokenizer, scorer=Scorer())
        work = launch._train(train, invocation, folder, given, io.StringIO(), interruption)
        return asyncio.run(launch._until_signal(work, interruption))

    return run


def lines(folder: RunFolder) -> list[dict]:
    """The records of metrics.jsonl, without the values that depend on the clock and the process."""
    measured = ("time/", "tokens/s", "memory/", "busy/")
    records = []
    for record in read_jsonl(folder.metrics):
        records.append({key: value for key, value in record.items() if not key.startswith(measured)})
    return records


@pytest.fixture
def whole(run, tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "whole")
    run(folder)
    return folder


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(True, id="between checkpoints"),
        pytest.param(False, id="while a checkpoint is written", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_killed_goes_on_bit_for_bit(run, whole, tmp_path, written):
    expected = lines(whole)
    assert [record["phase"] for record in expected] == ["start"] + ["sft"] * 5 + ["grpo"] * 6
    resumed_at = []
    # The runs are killed in the supervised phase, between the two updates of a step, and before the first update of a later step.
    for last in (3, 6, 9):
        folder = RunFolder(tmp_path / f"killed-{last}")
        with pytest.raises(Killed):
            run(folder, last=last, written=written)
        newest = checkpoints.newest(folder.checkpoints)
        resumed_at.append(checkpoints.read(newest)["step"] if newest else 0)
        run(folder, resume=True)
        assert lines(folder) == expected
        assert read_jsonl(folder.rollouts) == read_jsonl(whole.rollouts)
        assert read_jsonl(folder.evaluation) == read_jsonl(whole.evaluation)
    assert resumed_at == ([2, 5, 7] if written else [0, 4, 5])


@pytest.mark.slow
@pytest.mark.parametrize("written", [True, False], ids=["between checkpoints", "while a checkpoint is written"])
def test_a_killed_run_with_rollouts_ahead_skips_no_problem_and_trains_on_none_twice(
    run, tmp_path, monkeypatch, written
):
    monkeypatch.setattr(launch, "MetricsLogger", partial(MetricsLogger, groups_per_step=100))
    config = grpo_config()
    config.rollouts.max_staleness = 4  # two steps ahead, because each step makes two versions
    environment = ParityReward(0.0, 20)
    for last in (7, 11):
        folder = RunFolder(tmp_path / f"killed-{last}")
        with pytest.raises(Killed):
            run(folder, config=config, last=last, written=written, environment=environment)
        assert run(folder, config=config, resume=True, environment=environment) == 0
        state = checkpoints.read(checkpoints.newest(folder.checkpoints))
        assert len(state["pending"]) >= 2 * 4  # groups of two steps
        used = [line["prompt"] for line in read_jsonl(folder.rollouts)]
        first = 5 * 8  # the supervised steps took the problems before this index
        drawn = [environment.problem(index).prompt for index in range(first, state["cursor"])]
        assert len(used) == len(set(used))
        assert sorted(used + [environment.problem(index).prompt for index in state["pending"]]) == sorted(drawn)
        ages = [record["age/max"] for record in lines(folder) if "age/max" in record]
        assert 0 < max(ages) <= 4


@pytest.mark.slow
def test_a_run_of_episodes_that_was_killed_plays_the_same_episodes_and_goes_on_bit_for_bit(run, tmp_path):
    config, environment, whole = grpo_config(), Hints(seed=0, num_held_out=5), RunFolder(tmp_path / "whole")
    run(whole, config=config, environment=environment)
    expected = lines(whole)
    assert [record["phase"] for record in expected] == ["start"] + ["sft"] * 5 + ["grpo"] * 6
    assert all(record["episode/turns_mean"] > 1 for record in expected if record["phase"] == "grpo")
    # The runs are killed after these numbers of optimizer steps. There are 5 supervised steps of one optimizer step each,
    # and then 6 GRPO steps of two optimizer steps each.
    moments = random.Random(0).sample(range(1, 17), 3)
    for last in moments:
        folder = RunFolder(tmp_path / f"killed-{last}")
        with pytest.raises(Killed):
            run(folder, config=config, environment=environment, last=last)
        run(folder, config=config, environment=environment, resume=True)
        assert lines(folder) == expected
        assert read_jsonl(folder.rollouts) == read_jsonl(whole.rollouts)
        assert read_jsonl(folder.evaluation) == read_jsonl(whole.evaluation)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "number", "steps_done"),
    [
        # Calls 5 and 6 are the third supervised step. The run still finishes this step.
        ("forward_backward", 5, 3),
        # The rollouts of the first GRPO step are dropped.
        ("generate", 1, 5),
        # The rollouts of step 7 are dropped after some of their rewards have drawn random numbers. The resumed run must
        # draw the same numbers again.
        ("refill", 1, 6),
        # The run still finishes the first GRPO step, whose last call is 14.
        ("forward_backward", 14, 6),
    ],
)
def test_a_run_that_a_signal_ends_has_a_checkpoint_of_its_last_step_and_goes_on_bit_for_bit(
    run, whole, tmp_path, call, number, steps_done
):
    folder, config = RunFolder(tmp_path / "run"), replace(grpo_config(), checkpoint_every=100)
    assert (
        run(folder, config=config, before=SignalAt(call, number, answers=call == "forward_backward"))
        == 128 + signal.SIGTERM
    )
    expected = lines(whole)
    assert lines(folder) == expected[: 1 + steps_done]
    assert checkpoints.read(checkpoints.newest(folder.checkpoints))["step"] == steps_done
    outcome = json.loads(folder.outcome.read_text())
    assert (outcome["status"], outcome["error"], outcome["step"]) == ("interrupted", "SIGTERM", steps_done)
    assert run(folder, config=config, resume=True) == 0
    assert lines(folder) == expected
    assert read_jsonl(folder.rollouts) == read_jsonl(whole.rollouts)
    assert json.loads(folder.outcome.read_text())["status"] == "finished"


def test_a_second_signal_ends_a_run_within_a_step_and_writes_no_checkpoint(run, tmp_path, monkeypatch):
    monkeypatch.setattr(interruption, "REPEATED_WITHIN", 0.0)
    folder, config = RunFolder(tmp_path / "run"), replace(grpo_config(), checkpoint_every=100)
    status = run(folder, config=config, before=SignalAt("forward_backward", 18, times=2, answers=False))
    assert status == 128 + signal.SIGTERM
    assert [path.name for path in checkpoints.complete(folder.checkpoints)] == ["step-5"]  # after the supervised phase
    assert json.loads(folder.outcome.read_text())["status"] == "interrupted"


def test_a_signal_that_is_sent_twice_at_once_counts_as_one(run, tmp_path):
    """The command `timeout` signals the process and then the process's group, so the process gets two signals."""
    folder, config = RunFolder(tmp_path / "run"), replace(grpo_config(), checkpoint_every=100)
    assert run(folder, config=config, before=SignalAt("forward_backward", 14, times=2)) == 128 + signal.SIGTERM
    assert checkpoints.read(checkpoints.newest(folder.checkpoints))["step"] == 6


def test_a_run_with_checkpoint_every_0_writes_no_checkpoint_after_a_signal(run, tmp_path):
    folder, config = RunFolder(tmp_path / "run"), replace(grpo_config(), checkpoint_every=0)
    assert run(folder, config=config, before=SignalAt("forward_backward", 5)) == 128 + signal.SIGTERM
    assert [record["step"] for record in lines(folder)] == [0, 1, 2, 3] and not folder.checkpoints.exists()


def test_a_signal_before_training_ends_a_run_at_once():
    async def waits_forever() -> int:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    told = []
    assert asyncio.run(launch._until_signal(waits_forever(), Interruption(told.append))) == 128 + signal.SIGINT
    assert told == ["SIGINT: the run ends at once"]


def test_a_checkpoint_holds_all_of_the_controllers_state(whole):
    state = checkpoints.read(checkpoints.newest(whole.checkpoints))
    assert state["step"] == 11 and state["sft_steps"] == 5 and state["cursor"] >= 5 * 8 + 6 * 4
    assert state["config"] == json.loads(config_file.to_json(grpo_config()))
    assert set(state["random"]) == {"python", "numpy", "torch"}


def test_all_files_of_a_run_give_a_step_the_same_number(whole):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = read_jsonl(whole.metrics)
    assert [record["step"] for record in records] == list(range(12))
    assert [record["step"] for record in records if "eval/reward" in record] == [0, 5, 7, 9, 11]
    assert sorted({line["step"] for line in read_jsonl(whole.evaluation)}) == [0, 5, 7, 9, 11]
    assert {rollout["step"] for rollout in read_jsonl(whole.rollouts)} == set(range(6, 12))
    assert [path.name for path in checkpoints.complete(whole.checkpoints)] == ["step-9", "step-11"]
    outcome = json.loads(whole.outcome.read_text())
    assert (outcome["step"], outcome["total_steps"]) == (11, 11)
    losses = EventAccumulator(str(whole.tensorboard)).Reload().Scalars("loss")
    assert [event.step for event in losses] == [record["step"] for record in records if record["loss"] is not None]
    rates = [record["learning_rate"] for record in records[1:]]
    assert rates[:5] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3, 1e-3])
    assert rates[5:7] == pytest.approx([5e-4, 1e-3])


@pytest.mark.parametrize(("prompt", "step"), [("40+0=", 6), ("3+99=", 1)], ids=["training", "evaluation"])
@pytest.mark.parametrize("reward", [math.nan, -math.inf, None])
def test_a_reward_that_is_not_a_finite_number_is_named_with_step_environment_prompt_and_completion(
    run, tmp_path, prompt, step, reward
):
    folder, config = RunFolder(tmp_path / "run"), replace(grpo_config(), checkpoint_every=0)
    place = (
        re.escape(f"step {step}, environment basic_arithmetic: the reward of ") + r"completion '[^']{1,4}' of prompt "
    )
    with pytest.raises(
        ValueError, match=f"^{place}{re.escape(repr(prompt))} is {reward}; it must be a finite number$"
    ) as error:
        run(folder, config=config, environment=WrongReward(prompt, reward))
    outcome = json.loads(folder.outcome.read_text())
    assert (outcome["status"], outcome["error"], outcome["step"]) == ("failed", f"ValueError: {error.value}", step - 1)


@pytest.mark.parametrize(("every", "command"), [(0, ""), (2, "to continue this run from step 6: grpo --resume {}\n")])
def test_a_failed_run_gives_the_command_to_resume_only_if_the_run_writes_checkpoints(run, tmp_path, every, command):
    folder, config = RunFolder(tmp_path / "run"), replace(grpo_config(), checkpoint_every=every)
    with pytest.raises(Killed):
        run(folder, config=config, last=5)
    assert launch._resume_text("grpo", folder, config) == command.format(folder.path)
