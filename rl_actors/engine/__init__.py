"""The trainer on one rank, without Monarch and without vLLM."""

# cpu.py sets torchtitan's device. It is imported before any other torchtitan module, because those copy the device when imported.
import rl_actors.engine.cpu  # noqa: F401
