"""Code with which a process that this package spawned starts and ends. Knows nothing of actors."""

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
"""Code for `python -c CODE -m MODULE`: run the module as `python -m MODULE` does, but start and end faster.

It collects no garbage until `collector.keep` is called. At the end the threads have ended and all exit handlers have run, because `end` is
registered first and so runs last. Without `end`, Python would then take apart the thousands of modules that torch and vLLM import, object
by object. That takes one second of processor time for a trainer and two for a generator, and nothing needs it.
"""
