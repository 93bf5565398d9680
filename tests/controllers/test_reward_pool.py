"""Tests of rewards that worker processes compute. The event loop runs meanwhile, failed processes are replaced, and no
process stays behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pooled_rewards
import psutil
import pytest
from test_grpo import PARITY, processes_of, start
from waiting import GUARD, wait_until

from controllers.environments import EnvironmentConfig, Problem, RewardError, Scorer, build_environment, pool
from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.program import launch

PROBLEM = Problem(prompt="2+3=", answer="5", key="2 3", metadata={"question": "2+3"})
GUARD_RETRIES = 50
REWARDS = "pooled_rewards"
ROOT = Path(__file__).parents[2]


@contextmanager
def pooled(*environments, num_workers: int = 2, **limits) -> Iterator[Scorer]:
    config = EnvironmentConfig(reward_workers=num_workers, **limits)
    with closing(Scorer.of(config, {f"e{index}": each for index, each in enumerate(environments)})) as scorer:
        scorer.start()
        yield scorer


def score(scorer: Scorer, environment, *texts: str):
    return asyncio.run(scorer.score(environment, PROBLEM, texts))


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_two_slow_rewards_are_computed_at_the_same_time_while_the_event_loop_runs(tmp_path):
    environment = pooled_rewards.Waiting(tmp_path)

    async def ask(scorer: Scorer):
        asked = asyncio.ensure_future(scorer.score(environment, PROBLEM, ["a", "bcd", "ef"]))
        num_turns = 0
        while len(environment.pids("begun")) < 2:
            await asyncio.sleep(0.01)  # this returns, so the event loop runs, although no reward has finished
            num_turns += 1
            assert num_turns < 100 * GUARD and not asked.done()
        (tmp_path / "go").touch()
        return await asked

    with pooled(environment) as scorer:
        found = asyncio.run(ask(scorer))
    assert found.totals == [1.0, 3.0, 2.0] and found.components["length"] == [1.0, 3.0, 2.0]
    assert found.num_retries == 0 and len(set(environment.pids("begun"))) == 2
    assert os.getpid() not in environment.pids("begun")


@pytest.mark.parametrize(
    "failure, told",
    [("hang", "no answer within 1 s"), ("crash", "the process ended with SIGSEGV"), ("end", "with exit status 3")],
)
def test_a_process_that_hangs_crashes_or_exits_is_replaced_and_its_child_is_killed(tmp_path, caplog, failure, told):
    environment = pooled_rewards.FailingOnce(tmp_path, failure)
    # Only the first process fails. On a busy machine a later process may be slower than reward_timeout, so many retries
    # are allowed.
    with pooled(environment, num_workers=1, reward_timeout=1.0, reward_retries=GUARD_RETRIES) as scorer:
        found = score(scorer, environment, "a", "b")
        assert found.totals == [1.0, 1.0]
        assert found.num_retries == scorer.num_replaced >= 1
        [failed] = environment.pids("failed")
        children = environment.pids("child")
        assert has_ended(failed) and failed not in environment.pids("answered")
        wait_until(lambda: all(map(has_ended, children)))
    assert all(map(has_ended, environment.pids("answered")))
    assert any(told in message and f"pid {failed} is replaced" in message for message in caplog.messages)


def test_a_process_that_cannot_be_started_fails_the_call_with_the_reason_and_the_next_call_starts_one(
    tmp_path, monkeypatch
):
    environment = pooled_rewards.Waiting(tmp_path)
    (tmp_path / "go").touch()

    def fail(*given, **named):
        raise OSError("no memory")

    with pool_of(environment) as rewards:
        end_process(rewards)
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", fail)
            with pytest.raises(OSError, match="no memory"):
                length(rewards, environment, "a")
        assert length(rewards, environment, "bcd") == 3


def test_a_process_that_imports_the_rewards_too_late_gives_no_answer_to_another_request(tmp_path, monkeypatch):
    environment = pooled_rewards.Waiting(tmp_path)
    (tmp_path / "go").touch()
    with pool_of(environment) as rewards:
        end_process(rewards)
        with monkeypatch.context() as patch:
            patch.setattr(pool, "START_TIMEOUT", 0.0)
            with pytest.raises(ValueError, match="the process did not import them within 0 s"):
                length(rewards, environment, "a")
        assert [length(rewards, environment, text) for text in ("a", "bcd")] == [1, 3]


@contextmanager
def pool_of(environment) -> Iterator[pool.RewardPool]:
    with closing(pool.RewardPool({"environment": environment}, num_workers=1)) as rewards:
        rewards.start()
        yield rewards


def length(rewards: pool.RewardPool, environment, text: str) -> float:
    return asyncio.run(rewards.ask(environment, PROBLEM, text, timeout=GUARD))["length"]


def end_process(rewards: pool.RewardPool) -> None:
    """Kill the pool's process, and let a call fail by it."""
    os.kill(rewards._workers[0].pid, signal.SIGKILL)
    with pytest.raises(pool.RewardFailed, match="the process ended with SIGKILL"):
        length(rewards, rewards._environments[0], "a")


def test_a_reward_that_raises_is_asked_for_again_and_the_error_has_its_exception():
    environment = pooled_rewards.Raising()
    with pooled(environment, reward_retries=1) as scorer:
        with pytest.raises(
            RewardError, match=r"of prompt '2\+3=' failed 2 times, .*KeyError: 'no such answer' \(.*py:"
        ):
            score(scorer, environment, "a")
        assert scorer.num_replaced == 0  # the process still works, so the pool keeps it


@pytest.mark.slow
def test_async_rewards_come_from_this_process_and_all_other_kinds_from_the_workers(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer\n" + "".join(f"{n}+1,{n + 1}\n" for n in range(8)))
    rows = {"task": str(path), "num_held_out": 4}
    group, own, text, maths, awaited, gym = environments = [
        pooled_rewards.Group(),
        build_environment(EnvironmentConfig(**rows, reward=f"{REWARDS}:here")),
        build_environment(EnvironmentConfig(**rows, reward="exact_match")),
        build_environment(EnvironmentConfig(**rows, reward="math_verify")),
        build_environment(EnvironmentConfig(**rows, reward=f"{REWARDS}:later")),
        build_environment(EnvironmentConfig(task="spell_backward", num_held_out=4, reward="task")),
    ]
    coded = build_environment(EnvironmentConfig(**rows, reward="python"))
    with pooled(*environments, coded) as scorer:
        pids = {worker.pid for worker in scorer.pool._workers}
        assert len(pids) == 2 and os.getpid() not in pids
        assert set(score(scorer, group, "a", "b").totals + score(scorer, own, "a").totals) <= pids
        assert score(scorer, text, "5", "6").totals == [1.0, 0.0]
        assert score(scorer, maths, "10/2", "6").totals == [1.0, 0.0]
        assert score(scorer, awaited, "a").totals == [os.getpid()]
        problem = gym.problem(0)
        assert asyncio.run(scorer.score(gym, problem, [problem.answer, ""])).totals[0] == 1.0
        tested = Problem(prompt="double", answer="assert double(4) == 8", key="double")
        asked = scorer.score(coded, tested, ["def double(n): return 2 * n", ""])
        assert asyncio.run(asked).totals == [1.0, 0.0]
    assert all(map(has_ended, pids))


def test_the_parts_of_a_mixture_are_scored_in_the_workers(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,answer\n" + "".join(f"{n}+1,{n + 1}\n" for n in range(8)))
    part = {"task": str(tmp_path / "rows.csv"), "reward": f"{REWARDS}:here", "name": "rows"}
    mixed = build_environment(EnvironmentConfig(mixture=[part, {"task": "spell_backward"}], num_held_out=4))
    problem = next(problem for problem in mixed.held_out() if problem.source == "rows")
    with pooled(mixed) as scorer:
        [pid] = asyncio.run(scorer.score(mixed, problem, ["a"])).totals
        assert pid in {worker.pid for worker in scorer.pool._workers}


def test_a_reward_that_cannot_be_pickled_and_a_negative_number_of_workers_are_refused():
    with pytest.raises(ValueError, match=r"e0: reward_workers=2, but the reward .*:Locked cannot be sent"):
        Scorer.of(EnvironmentConfig(reward_workers=2), {"e0": pooled_rewards.Locked()})
    with pytest.raises(ValueError, match="reward_workers=-1; it must be at least 0"):
        build_environment(EnvironmentConfig(reward_workers=-1))


def test_a_run_with_a_reward_that_cannot_be_pickled_is_refused_before_it_begins(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "_run", lambda *_: pytest.fail("the run began"))
    flags = ["--config", "tiny", "--environment.reward-workers", "2", "--environment.task", f"{REWARDS}:unpicklable"]
    flags += ["--environment.options", "{}", "--output-dir", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["controllers.grpo", *flags])
    with pytest.raises(SystemExit) as exit:
        launch.start_loop("controllers.grpo")
    assert exit.value.code == 2 and not (tmp_path / "run").exists()
    assert "error: environment: reward_workers=2, but the reward pooled_rewards:Locked" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_takes_its_rewards_from_workers_and_ctrl_c_ends_the_run_and_the_workers(tmp_path):
    folder, marker = RunFolder(tmp_path / "run"), str(tmp_path)
    flags = ["--config", "tiny", "--steps", 3, "--sft-steps", 0, "--evaluate-every", 100, "--checkpoint-every", 0]
    flags += ["--rollouts.groups-per-step", 2, *PARITY, "--environment.reward-workers", 2, "--no-evaluate-first"]
    finished = start("--output-dir", folder.path, *flags, marker=marker)
    assert finished.wait(GUARD) == 0, finished.stdout.read()
    records = read_jsonl(folder.metrics)
    assert [record["step"] for record in records] == [1, 2, 3] and "reward/retries" not in records[-1]
    assert 0 < records[-1]["reward/mean"] < 1
    assert processes_of(marker) == []
    flags[flags.index("tests.fakes:parity_reward")] = f"tests.controllers.{REWARDS}:hanging"
    flags[flags.index("{}")] = json.dumps({"folder": str(tmp_path)})
    hanging = start("--output-dir", tmp_path / "other", *flags, marker=marker)
    wait_until(lambda: pooled_rewards.Waiting(tmp_path).pids("begun"), "a reward")
    hanging.send_signal(signal.SIGINT)
    assert hanging.wait(GUARD) == 130
    wait_until(lambda: processes_of(marker) == [], "the end of all processes")


def test_a_reward_that_cannot_be_loaded_in_a_worker_is_refused_at_the_start_and_leaves_no_process():
    before = set(psutil.Process().children())
    message = r"load the rewards .*:Unloadable: ImportError: the module needs a thing"
    with pytest.raises(ValueError, match=message), pooled(pooled_rewards.Unloadable()):
        pytest.fail("the pool started")
    assert set(psutil.Process().children()) <= before


def test_after_a_cancelled_wait_no_further_reward_begins_and_no_process_stays(tmp_path):
    environment = pooled_rewards.Waiting(tmp_path)

    async def cancel(scorer: Scorer):
        asked = asyncio.ensure_future(scorer.score(environment, PROBLEM, ["a"] * 5))
        while len(environment.pids("begun")) < 2:
            await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    with pooled(environment) as scorer:
        asyncio.run(cancel(scorer))
    assert len(environment.pids("begun")) == 2 and all(map(has_ended, environment.pids("begun")))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_when_the_controller_is_killed_while_a_reward_hangs(tmp_path, number):
    program = f"""
    import asyncio
    from pathlib import Path
    from contextlib import closing
    from controllers.environments import EnvironmentConfig, Scorer
    from controllers.environments import Problem
    from pooled_rewards import Waiting

    environment = Waiting(Path({str(tmp_path)!r}))
    with closing(Scorer.of(EnvironmentConfig(reward_workers=2), {{"hanging": environment}})) as scorer:
        scorer.start()
        problem = Problem(prompt="2+3=", answer="5", key="2 3")
        asyncio.run(scorer.score(environment, problem, ["a"] * 4))
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    command = [sys.executable, "-c", textwrap.dedent(program)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE)
    begun = wait_until(
        lambda: len(found := pooled_rewards.Waiting(tmp_path).pids("begun")) == 2 and found, "two rewards"
    )
    process.send_signal(number)
    process.communicate(timeout=GUARD)
    assert process.returncode == -number
    for pid in begun:
        wait_until(lambda pid=pid: has_ended(pid), f"the end of {pid}")
