"""Training loops and what they use, a service, and a server for the Tinker SDK."""

import gc
import sys

if sys.argv[:1] == ["-m"]:  # True only while Python looks for the module of `python -m controllers.grpo`
    # collections after every 700 objects took a fifth of the time of the imports and freed nothing
    gc.set_threshold(100_000)
