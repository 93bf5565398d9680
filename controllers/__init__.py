"""Training loops, the Tinker server and what they need: tasks, rewards, checkpoints, reports and command lines."""

import gc
import sys

if sys.argv[:1] == ["-m"]:  # True only while Python looks for the module of `python -m controllers.grpo`
    # A program first imports thousands of modules, whose objects live as long as the program. By default Python looks for garbage
    # after every 700 new objects, which took a fifth of the time of the imports.
    gc.set_threshold(100_000)
