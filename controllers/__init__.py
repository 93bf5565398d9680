"""The loops, and everything around them that is no service: tasks, rewards, checkpoints, reports and their command line."""

import gc
import sys

if sys.argv[:1] == ["-m"]:  # only while Python looks for the module of `python -m controllers.grpo`
    # A program first imports thousands of modules, whose objects live as long as the program. By default Python looks for garbage among all
    # objects after every 700 new ones, which took a fifth of the time of the imports.
    gc.set_threshold(100_000)
