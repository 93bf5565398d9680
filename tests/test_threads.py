"""Tests which threads of a process get OpenMP workers when they compute with torch."""

import subprocess
import sys

import pytest
from waiting import GUARD

PROGRAM = """
import os
import threading
import torch
from rl_actors.processes import threads

def running():
    return set(os.listdir("/proc/self/task"))

def compute():
    torch.ones(1 << 22).add_(1)

torch.set_num_threads(3)
if {prepared}:
    threads.prepare_cpu_process()
before = running()
compute()
own = running()
release = threading.Event()
other = threading.Thread(target=lambda: (compute(), computed.set(), release.wait()))
computed = threading.Event()
other.start()
computed.wait()
print(len(own - before), len(running() - own) - 1)
release.set()
"""


def workers(*, prepared: bool) -> list[int]:
    """[number of OpenMP workers of the main thread, number of OpenMP workers of another thread], counted in a new process.

    prepared: the main thread calls prepare_cpu_process before it computes.
    """
    program = PROGRAM.format(prepared=prepared)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=GUARD, check=True)
    return [int(number) for number in done.stdout.split()]


@pytest.mark.slow
def test_only_the_thread_that_prepared_its_process_has_workers():
    assert workers(prepared=True) == [2, 0]
    # Without preparation the other thread has workers, too. The count finds them, so the 0 above means that there are none.
    assert workers(prepared=False) == [2, 2]
