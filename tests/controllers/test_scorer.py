"""Tests rewards of every form: returned or awaited, for one completion or for a group, a number or several components.

Also tests a judge at an HTTP address, and rewards that run the completion's code.
"""

import asyncio
import http.server
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import psutil
import pytest
import torch
from waiting import wait_until

from controllers.environments import EnvironmentConfig, Problem, RewardError, Scorer, build_environment
from controllers.environments.judge import Judge, JudgeConfig
from controllers.environments.sandbox import Sandbox, SandboxConfig

ROOT = Path(__file__).parents[2]
PROBLEM = Problem(prompt="2+3=", answer="5", key="2 3", metadata={"question": "2+3"})


class Later:
    """Rewards that are awaited. A reward is the length of the completion.

    The first `failures` calls fail. Every later call takes `seconds`.
    """

    def __init__(self, failures: int = 0, seconds: float = 0.0) -> None:
        self.failures, self.seconds, self.calls = failures, seconds, 0

    async def reward(self, problem, completion):
        self.calls += 1
        if self.calls <= self.failures:
            raise ConnectionError("the line is down")
        await asyncio.sleep(self.seconds)
        return len(completion)


class Group:
    async def rewards(self, problem, completions):
        return [rank / len(completions) for rank in range(len(completions))]


class Components:
    def reward(self, problem, completion):
        return {"format": 0.5, "right": float(completion == problem.answer)}


class Total:
    def reward(self, problem, completion):
        return {"reward": 7.0, "length": len(completion)}


def score(environment, *texts: str, **limits):
    return asyncio.run(Scorer(**limits).score(environment, PROBLEM, texts))


def test_rewards_of_every_form_become_totals_and_components():
    assert score(Later(), "a", "bcd").totals == [1.0, 3.0]
    assert score(Group(), "a", "b").totals == [0.0, 0.5]
    found = score(Components(), "5", "6")
    assert found.totals == [1.5, 0.5] and found.components == {"format": [0.5, 0.5], "right": [1.0, 0.0]}
    found = score(Total(), "abc")
    assert found.totals == [7.0] and found.components == {"length": [3.0]}


def test_a_reward_that_fails_is_asked_for_again_and_the_retries_are_counted():
    found = score(Later(failures=2), "a", "bcd", max_retries=2)
    assert found.totals == [1.0, 3.0] and found.num_retries == 2
    environment = Later(failures=9)
    with pytest.raises(RewardError, match=r"completion 'a' of prompt '2\+3=' failed 2 times, .*the line is down"):
        score(environment, "a", max_retries=1)
    assert environment.calls == 2


def test_pauses_between_attempts_double_up_to_thirty_seconds(monkeypatch):
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    assert score(Later(failures=7), "a", max_retries=7).num_retries == 7
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 0.0]  # the last sleep is in Later.reward


def test_the_error_about_a_reward_that_does_not_come_names_the_time_limit():
    with pytest.raises(RewardError, match=r"failed 1 times, the last time with no answer within 0.01 s"):
        score(Later(seconds=3600), "a", timeout=0.01, max_retries=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "high", {}, {"format": math.nan}, {"format": None}])
def test_a_reward_that_is_no_finite_number_is_refused(value):
    class Wrong:
        def reward(self, problem, completion):
            return value

    with pytest.raises(RewardError, match="completion 'a' of prompt .* is .*; it must be a finite number"):
        score(Wrong(), "a")


def test_a_wrong_number_of_rewards_is_refused():
    class Short:
        def rewards(self, problem, completions):
            return [1.0]

    with pytest.raises(RewardError, match=r"gave \[1.0\] for 2 completions"):
        score(Short(), "a", "b")


def test_reward_concurrency_limits_the_rewards_that_are_awaited_at_the_same_time():
    @dataclass
    class Counting:
        under_way: int = 0
        most: list[int] = field(default_factory=lambda: [0])

        async def reward(self, problem, completion):
            self.under_way += 1
            self.most[0] = max(self.most[0], self.under_way)
            await asyncio.sleep(0.001)
            self.under_way -= 1
            return 1.0

    environment = Counting()

    async def ask():
        scorer = Scorer.of(EnvironmentConfig(reward_concurrency=3))
        await asyncio.gather(*(scorer.score(environment, PROBLEM, "abcd") for _ in range(5)))

    asyncio.run(ask())
    assert environment.most == [3]


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict], list[str]]]:
    """Starts an OpenAI-compatible server on this machine.

    Gives its address, the list of its requests, and the list of its answers. A test puts texts into the list of
    answers, and each request takes the first text. A request that takes the text "busy" gets status 503.
    """
    requests: list[dict] = []
    answers: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            text = answers.pop(0)
            self.send_response(503 if text == "busy" else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_): ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}/v1", requests, answers
        running.shutdown()
        thread.join()


class AdvantageSamples:
    def __init__(self, config: JudgeConfig) -> None:
        self.reward = Judge(config=config)


def test_a_judge_that_is_busy_or_gives_no_valid_score_is_asked_again(server):
    url, requests, answers = server
    answers += ["fine.\nscore: 3\nno, score: 8", "busy", "hm", "score: 11", "score: 10"]
    environment = AdvantageSamples(JudgeConfig(url=url, model="m"))
    found = score(environment, "five", "5", max_retries=4)
    # The scorer asks about the two completions at the same time, so the first answer may belong to either completion.
    assert sorted(found.totals) == [0.8, 1.0] and found.num_retries == 3
    [message] = requests[0]["messages"]
    assert requests[0]["model"] == "m" and "Question: 2+3\nRight answer: 5\nAnswer of a student:" in message["content"]


def test_the_error_about_a_judge_that_does_not_answer_has_the_prompt_and_the_number_of_tries():
    environment = AdvantageSamples(
        JudgeConfig(url="http://127.0.0.1:9/v1", model="m")
    )  # nothing listens on the discard port
    with pytest.raises(RewardError, match=r"of prompt '2\+3=' failed 2 times, the last time with APIConnectionError"):
        score(environment, "5", max_retries=1)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, r"judge.url='', judge.model=''; the reward judge needs both"),
        ({"url": "localhost:8000", "model": "m"}, "judge.url='localhost:8000'"),
        ({"url": "http://a", "model": "m", "pattern": "("}, r"judge.pattern='\(' is not a regular expression"),
        ({"url": "http://a", "model": "m", "pattern": "score"}, "judge.pattern='score' has no group"),
        (
            {"url": "http://a", "model": "m", "prompt": "{reply}"},
            "'reply'; the prompt may use question, answer and completion",
        ),
        ({"url": "http://a", "model": "m", "best_score": 0.0}, "judge.best_score=0.0; it must be above 0"),
    ],
)
def test_a_wrong_judge_config_is_refused_when_the_environment_is_built(fields, message):
    with pytest.raises(ValueError, match=message):
        build_environment(EnvironmentConfig(reward="judge", judge=JudgeConfig(**fields)))


@pytest.mark.parametrize(
    "fields", [{"reward_timeout": 0.0}, {"reward_retries": -1}, {"reward_concurrency": 0}, {"reward_timeout": math.nan}]
)
def test_wrong_limits_of_rewards_are_refused(fields):
    [name] = fields
    with pytest.raises(ValueError, match=name):
        build_environment(EnvironmentConfig(**fields))


class Coded:
    """An environment whose reward runs the code of a completion and the tests in the problem's answer."""

    def __init__(self, cpu_seconds: int = 5) -> None:
        self.reward = Sandbox(config=SandboxConfig(cpu_seconds=cpu_seconds))


TESTED = Problem(prompt="double", answer="assert double(4) == 8", key="double")
DOUBLE = "def double(n):\n    return 2 * n\n"


def run_code(*texts: str, cpu_seconds: int = 5) -> list[float]:
    return asyncio.run(Scorer().score(Coded(cpu_seconds), TESTED, texts)).totals


def test_code_is_rewarded_if_it_passes_the_tests():
    fenced = f"First:\n```python\nnothing\n```\nbetter:\n```python\n{DOUBLE}```\nSo."
    wrong = DOUBLE.replace("2", "3")
    assert run_code(DOUBLE, fenced, wrong, "def double(", "", f"{DOUBLE}exit(1)") == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_code_that_exits_before_the_tests_gets_reward_zero():
    ends = ("exit()", "raise SystemExit", "import os\nos._exit(0)", "import sys\nsys.exit(int(sys.argv[-1]))")
    assert run_code(*ends) == [0.0] * len(ends)


def test_code_that_sleeps_is_killed_when_the_process_that_asked_for_its_reward_is_killed(tmp_path):
    mark = tmp_path / "pid"
    text = f"import os, time\nopen({str(mark)!r}, 'w').write(f'{{os.getpid()}} ')\ntime.sleep(100000)"
    program = (
        "import asyncio, sys\n"
        "from controllers.environments import Problem\n"
        "from controllers.environments.sandbox import Sandbox, SandboxConfig\n"
        "problem = Problem(prompt='', answer='', key='')\n"
        "asyncio.run(Sandbox(config=SandboxConfig(cpu_seconds=100000))(problem, sys.argv[1]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, text], env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_until(lambda: mark.exists() and mark.read_text().endswith(" "), "the program")
    process.kill()
    process.wait()
    pid = int(mark.read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_bug_in_a_reward_is_raised_with_a_note_that_names_the_completion():
    class Raising:
        def reward(self, problem, completion):
            raise KeyError("no such answer")

    with pytest.raises(KeyError, match="no such answer") as raised:
        score(Raising(), "a")
    assert raised.value.__notes__ == ["The reward function raised this for completion 'a' of prompt '2+3='."]


def test_code_that_exceeds_a_limit_gets_reward_zero_and_no_process_of_the_code_stays_behind(tmp_path):
    memory = f"{DOUBLE}block = bytearray(2 << 30)"
    file = f"{DOUBLE}open('big', 'wb').write(bytes(2 << 20))"
    assert run_code(memory, file) == [0.0, 0.0]
    mark = tmp_path / "pid"
    endless = f"import os, subprocess, sys\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\n{DOUBLE}while True: pass"
    assert run_code(endless, cpu_seconds=1) == [0.0]
    assert not psutil.pid_exists(int(mark.read_text()))
    sleeping = f"import subprocess, sys\n{DOUBLE}p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
    sleeping += f"open({str(mark)!r}, 'w').write(str(p.pid))"
    assert run_code(sleeping) == [1.0]
    child = int(mark.read_text())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_wrong_limits_of_the_sandbox_are_refused():
    with pytest.raises(ValueError, match="sandbox.cpu_seconds=0; it must be at least 1"):
        build_environment(EnvironmentConfig(reward="python", sandbox=SandboxConfig(cpu_seconds=0)))
    with pytest.raises(ValueError, match="sandbox.memory_mib=63; it must be at least 64"):
        build_environment(EnvironmentConfig(reward="python", sandbox=SandboxConfig(memory_mib=63)))


SUM = "def add(a, b):\n    return a + b\n"
ADDS = Problem(prompt="add", answer="assert add(1, 2) == 3", key="add")


@pytest.mark.parametrize(
    "text",
    [
        f"```Python\n{SUM}```",
        f"```python3\n{SUM}```",
        f"```python\n{SUM}```".replace("\n", "\r\n"),
        f"1. So:\n   ```python\n   {SUM.replace(chr(10), chr(10) + '   ')}\n   ```",
        f"```python\n{SUM}",
        f"~~~py\n{SUM}~~~",
        f'```python title="add.py"\n{SUM}```',
        f"```python\n{SUM}```\nUse it:\n```python\nprint(add(1, 2), add(int(input()), 3), 'and a long text that makes this block long')\n```",
        f"```python\n{SUM}```\nwhich prints\n```\n3\n```",
        f"```python\ndef add(a, b): ...\n```\nor rather\n```python\n{SUM}```",
        f"{SUM}```\nThat is the function.",
        f"add: takes a and b; we compute total = a + b, and we return what the caller wants\n```python\n{SUM}```",
        f"{SUM}".replace("return", "open(__file__).close(); return"),
        f"{SUM}if __name__ == '__main__':\n    print(add(int(input()), int(input())))\n",
    ],
)
def test_the_block_that_defines_what_the_tests_name_is_run(text):
    assert asyncio.run(Scorer().score(Coded(), ADDS, [text])).totals == [1.0]


@pytest.mark.parametrize(
    "tests",
    [
        "import program\nassert program.add(1, 2) == 3",
        "from program import add as plus\nassert plus(1, 2) == 3",
        "def check(add):\n    assert add(1, 2) == 3\ncheck(add)",
        "assert eval('add(1, 2)') == 3",
    ],
)
def test_tests_may_name_the_solution_in_any_way(tests):
    problem = Problem(prompt="add", answer=tests, key="add")
    text = (
        f"```python\n{SUM}```\nUse it:\n```python\nprint(add(1, 2), 'and a long text that makes this block long')\n```"
    )
    assert asyncio.run(Scorer().score(Coded(), problem, [text])).totals == [1.0]


@pytest.mark.parametrize("beginning", ["-" * 10_000 + "\n", "- " * 10_000 + "\n\nHere:", "lambda:" * 3000])
def test_a_beginning_that_is_too_much_for_the_parser_is_prose(beginning):
    text = f"{beginning}\n```python\n{SUM}```"
    assert asyncio.run(Scorer().score(Coded(), ADDS, [text])).totals == [1.0]


def test_a_block_that_only_uses_the_solution_is_not_the_solution():
    problem = Problem(prompt="add", answer="result = add(1, 2)\nassert result == 3", key="add")
    speed_metrics = (
        "result = add(1, 2)\nprint('the result of adding one and two is', result, 'which is what was asked for')\n"
    )
    text = f"```python\n{SUM}```\nUse it:\n```python\n{speed_metrics}```"
    assert asyncio.run(Scorer().score(Coded(), problem, [text])).totals == [1.0]


def test_tests_run_as_the_main_program():
    tests = "class T:\n    ran = False\nif __name__ == '__main__':\n    assert add(1, 2) == 3"
    problem = Problem(prompt="add", answer=tests, key="add")
    texts = [SUM, SUM.replace("+", "-")]
    assert asyncio.run(Scorer().score(Coded(), problem, texts)).totals == [1.0, 0.0]


def test_a_sum_of_components_has_no_error_of_rounding():
    class Parts:
        def reward(self, problem, completion):
            return {"right": 0.7, "format": 0.2, "length": 0.1}

    assert score(Parts(), "a").totals == [1.0]


def test_a_component_that_a_reward_lacks_is_none():
    class Sometimes:
        def reward(self, problem, completion):
            return {"right": 1.0} | ({"format": 0.5} if completion == "a" else {})

    found = score(Sometimes(), "a", "b")
    assert found.totals == [1.5, 1.0]
    assert found.components == {"right": [1.0, 1.0], "format": [0.5, None]}


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1.7e308, "b": 1.7e308},
        "10",
        b"1",
        1j,
        numpy.array([1.0, 2.0]),
        numpy.complex128(1 + 2j),
        numpy.array("10"),
        torch.ones(1, device="meta"),
    ],
)
def test_components_that_overflow_and_values_that_are_no_number_are_refused(value):
    class Wrong:
        def reward(self, problem, completion):
            return value

    with pytest.raises(RewardError, match="it must be a finite number"):
        score(Wrong(), "a")


@pytest.mark.parametrize("answers", [numpy.array([0.5, 1.0]), torch.tensor([0.5, 1.0]), (numpy.float32(0.5), True)])
def test_rewards_may_be_values_of_numpy_and_torch(answers):
    class Array:
        def rewards(self, problem, completions):
            return answers

    assert score(Array(), "a", "b").totals == [0.5, 1.0]


def test_rewards_that_are_a_text_are_refused():
    class Text:
        def rewards(self, problem, completions):
            return "10"

    with pytest.raises(RewardError, match="gave '10' for 2 completions"):
        score(Text(), "a", "b")


def test_a_reward_that_fails_leaves_no_other_reward_running():
    class OneFails:
        async def reward(self, problem, completion):
            if completion == "b":
                raise ConnectionError("down")
            await asyncio.sleep(3600)

    async def fail() -> set[asyncio.Task]:
        with pytest.raises(RewardError, match="down"):
            await Scorer(max_retries=0).score(OneFails(), PROBLEM, ["a", "b"])
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(fail()) == set()
