"""Attention kernels of a GPU, forward and backward, for one document of 16k and 64k and rows of 32k packed with documents of 2k.

Qwen3's heads in bfloat16. Every kernel is compared with flex attention first: the worst relative error of output and gradients.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.harness import results

SHAPES = {"16k": (1, 16_384, 16_384), "packed": (2, 32_768, 2048), "64k": (1, 65_536, 65_536)}
HEADS = {"0_6b": 16, "4b": 32}
KEY_VALUE_HEADS, HEAD_DIM = 8, 128

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, L, N, H], k and v [B, L, K, H] -> [B, L, N, H]"""


@dataclass(frozen=True, slots=True)
class Case:
    num_rows: int
    row_length: int
    document: int

    def spans(self) -> list[tuple[int, int, int, int]]:
        starts = range(0, self.row_length, self.document)
        return [(0, row, start, start + self.document) for row in range(self.num_rows) for start in starts]


def flex(case: Case) -> Attention:
    """torchtitan's mask for one document a row is the causal one with a second condition, as here."""
    compiled = torch.compile(flex_attention, dynamic=False)
    document_L = torch.arange(case.row_length, device="cuda") // case.document

    def mask(b, h, q, k):
        return (q >= k) & (document_L[q] == document_L[k])

    shape = (case.num_rows, None, case.row_length, case.row_length)
    blocks = torch.compile(create_block_mask)(mask, *shape, device="cuda")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=blocks, enable_gqa=True).transpose(1, 2)

    return run


def flash4(case: Case) -> Attention:
    """The trainer's module."""
    from rl_actors.engine import flash4

    module = flash4.CONFIGS["flash4"]().build()
    made = flash4.documents(case.num_rows, case.row_length, case.spans())
    starts = made.cu_seq_q.cuda()
    masks = made._replace(cu_seq_q=starts, cu_seq_k=starts)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module(q, k, v, attention_masks=masks, enable_gqa=True)

    return run


def cudnn_causal(case: Case) -> Attention:
    """cuDNN through scaled_dot_product_attention: rows of equal documents are a batch of them."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = q.shape
        q, k, v = (x.reshape(-1, case.document, *x.shape[2:]).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(shape)

    return run


CANDIDATES: dict[str, Callable[[Case], Attention]] = {
    "flex": flex,
    "flash4": flash4,
    "cudnn, dense": cudnn_causal,
}


def measure(attention: Attention, inputs: list[Tensor], grad: Tensor, repeats: int) -> tuple[float, float]:
    """Median milliseconds of the forward pass, and of both passes."""

    def median(call: Callable[[], Any]) -> float:
        for _ in range(2):
            call()
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times)[len(times) // 2]

    def both() -> None:
        torch.autograd.grad(attention(*inputs), inputs, grad)

    return median(lambda: attention(*inputs)), median(both)


def run_case(shape: str, heads: str, names: list[str], repeats: int) -> None:
    case = Case(*SHAPES[shape])
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = [(case.num_rows, case.row_length, n, HEAD_DIM) for n in (HEADS[heads], KEY_VALUE_HEADS, KEY_VALUE_HEADS)]
    inputs = [torch.randn(s, generator=draw, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]
    grad = torch.randn(shapes[0], generator=draw, device="cuda", dtype=torch.bfloat16)
    # Two products forward and five backward, over half of the square.
    pairs = case.num_rows * (case.row_length // case.document) * case.document**2 / 2
    flops = 4 * HEADS[heads] * HEAD_DIM * pairs
    expected: list[Tensor] | None = None
    for name in names:
        began = time.perf_counter()
        try:
            attention = CANDIDATES[name](case)
            out = attention(*inputs)
            values = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
            expected = values if expected is None else expected
            error = max(float((a - b).norm() / b.norm()) for a, b in zip(values, expected, strict=True))
            forward, both = measure(attention, inputs, grad, repeats)
        except Exception as failure:
            print(f"{heads} {shape} {name}: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
            continue
        figures = {
            "forward_ms": forward,
            "both_ms": both,
            "forward_tflops": flops / forward / 1e9,
            "both_tflops": 3.5 * flops / both / 1e9,
            "relative_error": error,
            "start_seconds": round(time.perf_counter() - began, 1),
        }
        results.add("attention", f"{heads} {shape} {name}", figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--heads", default="0_6b", choices=HEADS)
    parser.add_argument("--kernels", nargs="*", default=list(CANDIDATES), choices=CANDIDATES)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("a CPU has one attention kernel; this needs a GPU")
    for shape in arguments.shapes:
        run_case(shape, arguments.heads, arguments.kernels, arguments.repeats)


if __name__ == "__main__":
    main()
