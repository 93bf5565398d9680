"""The reference side of trainer_speed: torchtitan's own pieces as its trainer puts them together, without actors or our engine.

Blocks and loss compiled, fused AdamW, logits in torchtitan's chunks, its masks and clipping; one process a GPU, no wait for the device
between steps. B rows, L row length.
"""

import gc
import os
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import rl_actors.engine.cpu  # noqa: F401  # isort: skip  (torchtitan's modules copy the device that it sets)
import torch
from torch import Tensor
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.config import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.qwen3 import parallelize_qwen3

from benchmarks.harness.rows import TRACED_STEPS, Row
from rl_actors import ModelConfig
from rl_actors.engine import recomputation
from rl_actors.engine.build import qwen3_config
from rl_actors.engine.machine import this_machine


def run(
    row: Row, model: ModelConfig, rank: int, port: int, warmup: int, steps: int, trace: str, answer: Connection
) -> None:
    """Send {"seconds": of each step, "peak_bytes": …} of this rank."""
    num_ranks = max(1, row.num_gpus)
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in named.items()})
    on_gpu = row.num_gpus > 0
    step = _build(row, model, num_ranks, on_gpu)
    gc.collect()
    gc.disable()  # as torchtitan's trainer, which collects at times of its own
    for _ in range(warmup):
        step()
    seconds = _timed_on_gpu(step, steps) if on_gpu else [_timed(step) for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    answer.send({"seconds": seconds, "peak_bytes": peak})
    if trace:
        with torch.profiler.profile() as profiler:
            for _ in range(TRACED_STEPS):
                step()
            torch.cuda.synchronize() if on_gpu else None
        if rank == 0:
            profiler.export_chrome_trace(trace)
    torch.distributed.destroy_process_group()


def _timed(step: Any) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _timed_on_gpu(step: Any, steps: int) -> list[float]:
    """Between events on the stream: the host may run ahead of the device."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)]


def _build(row: Row, model: ModelConfig, num_ranks: int, on_gpu: bool) -> Any:
    """() -> one optimizer step over the row's microbatches."""
    machine = this_machine()
    dist_utils.init_distributed(CommConfig(trace_buf_size=0), enable_cpu_backend=on_gpu)
    device = machine.device()
    machine.prepare(num_ranks)
    parallelism = ParallelismConfig(data_parallel_shard_degree=num_ranks, spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, num_ranks)
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    training = TrainingConfig(seq_len=row.row_length, mixed_precision_param="bfloat16" if on_gpu else "float32")
    compiled = CompileConfig(enable=on_gpu)
    config = qwen3_config(model)
    for layer in config.layers:
        layer.attention.inner_attention = machine.attention("flex")
        layer.attention.rope.max_seq_len = row.row_length
    if row.float8:
        recipe: Any = row.float8_recipe
        converter = Float8LinearConverter.Config(
            recipe_name=recipe, model_compile_enabled=True, filter_fqns=["lm_head"]
        )
        config = converter.build().convert(config)
    debug = DebugConfig(seed=0)
    config.update_from_config(
        config=SimpleNamespace(training=training, parallelism=parallelism, debug=debug, compile=compiled)
    )
    with torch.device("meta"):
        module = config.build()
    module = parallelize_qwen3(
        module,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=compiled,
        ac_config=recomputation.policy(row.checkpointing),
        dump_folder="",
    )
    dist_utils.set_determinism(dims, device, debug, distinct_seed_mesh_dims=["pp"])
    machine.after_parallelize(module)
    module.to_empty(device=device)
    with torch.no_grad():
        module.init_weights(buffer_device=None)
    module.train()
    loss = ChunkedLossWrapper.Config(num_chunks=row.chunks, loss_fn=CrossEntropyLoss.Config()).build(
        compile_config=compiled
    )
    module._skip_lm_head = True
    loss.set_lm_head(module.lm_head)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    context = dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)
    batches = [_batch(row, model.vocab_size, seed) for seed in range(row.microbatches)]
    total = torch.tensor(float(row.positions * num_ranks), device=device)

    def masks(positions_BL: Tensor) -> Any:
        if on_gpu:
            return module.get_attention_masks(positions_BL)
        return machine.dense_mask(positions_BL)

    def step() -> None:
        for tokens_BL, labels_BL, positions_BL in batches:
            moved = [x.to(device, non_blocking=True) for x in (tokens_BL, labels_BL, positions_BL)]
            made = masks(moved[2])
            with context():
                hidden_BLD = module(moved[0], positions=moved[2], attention_masks=made)
            mean, _ = loss(hidden_BLD, moved[1], total)
            mean.backward()
        dist_utils.clip_grad_norm_(list(module.parameters()), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _batch(row: Row, vocab_size: int, seed: int) -> list[Tensor]:
    """Tokens, labels and positions, in pinned memory where there is a GPU."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (row.rows, row.row_length + 1), generator=draw)
    positions = torch.arange(row.document).repeat(row.rows, row.row_length // row.document)
    tensors = [ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions]
    return [x.pin_memory() for x in tensors] if torch.cuda.is_available() else tensors
