"""The trainer on one rank, without Monarch and without vLLM."""

# Before any other torchtitan module: they copy the device when they are imported, and cpu.py sets it.
import rl_actors.engine.cpu  # noqa: F401
