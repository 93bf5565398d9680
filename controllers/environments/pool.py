"""A pool of processes for slow reward functions, beside the event loop. The standard library's pools
cannot end one process whose call hangs, and import the main module."""

import asyncio
import contextlib
import ctypes
import faulthandler
import inspect
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from controllers.environments.base import Environment
from controllers.environments.own_code import described

START_TIMEOUT = 120.0  # seconds in which a new process must import the reward functions
END_TIMEOUT = 5.0  # seconds to wait for the exit status of a process that closed its connection

PR_SET_PDEATHSIG = 1
# arguments: file descriptor of the connection, entries of sys.path
START = """
import sys
sys.path[:] = sys.argv[2:]
from controllers.environments.pool import main
main(int(sys.argv[1]))
"""

logger = logging.getLogger(__name__)


class RewardFailed(RuntimeError):
    """A reward function raised an exception, or its process ended."""


class RewardPool:
    """Processes that call reward functions, and end with their parent; a thread waits for each."""

    def __init__(self, environments: Mapping[str, Environment] | None = None, *, num_workers: int = 0) -> None:
        """environments: by name, for errors. Raises ValueError for what cannot be pickled."""
        environments = environments or {}
        self._numbers: dict[int, int] = {}  # {id(environment): index of its function}
        self._environments = list(environments.values())  # keeps their ids taken
        functions: list[Callable] = []
        for name, environment in environments.items():
            function = reward_function(environment)
            if id(environment) in self._numbers or is_async(function):
                continue
            try:
                cloudpickle.dumps(function)
            except Exception as error:  # of many classes
                raise ValueError(
                    f"{name}: reward_workers={num_workers}, but the reward {name_of(function)} cannot be sent to a process: {error}"
                ) from None
            self._numbers[id(environment)] = len(functions)
            functions.append(function)
        self._names = ", ".join(map(name_of, functions))
        self._functions = cloudpickle.dumps(functions)
        self._workers = [_Worker() for _ in range(num_workers if functions else 0)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        # PR_SET_PDEATHSIG kills a process when the thread that started it ends, so these start them
        self._threads = ThreadPoolExecutor(max(1, num_workers), thread_name_prefix="reward")
        self._lock = threading.Lock()  # held while a process starts, so that `close` sees it
        self._is_closed = False
        self.num_replaced = 0

    def start(self) -> None:
        """Raises ValueError, naming the functions, if a process cannot import them."""
        try:
            list(self._threads.map(self._start, self._workers))
        except BaseException:
            self.close()
            raise
        for worker in self._workers:
            self._idle.put(worker)

    def close(self) -> None:
        """End all processes and what rewards started in them. May be called twice."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.disconnect()

    def calls(self, environment: Environment) -> bool:
        """False for `async` functions."""
        return id(environment) in self._numbers

    async def ask(self, environment: Environment, *arguments: object, timeout: float) -> object:
        """timeout: seconds, from when a process is ready. Raises TimeoutError; RewardFailed if the
        function raised or its process ended; ValueError if a new one cannot load the functions."""
        request = pickle.dumps((self._numbers[id(environment)], arguments))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._ask, request, timeout)

    def _ask(self, request: bytes, timeout: float) -> object:
        worker = self._idle.get()
        try:
            self._start(worker)
            is_answer, answer = worker.ask(request, timeout)
        except (TimeoutError, RewardFailed) as error:
            with self._lock:
                if not self._is_closed:
                    logger.warning("the reward process with pid %s is replaced: %s", worker.pid, error)
                    self.num_replaced += 1
                    worker.end()
            raise
        finally:
            self._idle.put(worker)
        if is_answer:
            return answer
        raise RewardFailed(answer)

    def _start(self, worker: "_Worker") -> None:
        """Start a process with the reward functions, unless there is one or the pool is closed."""
        with self._lock:
            if self._is_closed or worker.pid is not None:
                return
            worker.start()
        try:
            error = worker.ask(self._functions, START_TIMEOUT)
        except TimeoutError:
            error = f"the process did not import them within {START_TIMEOUT:g} s"
        except RewardFailed as failure:
            error = str(failure)
        if error is not None:
            with self._lock:
                if self._is_closed:
                    return
                worker.end()  # a late answer would be taken for that of the next `ask`
            raise ValueError(f"a process of reward_workers cannot load the rewards {self._names}: {error}")


class _Worker:
    """One process and its connection, used by one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        ours, theirs = Pipe()
        with theirs:
            path = [os.path.abspath(folder) for folder in sys.path]
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, str(theirs.fileno()), *path],
                env={"OMP_NUM_THREADS": "1", **os.environ},  # several processes share the cores
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches only the controller
            )
        self._connection = ours

    def ask(self, request: bytes, timeout: float) -> Any:
        """Raises TimeoutError after `timeout` seconds, RewardFailed if the process has ended."""
        if self._connection is None:
            raise RewardFailed("the pool is closed")
        try:
            self._connection.send_bytes(request)
            if self._connection.poll(timeout):
                return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise RewardFailed(f"the process {self._status()}") from None
        raise TimeoutError(f"no answer within {timeout:g} s")

    def _status(self) -> str:
        assert self._process is not None
        try:
            status = self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            return "closed its connection, but did not end"
        return f"ended with {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"

    def end(self) -> None:
        self.kill()
        self.disconnect()

    def kill(self) -> None:
        """End the process group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


def reward_function(environment: Environment) -> Callable:
    """The method that scores a whole group, else the one that scores a completion."""
    return getattr(environment, "rewards", None) or environment.reward


def is_async(function: Callable) -> bool:
    """Also for an object whose `__call__` is `async`, and for a TextScore."""
    function = getattr(function, "compare", function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def name_of(function: Callable) -> str:
    """name_of(NextNumber(…).reward) -> "next_number:NextNumber"."""
    named = getattr(function, "compare", getattr(function, "__self__", function))
    named = named if hasattr(named, "__qualname__") else type(named)
    return f"{named.__module__}:{named.__qualname__}"


def main(handle: int) -> None:
    """A process of the pool. Answers until the pool closes the connection. handle: its file descriptor."""
    faulthandler.enable()  # prints the line that crashed
    # ends this process with its parent thread, also while a reward hangs
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A scheduler may signal all processes of a job, but the run still needs rewards. SIG_IGN would
    # be inherited by programs that a reward starts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    os.set_inheritable(handle, False)  # else programs of rewards keep the connection open
    connection = Connection(handle)
    try:
        functions: Sequence[Callable] = pickle.loads(connection.recv_bytes())
    except EOFError:
        return
    except Exception as error:  # the user's modules may raise anything
        connection.send_bytes(pickle.dumps(described(error)))
        return
    connection.send_bytes(pickle.dumps(None))
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(functions, request))


def _answer(functions: Sequence[Callable], request: bytes) -> bytes:
    try:
        number, arguments = pickle.loads(request)
        reward = functions[number](*arguments)
        if inspect.isawaitable(reward):
            with asyncio.Runner() as runner:
                reward = runner.get_loop().run_until_complete(reward)
        return pickle.dumps((True, reward))
    except Exception as error:
        traceback.print_exc()
        return pickle.dumps((False, described(error)))
    finally:
        sys.stdout.flush()
