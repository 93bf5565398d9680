"""Code that runs at the start and at the end of each spawned process. Imports nothing."""

BOOTSTRAP = """
import atexit, gc, os, runpy, sys

gc.disable()
del sys.argv[:2]
status = 1


def end():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


atexit.register(end)
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    status = 0
except SystemExit as error:
    status = error.code if isinstance(error.code, int) else int(error.code is not None)
    raise
"""
"""Code for `python -c CODE -m MODULE`: as `python -m MODULE`, but starts and ends faster.

No garbage collection until `collector.keep`. `end` skips the deletion of the objects of torch and
vLLM, one second of CPU time in a trainer and two in a generator. Exit handlers run in reverse
order, so `end`, registered first, runs last.
"""
