"""Reads the use or the memory of GPUs from nvidia-smi while a benchmark runs.

nvidia-smi runs in its own process, so this process needs no CUDA context. A context would take memory on the GPU that is measured.
"""

import subprocess
import threading
import time
from contextlib import suppress
from math import inf

from benchmarks.harness import results


class Watch:
    """Reads one field of nvidia-smi ten times a second, on every GPU that this program may use, until `stop` is called.

    The field is for example "utilization.gpu" (percent) or "memory.used" (MiB).
    """

    def __init__(self, field: str) -> None:
        self.readings: list[tuple[float, int, float]] = []  # (time.perf_counter, GPU, value)
        query = ["nvidia-smi", f"--query-gpu=index,{field}", "--format=csv,noheader,nounits", "-lms", "100"]
        # index of a GPU in nvidia-smi -> index of the same GPU in this program
        self.numbers = {index: number for number, index in enumerate(results.visible(len(results.gpus())))}
        self.process: subprocess.Popen | None = None
        with suppress(OSError):  # a machine without GPUs has no nvidia-smi
            self.process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):
                index, value = line.split(",")
                if index.strip() in self.numbers:
                    self.readings.append((time.perf_counter(), self.numbers[index.strip()], float(value)))

    def between(self, start: float = -inf, end: float = inf) -> dict[int, list[float]]:
        """{GPU: [value, …]}: the values that were read between two times of time.perf_counter."""
        values: dict[int, list[float]] = {}
        for moment, gpu, value in list(self.readings):
            if start <= moment <= end:
                values.setdefault(gpu, []).append(value)
        return dict(sorted(values.items()))

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
