"""A process that calls reward functions for a RewardPool, without torch and Monarch.

Pickles over one connection: the list of functions is answered by None or the text of an error, then
each (index of a function, arguments) by (True, reward) or (False, text of the exception).
"""

import asyncio
import ctypes
import faulthandler
import inspect
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from controllers.environments.own_code import described

PR_SET_PDEATHSIG = 1

START = """
import sys
sys.path[:] = sys.argv[2:]
from controllers.environments.pool_worker import main
main(int(sys.argv[1]))
"""
"""Arguments: file descriptor of the connection, entries of sys.path."""


def main(handle: int) -> None:
    """Answer until the pool closes the connection. handle: its file descriptor."""
    _prepare()
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


def _prepare() -> None:
    faulthandler.enable()  # prints the line that crashed
    # ends this process with its parent thread, also while a reward hangs
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A scheduler may signal all processes of a job, but the run still needs rewards. SIG_IGN would
    # be inherited by programs that a reward starts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)


def _answer(functions: Sequence[Callable], request: bytes) -> bytes:
    try:
        number, arguments = pickle.loads(request)
        reward = functions[number](*arguments)
        if inspect.isawaitable(reward):
            reward = asyncio.run(_awaited(reward))
        return pickle.dumps((True, reward))
    except Exception as error:
        traceback.print_exc()
        return pickle.dumps((False, described(error)))
    finally:
        sys.stdout.flush()


async def _awaited(answer: object) -> object:
    return await answer  # type: ignore[misc]
