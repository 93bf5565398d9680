"""A process that calls reward functions for a RewardPool. It imports neither torch nor Monarch, so it starts in a fraction of a second.

The pool and this process exchange pickles over one connection. The first message is the list of reward functions. The
answer to it is None, or the text of an error. Every further message is a pair (index of a function in the list,
arguments of the call). The answer to it is (True, reward) or (False, text of the exception).
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
"""Program of a new process. Its arguments are the number of the connection's file descriptor, and then the entries of
sys.path of the process that starts it."""


def main(handle: int) -> None:
    """Answer messages until the pool closes the connection. handle: file descriptor of the connection."""
    _prepare()
    os.set_inheritable(handle, False)  # otherwise a program that a reward starts would keep the connection open
    connection = Connection(handle)
    try:
        functions: Sequence[Callable] = pickle.loads(connection.recv_bytes())
    except EOFError:
        return
    except Exception as error:  # whatever the user's modules raise when they are imported
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
    faulthandler.enable()  # if a reward crashes the process, Python prints the line that crashed
    # prctl makes Linux kill this process when its parent thread ends. So this process also ends if the pool's
    # process is killed while a reward hangs.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A scheduler may send SIGTERM or SIGINT to all processes of a job. This process ignores both signals, because the
    # run still needs rewards. The pool ends this process later. The code below sets a handler that does nothing,
    # instead of SIG_IGN. Programs that a reward starts would inherit SIG_IGN, and the signals could not end them.
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
