"""The trainer on one rank. This package uses neither Monarch nor vLLM."""

# First, because modules of torchtitan copy the device when they are imported, and cpu.py sets it.
import rl_actors.engine.cpu  # noqa: F401
