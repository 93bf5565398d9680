"""The loops, and everything around them that is no service: tasks, rewards, checkpoints, reports and their command line."""

import gc
import sys

if sys.argv[:1] == ["-m"]:  # only while Python looks for the module of `python -m controllers.grpo`
    # A program imports thousands of modules first, whose objects live as long as it does. Python's own limit of 700 new objects makes it
    # look through them again and again, for a fifth of that time.
    gc.set_threshold(100_000)
