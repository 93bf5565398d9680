"""Tests of runs whose actors die. After a recovery a run writes the same lines into its files as an undisturbed run.

The controller and the engine are real, and run in one process. The generator is a fake. Its completions depend on
the seed, but not on the weights.
"""

import asyncio
import contextlib
import io
import json
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from test_resumed_run import (
    ALPHABET,
    BeforeCall,
    EngineTrainer,
    NoisyReward,
    RecordedGenerator,
    grpo_config,
    lines,
    nothing,
)

from controllers.environments import Environment, Scorer
from controllers.grpo import GRPOConfig, train
from controllers.observe.logger import MetricsLogger
from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.program import cli, launch
from controllers.rollouts.evaluation import build_sets
from controllers.rollouts.tokenizer import build_character_tokenizer, load_tokenizer
from controllers.run import checkpoints
from controllers.run.actors import Actors, StartAgainError
from controllers.run.checkpoints import Checkpoints
from controllers.run.hosts import HostsConfig
from controllers.run.interruption import Interruption
from controllers.run.run import Run, Supervision
from controllers.run.survival import SurvivalConfig
from rl_actors.clients.base import ActorDiedError
from rl_actors.clients.replicas import HOUR, Restarts
from rl_actors.field_types import require_field_types
from tests.fakes import ParityReward


class MortalTrainer(EngineTrainer):
    """An EngineTrainer with the methods by which a run starts, watches and ends a client.

    The engine runs in this process. The trainer dies in the calls that `fate` names.
    """

    name = "trainer"

    def __init__(self, engine, before: BeforeCall, interruption: Interruption, fate: "Fate") -> None:
        super().__init__(engine, None, before, interruption)
        self.fate = fate
        self.died: asyncio.Future[ActorDiedError] = asyncio.get_running_loop().create_future()

    async def ready(self) -> None: ...

    async def death(self, silent_after: float) -> ActorDiedError:
        return await self.died

    async def kill(self) -> None: ...

    async def close(self) -> None: ...

    async def discard_gradients(self) -> None:
        self.engine.discard_gradients()

    async def forward_backward(self, samples, loss):
        await self.fate("forward_backward", self)
        return await super().forward_backward(samples, loss)

    async def optim_step(self, params):
        await self.fate("optim_step", self)
        return await super().optim_step(params)

    async def push_model_state_dict(self):
        await self.fate("push", self)
        return await super().push_model_state_dict()

    async def load_checkpoint(self, path):
        await self.fate("load", self)
        return await super().load_checkpoint(path)


class Fate:
    """Kills a trainer at chosen calls. deaths={("optim_step", 7): "raises"} kills the trainer at the run's seventh optim_step.

    "raises": the call raises the ActorDiedError.
    "hangs": the call does not end. The run learns of the death only from the trainer's method `death`.
    "other": the call raises another error, like a rank whose neighboring rank has died. The method `death` then gives
    the ActorDiedError.
    """

    def __init__(self, deaths: dict[tuple[str, int], str]) -> None:
        self.deaths, self.calls = deaths, []

    async def __call__(self, call: str, trainer: MortalTrainer) -> None:
        self.calls.append(call)
        way = self.deaths.get((call, self.calls.count(call)))
        if way is None:
            return
        error = ActorDiedError(f"trainer: the process of rank 0 (pid 1) ended during {call}", "trainer")
        if way == "raises":
            raise error
        trainer.died.set_result(error)
        if way == "other":
            raise RuntimeError("Connection closed by peer")
        await asyncio.Event().wait()


class MortalActors(Actors):
    """Actors without processes. Every spawned trainer starts with the same weights as the first trainer."""

    def __init__(self, config, folder, make_trainer: Callable[[], MortalTrainer], generator) -> None:
        self.make_trainer, self.generator, self.num_trainers = make_trainer, generator, 0
        super().__init__(config, folder, verbose=False)

    def _open_transport(self) -> None: ...

    async def _close_transport(self) -> None: ...

    async def _store_error(self) -> str:
        return ""

    def spawn_trainer(self):
        def spawn(*_, **__):
            self.num_trainers += 1
            return self.make_trainer()

        return self._client("trainer", spawn)

    def spawn_generator(self):
        return self.generator


@pytest.fixture
def run(make_engine, monkeypatch):
    """A function: run(folder, deaths) runs a training whose trainer dies at the calls in `deaths` (see Fate), and returns
    the exit status.

    `run.actors` has the actors of the last run, and `run.output` has its output.
    """
    monkeypatch.setattr("controllers.observe.report.write_report", lambda _: None)

    def run(
        folder: RunFolder,
        deaths: dict[tuple[str, int], str] | None = None,
        *,
        config: GRPOConfig | None = None,
        environment: Environment | None = None,
        before: BeforeCall = nothing,
    ) -> int:
        interruption, fate, chosen = Interruption(), Fate(deaths or {}), config or grpo_config()

        @contextlib.asynccontextmanager
        async def open_run(config, folder, environment, evaluation_sets, tokenizer, *, log, state, **others):
            generator = RecordedGenerator(before, interruption)
            make_trainer = partial(MortalTrainer, before=before, interruption=interruption, fate=fate)
            run.actors = MortalActors(config, folder, lambda: make_trainer(make_engine()), generator)
            trainer, _ = await run.actors.start(log.setup)
            saver = Checkpoints(folder.checkpoints, keep=config.keep_checkpoints)
            yield Run(
                config=config,
                environment=environment,
                evaluation_sets=evaluation_sets,
                tokenizer=tokenizer,
                trainer=trainer,
                generator=generator,
                log=log,
                state=state,
                scorer=others["scorer"],
                supervision=Supervision(folder=folder, checkpoints=saver, actors=run.actors, interruption=interruption),
            )

        monkeypatch.setattr(launch, "open_run", open_run)
        names = ("eval_only", "save_config", "dry_run", "plan", "verbose")
        invocation = cli.Invocation(
            config=chosen, config_name="c", output_dir=folder.path, resume=None, **dict.fromkeys(names, False)
        )
        build_character_tokenizer(folder.path / "tokenizer", ALPHABET)
        tokenizer, task = load_tokenizer(folder.path / "tokenizer"), environment or NoisyReward(0.0, 20)
        random.seed(0)
        sets = build_sets(task, {}, seed=0)
        run.output = io.StringIO()
        given = launch.Task(environment=task, evaluation_sets=sets, tokenizer=tokenizer, scorer=Scorer())
        work = launch._train(train, invocation, folder, given, run.output, interruption)
        return asyncio.run(launch._until_signal(work, interruption))

    return run


@pytest.fixture
def whole(run, tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "whole")
    assert run(folder) == 0
    return folder


def without_restarts(folder: RunFolder) -> list[dict]:
    return [{key: value for key, value in line.items() if key != "restarts"} for line in lines(folder)]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("deaths", "checkpoint_every"),
    [
        pytest.param({("optim_step", 4): "hangs"}, 2, id="in the supervised phase", marks=SLOW),
        pytest.param({("optim_step", 4): "hangs"}, 0, id="in the supervised phase, without checkpoints", marks=SLOW),
        pytest.param({("optim_step", 12): "raises"}, 2, id="in a step", marks=SLOW),
        pytest.param({("optim_step", 12): "raises"}, 0, id="in a step, without checkpoints"),
        pytest.param({("forward_backward", 24): "other"}, 2, id="an error of another rank comes first", marks=SLOW),
        pytest.param(
            {("push", 5): "hangs", ("push", 6): "hangs"}, 2, id="twice, the second time in the recovery", marks=SLOW
        ),
    ],
)
def test_a_run_whose_trainer_dies_goes_on_and_writes_the_lines_of_an_undisturbed_run(
    run, whole, tmp_path, deaths, checkpoint_every
):
    folder = RunFolder(tmp_path / "run")
    config = replace(grpo_config(), checkpoint_every=checkpoint_every)
    assert run(folder, deaths, config=config) == 0
    assert run.actors.num_trainers == 1 + len(deaths)
    assert without_restarts(folder) == lines(whole)
    assert read_jsonl(folder.rollouts) == read_jsonl(whole.rollouts)
    assert read_jsonl(folder.evaluation) == read_jsonl(whole.evaluation)
    restarts = read_jsonl(folder.restarts)
    assert [line["restart"] for line in restarts] == list(range(1, 1 + len(deaths)))
    assert all("trainer: the process of rank 0" in line["cause"] for line in restarts)
    assert lines(folder)[-1]["restarts"] == len(deaths)
    assert f"restart {len(deaths)} (at most 10 an hour)" in run.output.getvalue()


class MortalPlacement:
    """The connected hosts of a run with one host. gone: True if the worker of the host has ended."""

    all = object()
    trainer = generators = None

    def __init__(self) -> None:
        self.gone = False

    def lost(self) -> list[str]:
        return ["the only host"] if self.gone else []

    def close(self) -> None: ...


@pytest.fixture
def placements(monkeypatch) -> list[MortalPlacement]:
    """The list of all placements that a run has made, the newest last."""
    made: list[MortalPlacement] = []

    def connect(self, logs) -> MortalPlacement:
        made.append(MortalPlacement())
        return made[-1]

    monkeypatch.setattr(HostsConfig, "connect", connect)
    return made


def loses_host(placements: list[MortalPlacement], number: int) -> BeforeCall:
    """A hook that makes the run lose its host at the `number`-th call of forward_backward.

    The call fails like on a rank whose neighboring rank is gone.
    """
    calls = []

    async def before(call: str, _) -> None:
        calls.append(call)
        if call == "forward_backward" and calls.count(call) == number:
            placements[-1].gone = True
            raise RuntimeError("Connection reset by peer")

    return before


def test_a_run_that_loses_a_host_raises_an_error_that_names_the_host(run, placements, tmp_path):
    config = replace(grpo_config(), hosts=HostsConfig(addresses="tcp://127.0.0.1:1"))
    with pytest.raises(StartAgainError, match="the worker of the only host has ended"):
        run(RunFolder(tmp_path / "run"), config=config, before=loses_host(placements, 1))


@pytest.mark.slow
def test_repeated_steps_train_on_the_same_rollouts_again(run, tmp_path):
    asked = []

    async def count(call: str, _) -> None:
        asked.append(call)

    config = replace(grpo_config(), checkpoint_every=100)
    config.rollouts.dynamic_sampling_rounds = 0
    undisturbed = RunFolder(tmp_path / "undisturbed")
    assert run(undisturbed, config=config, before=count) == 0
    num_calls = asked.count("generate")
    asked.clear()
    assert run(RunFolder(tmp_path / "run"), {("optim_step", 13): "raises"}, config=config, before=count) == 0
    assert asked.count("generate") == num_calls  # the batches of the repeated steps were not sampled again


@pytest.mark.slow
def test_with_rollouts_ahead_a_death_of_the_trainer_neither_skips_nor_repeats_a_problem(run, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "MetricsLogger", partial(MetricsLogger, groups_per_step=100))
    config, environment = grpo_config(), ParityReward(0.0, 20)
    config.rollouts.max_staleness = 4  # two steps ahead, because each step makes two versions
    folder = RunFolder(tmp_path / "run")
    deaths = {("optim_step", 9): "hangs", ("optim_step", 17): "raises"}
    assert run(folder, deaths, config=config, environment=environment) == 0
    state = checkpoints.read(checkpoints.newest(folder.checkpoints))
    used = [line["prompt"] for line in read_jsonl(folder.rollouts)]
    drawn = [environment.problem(index).prompt for index in range(5 * 8, state["cursor"])]
    assert len(used) == len(set(used))
    assert sorted(used + [environment.problem(index).prompt for index in state["pending"]]) == sorted(drawn)


def test_a_bug_in_the_reward_ends_the_run_at_once(run, tmp_path):
    class Buggy(ParityReward):
        def reward(self, problem, completion):
            return {}["no such key"]

    with pytest.raises(KeyError, match="no such key"):
        run(RunFolder(tmp_path / "run"), environment=Buggy(0.0, 20))
    assert run.actors.num_trainers == 1 and not RunFolder(tmp_path / "run").restarts.exists()


def test_a_run_with_too_many_deaths_in_an_hour_raises_the_error_of_the_first_death(run, tmp_path):
    config = replace(grpo_config(), survival=SurvivalConfig(max_restarts_per_hour=1))
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ActorDiedError, match="ended during optim_step") as error:
        run(folder, {("optim_step", 12): "raises", ("push", 7): "hangs"}, config=config)
    assert str(error.value).endswith("ended during optim_step")
    [note] = error.value.__notes__
    assert note.startswith(
        "this is the first of 2 deaths in the last hour, but survival.max_restarts_per_hour=1; the last death: "
    )
    assert "ended during push" in note
    assert json.loads(folder.outcome.read_text())["status"] == "failed"
    assert checkpoints.newest(folder.checkpoints) is not None


@pytest.mark.slow
def test_a_signal_during_a_recovery_ends_the_run(run, tmp_path):
    async def signals(call: str, interruption: Interruption) -> None:
        if call == "forward_backward" and run.actors.num_trainers == 2 and interruption.received is None:
            signal.raise_signal(signal.SIGTERM)
            while interruption.received is None:
                await asyncio.sleep(0)

    folder = RunFolder(tmp_path / "run")
    assert run(folder, {("optim_step", 12): "raises"}, before=signals) == 128 + signal.SIGTERM
    assert checkpoints.read(checkpoints.newest(folder.checkpoints))["step"] >= 7


def test_the_restarts_in_an_hour_are_limited_and_the_pauses_before_them_grow():
    now = [0.0]
    restarts = Restarts(SurvivalConfig(max_restarts_per_hour=3, backoff=2.0).policy(), clock=lambda: now[0])
    deaths = [RuntimeError(str(number)) for number in range(9)]
    assert [restarts.pause_after(death) for death in deaths[:3]] == [0.0, 2.0, 4.0]
    now[0] = HOUR + 1
    assert [restarts.pause_after(death) for death in deaths[3:6]] == [0.0, 2.0, 4.0]
    with pytest.raises(RuntimeError) as error:
        restarts.pause_after(deaths[6])
    assert error.value is deaths[3]
    assert restarts.total == 6


def test_with_max_restarts_per_hour_0_the_error_of_the_first_death_is_raised():
    with pytest.raises(RuntimeError, match="^died$") as error:
        Restarts(SurvivalConfig(max_restarts_per_hour=0).policy()).pause_after(RuntimeError("died"))
    assert not hasattr(error.value, "__notes__")


def test_pauses_do_not_grow_beyond_a_minute():
    restarts = Restarts(SurvivalConfig(max_restarts_per_hour=100, backoff=10.0).policy(), clock=lambda: 0.0)
    assert [restarts.pause_after(RuntimeError()) for _ in range(6)] == [0.0, 10.0, 20.0, 40.0, 60.0, 60.0]


@pytest.mark.parametrize(
    "values",
    [{"max_restarts_per_hour": -1}, {"backoff": float("inf")}, {"silent_after": 0.5}, {"recorded_gigabytes": -1}],
)
def test_wrong_values_of_the_survival_config_are_refused(values):
    [(name, value)] = values.items()
    with pytest.raises(ValueError, match=f"survival.{name}={value}; it must be"):
        require_field_types(SurvivalConfig(**values), "survival.")
