"""Training loops, and a server for programs of the Tinker SDK. Also tasks, rewards, checkpoints, reports and command
lines.
"""

import gc
import sys

if sys.argv[:1] == ["-m"]:  # True only while Python looks for the module of `python -m controllers.grpo`
    # The program first imports thousands of modules. By default Python's garbage collector runs after every 700 new
    # objects. These collections took a fifth of the time of the imports and found nothing, because the objects of
    # modules live as long as the program.
    gc.set_threshold(100_000)
