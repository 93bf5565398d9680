"""The reference that the benchmark trainer_speed compares with our trainer: torchtitan's own components, without actors or our TrainEngine.

The components are put together as in torchtitan's trainer. AdamW is fused. On a GPU the transformer blocks and the loss
are compiled. torchtitan's functions also compute the logits, clip the gradients and, on a GPU, make the attention
masks. A `Row` (harness/rows.py) is one case of the benchmark. On a GPU the reference and our trainer use the attention
kernel that the Row names. Each GPU has its own process. The host does not wait for the GPU between steps.

The reference takes these parts from rl_actors/engine: the configs of the model and of its attention layers, the
recomputation policy, the settings of the machine and, on a CPU, the attention mask.

In names of tensors, B is the number of rows of a microbatch, L the number of tokens of a row, and D the hidden size.
"""

import gc
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from rl_actors.engine import cpu  # isort: skip  (sets torchtitan's device before torchtitan's modules copy it)
import torch
from torch import Tensor, nn
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
from rl_actors.engine.gpu import this_machine


def run(
    row: Row, model: ModelConfig, rank: int, port: int, warmup: int, steps: int, trace: str, answer: Connection
) -> None:
    """Measure the reference on this rank, and send {"seconds": [seconds of each step], "peak_bytes": …} through `answer`.

    warmup: number of steps before the measured steps. trace: the file to which rank 0 writes a profiler's trace of a few
    more steps. With "" there is no trace.
    """
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": max(1, row.num_gpus),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    on_gpu = row.num_gpus > 0
    reference = Reference(row, model)
    gc.collect()
    gc.disable()  # as in torchtitan's trainer, which by default collects garbage only every 50 steps
    for _ in range(warmup):
        reference.step()
    seconds = _timed_on_gpu(reference.step, steps) if on_gpu else _timed(reference.step, steps)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    answer.send({"seconds": seconds, "peak_bytes": peak})
    if trace:
        with torch.profiler.profile() as profiler:
            for _ in range(TRACED_STEPS):
                reference.step()
            if on_gpu:
                torch.cuda.synchronize()
        if rank == 0:
            profiler.export_chrome_trace(trace)
    torch.distributed.destroy_process_group()


def _timed(step: Callable[[], None], steps: int) -> list[float]:
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def _timed_on_gpu(step: Callable[[], None], steps: int) -> list[float]:
    """Seconds of each step, measured with events on the GPU's stream. The host may launch the next step before the GPU has finished a step."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in zip(events, events[1:], strict=False)]


class Reference:
    """A model, its loss and its optimizer on this rank, and the microbatches of one step."""

    def __init__(self, row: Row, model: ModelConfig) -> None:
        """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be in the environment."""
        self.on_gpu = row.num_gpus > 0
        self.machine = this_machine()
        num_ranks = max(1, row.num_gpus)
        dist_utils.init_distributed(CommConfig(trace_buf_size=0), enable_cpu_backend=self.on_gpu)
        self.device = self.machine.device()
        self.machine.prepare(num_ranks)
        parallelism = ParallelismConfig(data_parallel_shard_degree=num_ranks, spmd_backend="partial_dtensor")
        dims = ParallelDims.from_config(parallelism, num_ranks)
        dist_utils.set_spmd_backend(parallelism.spmd_backend)
        compiled = CompileConfig(enable=self.on_gpu)
        self.module = self._build_module(row, model, parallelism, dims, compiled)
        loss_config = ChunkedLossWrapper.Config(num_chunks=row.chunks, loss_fn=CrossEntropyLoss.Config())
        self.loss = loss_config.build(compile_config=compiled)
        self.module._skip_lm_head = True
        self.loss.set_lm_head(self.module.lm_head)
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.context = dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)
        self.batches = [_batch(row, model.vocab_size, seed) for seed in range(row.microbatches)]
        self.num_positions = torch.tensor(float(row.positions * num_ranks), device=self.device)

    def _build_module(
        self,
        row: Row,
        model: ModelConfig,
        parallelism: ParallelismConfig,
        dims: ParallelDims,
        compiled: CompileConfig,
    ) -> nn.Module:
        dtype: Any = "bfloat16" if self.on_gpu else "float32"
        training = TrainingConfig(seq_len=row.row_length, mixed_precision_param=dtype)
        debug = DebugConfig(seed=0)
        config = qwen3_config(model)
        for layer in config.layers:
            layer.attention.inner_attention = self.machine.attention(row.attention)
            layer.attention.rope.max_seq_len = row.row_length
        if row.float8:
            recipe: Any = row.float8_recipe
            converter = Float8LinearConverter.Config(
                recipe_name=recipe, model_compile_enabled=True, filter_fqns=["lm_head"]
            )
            config = converter.build().convert(config)
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
        dist_utils.set_determinism(dims, self.device, debug, distinct_seed_mesh_dims=["pp"])
        self.machine.after_parallelize(module)
        module.to_empty(device=self.device)
        with torch.no_grad():
            module.init_weights(buffer_device=None)
        module.train()
        return module

    def step(self) -> None:
        """Take one optimizer step over the microbatches of the Row."""
        for batch in self.batches:
            tokens_BL, labels_BL, positions_BL = (x.to(self.device, non_blocking=True) for x in batch)
            masks = self._masks(positions_BL)
            with self.context():
                hidden_BLD = self.module(tokens_BL, positions=positions_BL, attention_masks=masks)
            mean, _ = self.loss(hidden_BLD, labels_BL, self.num_positions)
            mean.backward()
        dist_utils.clip_grad_norm_(list(self.module.parameters()), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _masks(self, positions_BL: Tensor) -> Any:
        """The attention masks. On a GPU torchtitan makes them, in the form that the Row's attention kernel takes. On a
        CPU the result is a dense mask, because the CPU's kernel needs a dense mask.
        """
        if self.on_gpu:
            return self.module.get_attention_masks(positions_BL)
        return cpu.dense_mask(positions_BL)


def _batch(row: Row, vocab_size: int, seed: int) -> list[Tensor]:
    """Tokens, labels and positions, each [B, L]. The tensors are in pinned memory if there is a GPU."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (row.rows, row.row_length + 1), generator=draw)
    positions = torch.arange(row.document).repeat(row.rows, row.row_length // row.document)
    tensors = [ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions]
    return [x.pin_memory() for x in tensors] if torch.cuda.is_available() else tensors
