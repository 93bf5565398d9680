"""What a computing process sets, seen in a process of its own."""

import subprocess
import sys

PROGRAM = """
import os
import threading
import time
import torch
from rl_actors.processes import threads

def num_threads():
    time.sleep(0.2)  # a thread that was joined may still be there
    return len(os.listdir("/proc/self/task"))

def compute():
    torch.ones(1 << 22).add_(1)

torch.set_num_threads(3)
if {prepared}:
    threads.prepare_cpu_process()
before = num_threads()
compute()
own = num_threads()
release = threading.Event()
other = threading.Thread(target=lambda: (compute(), computed.set(), release.wait()))
computed = threading.Event()
other.start()
computed.wait()
print(own - before, num_threads() - own - 1)
release.set()
"""


def workers(*, prepared: bool) -> list[int]:
    """OpenMP workers of the thread that prepared the process, and of another one."""
    program = PROGRAM.format(prepared=prepared)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return [int(number) for number in done.stdout.split()]


def test_only_the_thread_that_prepared_its_process_has_workers():
    assert workers(prepared=True) == [2, 0]
    assert workers(prepared=False) == [2, 2]  # else this counts nothing
