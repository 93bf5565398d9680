"""The trainer on one rank, without Monarch and without vLLM."""

# cpu.py sets torchtitan's device. It is imported before the modules of torchtitan that copy the device when they are imported.
import rl_actors.engine.cpu  # noqa: F401
