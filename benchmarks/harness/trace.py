"""Summary of a torch.profiler trace: how long the GPU was busy, and which kernels took the time. Records no trace itself.

python -m benchmarks.harness.trace FILE …
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

NUM_KERNELS = 25
NUM_GAPS = 8
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
# The kind of a kernel, by a part of the kernel's name. The first entry whose part is in the name decides.
KINDS = {
    "flex": "attention",
    "flash": "attention",
    "fmha": "attention",
    "sdpa": "attention",
    "gemm": "matrix products",
    "cutlass": "matrix products",
    "nvjet": "matrix products",
    "adam": "optimizer",
    "nccl": "communication",
    # Fused kernels come before the kinds below, because a fused kernel's name lists all its operations.
    "triton_red": "fused, with reductions",
    "triton_per": "fused, with reductions",
    "triton": "fused",
    "memcpy": "copies",
    "copy": "copies",
    "split": "copies",
    "cat": "copies",
    "red": "reductions",
    "elementwise": "elementwise",
    "multi_tensor": "multi-tensor",
}


def summary(path: str | Path, steps: int = 1) -> str:
    """Text about a trace of `steps` steps: length, busy share of the GPU, time by kind of kernel, longest gaps, and slowest kernels.

    Copies and memory sets count as kernels.
    """
    events = json.loads(Path(path).read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") in GPU_CATEGORIES and "dur" in event]
    if not kernels:
        return f"{path}: no GPU events among its {len(events):,} events"
    whole, busy, gaps = _spans(kernels)
    by_name: dict[str, list[float]] = defaultdict(list)
    by_kind: dict[str, float] = defaultdict(float)
    for event in kernels:
        by_name[event["name"]].append(event["dur"])
        by_kind[_kind(event["name"])] += event["dur"]
    lines = [
        f"{path}: {steps} steps in {whole / 1e3:.1f} ms, busy {busy / whole:.1%}, {len(kernels):,} kernels, {len(gaps):,} gaps\n"
        "kinds of kernels (ms per step, share of the whole time):"
    ]
    for kind, total in sorted(by_kind.items(), key=lambda item: -item[1]):
        lines.append(f"  {total / steps / 1e3:9.1f} ms {total / whole:6.1%}  {kind}")
    lines.append("longest gaps, each with the kernel after it:")
    for gap, name in sorted(gaps, reverse=True)[:NUM_GAPS]:
        lines.append(f"  {gap / 1e3:9.2f} ms  {name[:100]}")
    lines.append("kernels that took the most time (ms per step, share of the whole time, calls per step):")
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:NUM_KERNELS]:
        total = sum(times)
        lines.append(f"  {total / steps / 1e3:9.1f} ms {total / whole:6.1%} {len(times) // steps:6}  {name[:110]}")
    return "\n".join(lines)


def _spans(kernels: list[dict[str, Any]]) -> tuple[float, float, list[tuple[float, str]]]:
    """(whole, busy, gaps), in microseconds.

    whole: the time from the start of the first kernel to the end of the kernel that ends last. busy: the part of `whole` in which a kernel
    ran. gaps: (length, name of the next kernel) of every interval in which no kernel ran.
    """
    spans = sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in kernels)
    first = end = spans[0][0]
    busy, gaps = 0.0, []
    for start, stop, name in spans:
        if start > end:
            gaps.append((start - end, name))
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return end - first, busy, gaps


def _kind(name: str) -> str:
    lower = name.lower()
    return next((kind for part, kind in KINDS.items() if part in lower), "other")


if __name__ == "__main__":
    print("\n\n".join(map(summary, sys.argv[1:])))
