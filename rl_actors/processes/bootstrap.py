"""Code that runs at the start and at the end of each process that this package spawns. This module imports nothing."""

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
"""Code for `python -c CODE -m MODULE`. It runs the module as `python -m MODULE` does, but starts and ends the process faster.

The process collects no garbage until `collector.keep` is called.

The exit handler `end` ends the process at once. Without `end`, Python would delete, one by one, the objects of the thousands of modules that torch
and vLLM import. This would be of no use, and would take one second of processor time in a trainer, and two seconds in a generator. At the
end Python waits for all non-daemon threads, and then runs the exit handlers in reverse order. `end` is registered first, so it runs last.
"""
