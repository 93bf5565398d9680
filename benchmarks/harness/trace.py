"""What a torch.profiler trace of steps says: how long the GPU was busy, and which kernels took the time. Takes no trace."""

import json
import sys
from collections import defaultdict
from pathlib import Path

NAMES = 25
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
KINDS = {  # what is found in a kernel's name, in this order -> what it is
    "flex": "attention",
    "flash": "attention",
    "fmha": "attention",
    "sdpa": "attention",
    "gemm": "matrix products",
    "cutlass": "matrix products",
    "nvjet": "matrix products",
    "adam": "optimizer",
    "nccl": "communication",
    "triton_red": "fused, with reductions",  # before the rest: their names list all that was fused
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
    """Lines: span of `steps` steps and busy share of the GPU, time of a step by kind, the longest gaps and the kernels with most time."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") in GPU_CATEGORIES and "dur" in event]
    if not kernels:
        return f"{path}: no GPU events among {len(events)}"
    spans = sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in kernels)
    busy, gaps, end = 0.0, [], spans[0][0]
    for start, stop, name in spans:
        if start > end:
            gaps.append((start - end, name))
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = end - spans[0][0]
    by_name: dict[str, list[float]] = defaultdict(list)
    by_kind: dict[str, float] = defaultdict(float)
    for event in kernels:
        by_name[event["name"]].append(event["dur"])
        by_kind[_kind(event["name"])] += event["dur"]
    lines = [
        f"{path}: {steps} steps in {whole / 1e3:.1f} ms, busy {busy / whole:.1%}, {len(kernels):,} kernels, {len(gaps):,} gaps"
    ]
    lines += [
        f"  {total / steps / 1e3:9.1f} ms {total / whole:6.1%}  {kind}"
        for kind, total in sorted(by_kind.items(), key=lambda item: -item[1])
    ]
    lines += ["longest gaps, before:"] + [
        f"  {gap / 1e3:9.2f} ms  {name[:100]}" for gap, name in sorted(gaps)[-8:][::-1]
    ]
    lines += ["kernels:"] + [
        f"  {sum(times) / steps / 1e3:9.1f} ms {sum(times) / whole:6.1%} {len(times) // steps:6}  {name[:110]}"
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:NAMES]
    ]
    return "\n".join(lines)


def _kind(name: str) -> str:
    lower = name.lower()
    return next((kind for part, kind in KINDS.items() if part in lower), "other")


if __name__ == "__main__":
    print("\n\n".join(map(summary, sys.argv[1:])))
