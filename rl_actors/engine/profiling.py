"""Traces of whole training steps by torch.profiler, one file per rank."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepProfiler:
    """Traces this rank's optimizer steps. Call `step_done` after each."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._trace: profile | None = None
        self._file = Path()
        self._steps_left = 0

    def start(self, directory: str, steps: int) -> None:
        """Trace the next `steps` steps, then write <directory>/rank-<rank>.json."""
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps={steps}; it must be an integer of at least 1")
        if self._trace is not None:
            raise RuntimeError(f"profile: the trace {self._file} is not done; steps left: {self._steps_left}")
        self._file = Path(directory) / f"rank-{self.rank}.json"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._trace = profile(activities=activities)
        self._steps_left = steps
        self._trace.start()

    def step_done(self) -> None:
        if self._trace is None:
            return
        self._steps_left -= 1
        if self._steps_left == 0:
            trace = self._trace
            self._trace = None
            trace.stop()
            trace.export_chrome_trace(str(self._file))
