"""The trainer on one rank. This package uses neither Monarch nor vLLM."""

# cpu.py sets torchtitan's device. Some modules of torchtitan copy the device when they are imported, so cpu.py must be imported first.
import rl_actors.engine.cpu  # noqa: F401
