"""The installed torch, torchtitan, torchstore, Monarch and vLLM still have the internals that our code uses, such as private names.

Each use of such internals has a check here, whose docstring is its row in docs/upstream.md; `python tests/test_upstream.py --write`
writes the page. After an upgrade of these packages run `python tests/test_upstream.py` first. It runs the checks and
prints the rows that no longer hold, in 15 to 30 seconds of processor time. The checks start no engine and no actor.

Under pytest, this file also tests that docs/upstream.md has every private name of these packages that our code uses.
"""

import ast
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "upstream.md"
CODE = ("rl_actors", "controllers", "configs", "benchmarks")
FOREIGN = ("torch", "torchao", "torchtitan", "torchstore", "monarch", "vllm")
FOREIGN_PATH = re.compile(rf"({'|'.join(FOREIGN)})([.:]\w+)+")
VARIABLES = re.compile(r"(HF|HYPERACTOR|NCCL|TORCH|TORCHELASTIC|TORCHINDUCTOR|VLLM)_[A-Z0-9_]+")
TIMEOUT = 300  # seconds; all checks together take 15 to 30 seconds of processor time
CHECKS: dict[str, Callable[[], None]] = {}
SECTIONS: dict[str, tuple[str, list[str]]] = {}
"""Heading of docs/upstream.md -> (text below it, names of its rows)."""

HEAD = """# Internals of other packages that our code uses

This page lists every place where our code reaches into torch, torchtitan, torchstore, Monarch or vLLM.
Such code uses a private name, replaces part of a module or class, relies on the internals of a public class, or sets
an environment variable of the package or of a library below it.
Each use has a row in a table.
After an upgrade of one of these packages, run `python tests/test_upstream.py`.
This program checks all rows in 15 to 30 seconds of processor time, and prints the rows that no longer hold.
Under pytest, the same file also fails if the code uses a private name that this page lacks.
Some rows describe a workaround for an upstream defect.
The check of such a row fails when upstream has mended the defect.
Then delete our workaround, the row and the check.

The paths in the tables are relative to `rl_actors/`.
Only paths that begin with `benchmarks/` or `tests/` are relative to the root of the repository.

The column "if it changes" says how you would notice that upstream has changed the name.
*Loud* means that our code raises an error at once.
*Silent* means that no error is raised.
Then the row says what goes wrong.
Only the row's check, or the test that the row names, finds a silent change.
The column "until" says when our code can be deleted.
"""
COLUMNS = "| name | where and why | if it changes | until |\n|---|---|---|---|"


def section(title: str, text: str = "") -> None:
    """Begins a table of docs/upstream.md."""
    SECTIONS[title] = (text, [])


def row(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Decorator of a check, which raises an error when its row of docs/upstream.md no longer holds.

    name: the first cell of the row, without backticks. The docstring of the check has the others.
    """

    def register(check: Callable[[], None]) -> Callable[[], None]:
        CHECKS[name] = check
        list(SECTIONS.values())[-1][1].append(name)
        return check

    return register


def page() -> str:
    """The text of docs/upstream.md."""
    parts = [HEAD]
    for title, (text, names) in SECTIONS.items():
        lines = [f"## {title}", "", *([text, ""] if text else []), COLUMNS]
        for name in names:
            cells = [f"`{name}`"]
            for paragraph, start in zip(
                inspect.cleandoc(CHECKS[name].__doc__).split("\n\n"), ("", "If it changes: ", "Until: "), strict=True
            ):
                cells.append(" ".join(paragraph.split()).removeprefix(start))
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def parameters(function: Callable) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(thing: Any) -> str:
    return inspect.getsource(thing)


@cache
def mesh() -> Any:
    """A device mesh whose only rank is this process."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.device_mesh.init_device_mesh("cpu", (1,))


def tiny(**fields: Any) -> Any:
    """torchtitan's config of a tiny Qwen3 with experts."""
    from rl_actors import ModelConfig
    from rl_actors.engine.build import qwen3_config

    model = ModelConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        tie_word_embeddings=False,
    )
    return qwen3_config(model, **fields)


section("torch")


@row("torch.distributed.tensor.DTensor._local_tensor")
def _() -> None:
    """`engine/gradients.py`: the norm, the scaling and Adam work on a rank's own shards, without
    DTensor's dispatch. The dispatch took 11 of the 17 ms of an `optim_step` of 28 blocks.
    `to_local` would make a new tensor for each parameter.

    If it changes: loud

    Until: `to_local` costs nothing
    """
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded = distribute_tensor(torch.ones(4), mesh(), [Shard(0)])
    assert type(sharded._local_tensor) is torch.Tensor
    assert sharded._local_tensor.data_ptr() == sharded.to_local().data_ptr()


@row("torch.distributed.distributed_c10d.default_pg_timeout, default_pg_nccl_timeout, _set_pg_timeout")
def _():
    """`engine/deadlines.py` sets the deadline of the process groups. torchtitan's meshes take no
    deadline, and gloo's sends and receives keep the deadline with which their group was made. So
    our code replaces the two defaults while torchtitan makes its meshes. `_set_pg_timeout` changes
    the deadlines of existing groups.

    If it changes: loud for the names; silent if the groups get another deadline: then a hang lasts
    until the caller's timeout; `tests/engine/test_deadlines.py`

    Until: torchtitan's meshes take a deadline
    """
    from torch.distributed import distributed_c10d

    default = source(distributed_c10d._get_default_timeout)
    assert "return default_pg_nccl_timeout" in default and "return default_pg_timeout" in default
    assert "timeout = _get_default_timeout(backend)" in source(distributed_c10d._new_group_with_tag)
    assert parameters(distributed_c10d._set_pg_timeout) == ["timeout", "group"]


@row("torch._foreach_norm, torch._foreach_mul_")
def _() -> None:
    """`engine/gpu.py`, `engine/gradients.py`: one call of `_foreach_norm` takes all gradients of the
    same layout, and one call of `_foreach_mul_` takes all gradients.

    If it changes: loud

    Until: torch documents its foreach functions
    """
    import torch

    tensors = [torch.ones(4), torch.ones(9)]
    assert [norm.item() for norm in torch._foreach_norm(tensors)] == [2.0, 3.0]
    torch._foreach_mul_(tensors, torch.tensor(0.5))
    assert [tensor.sum().item() for tensor in tensors] == [2.0, 4.5]


@row("torch.optim.Adam._init_group")
def _() -> None:
    """`engine/optimizer.py` overrides it in Adam and AdamW, so that the optimizer step computes with
    plain shards instead of DTensors.

    If it changes: silent: steps take longer

    Until: DTensor's dispatch is fast enough for elementwise optimizers
    """
    import torch

    from rl_actors.engine import optimizer

    lists = ["params_with_grad", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"]
    for theirs in (torch.optim.Adam, torch.optim.AdamW):
        assert parameters(theirs._init_group) == ["self", "group", *lists]
    called = []
    for ours in (optimizer.Adam, optimizer.AdamW):
        recording = type("Recording", (ours,), {"_init_group": lambda self, *given: called.append(given) or False})
        recording([torch.nn.Parameter(torch.ones(1))]).step()
    assert [len(given) for given in called] == [7, 7]


@row("torch.distributed._functional_collectives")
def _() -> None:
    """`engine/context_parallel.py`, `engine/vocab_parallel.py`: `all_gather_single`, `all_reduce` and
    `wait_tensor` return new tensors, and `all_gather_single` takes any dimension. `engine/moe.py`
    makes the experts wait if the local part of their input is an `AsyncCollectiveTensor`, because
    its all-gather may still run.

    If it changes: loud

    Until: torch has a public name for functional collectives
    """
    import torch
    import torch.distributed._functional_collectives as funcol

    assert parameters(funcol.all_gather_single)[:3] == ["self", "gather_dim", "group"]
    assert parameters(funcol.all_reduce)[:3] == ["self", "reduceOp", "group"]
    group = mesh().get_group()
    reduced = funcol.all_reduce(torch.ones(2), reduceOp="max", group=group)
    assert isinstance(reduced, funcol.AsyncCollectiveTensor)
    gathered = funcol.all_gather_single(torch.ones(2, 3), gather_dim=1, group=group)
    assert funcol.wait_tensor(gathered).shape == (2, 3)


@row("torch.distributed.tensor._utils.compute_local_shape_and_global_offset")
def _() -> None:
    """`transports/base.py`, `engine/initial_weights.py`: the offset of a rank's shard in the whole
    tensor.

    If it changes: loud

    Until: torch has a public name for it
    """
    import torch
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(torch.Size((4, 6)), mesh(), [Shard(0)])
    assert (tuple(shape), tuple(offset)) == ((4, 6), (0, 0))


@row("torch.distributed.tensor.experimental._context_parallel._attention._compiled_create_block_mask")
def _() -> None:
    """`engine/cpu.py` replaces it by the function that is not compiled, because torch would compile
    its function again at every new shape. `engine/gpu.py` replaces it by torchtitan's function of
    this name, because torch's function fails at the ninth shape.

    If it changes: silent: slow on a CPU; on a GPU the ninth shape raises

    Until: torch lets the caller choose how a mask is made
    """
    import torch.distributed.tensor.experimental._context_parallel._attention as attention

    assert "_compiled_create_block_mask" in vars(attention)
    assert "if _compiled_create_block_mask is None" in source(attention._create_cp_block_mask)


@row("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper")
def _() -> None:
    """`engine/recomputation.py`: our policy, which keeps all matrix products, wraps a block with it,
    as torchtitan's own policies do.

    If it changes: loud

    Until: torchtitan has a policy that keeps all matrix products
    """
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    entered = []

    def contexts() -> Any:
        entered.append(True)
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    wrapped = checkpoint_wrapper(torch.nn.Linear(2, 2), context_fn=contexts, early_stop=False)
    wrapped(torch.ones(1, 2)).sum().backward()
    assert entered == [True]


@row("torch.nn.attention._fa4.register_flash_attention_fa4")
def _() -> None:
    """`engine/flash4.py` registers itself as torch's FlashAttention 4. torch looks up
    `_flash_attn_fwd` and `_flash_attn_bwd` in `engine/flash4.py` and expects two results from
    `_flash_attn_fwd`. The function `flash_attn.cute.interface._flash_attn_fwd` of the
    FlashAttention package returns five results, so our function calls it and drops three of them.

    If it changes: loud; `tests/gpu`

    Until: torch takes the five results of the package
    """
    import torch.nn.attention
    from torch.nn.attention import _fa4

    from rl_actors.engine import flash4

    for name in ("activate_flash_attention_impl", "current_flash_attention_impl", "register_flash_attention_impl"):
        assert callable(getattr(torch.nn.attention, name))
    assert parameters(_fa4.register_flash_attention_fa4) == ["module_path"]
    assert _fa4._fa4_import_module.__wrapped__(flash4.__name__) is flash4
    assert "out, lse = module._flash_attn_fwd(" in source(_fa4._fa4_run_forward)
    assert "dq, dk, dv = module._flash_attn_bwd(" in source(_fa4._fa4_run_backward)
    assert f"not in {flash4.CAPABILITIES}" in source(_fa4._fa4_common_support_error)


def one_stage(**fields: Any) -> tuple[Any, Any]:
    """A pipeline of one stage, as (stage, schedule). The stage computes y = w x, w = 2. The schedule has 2 microbatches and the loss y.sum()."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh()
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(module.weight, 2.0)
    like = torch.empty(1, 1, device="meta")
    stage = PipelineStage(module, 0, 1, torch.device("cpu"), input_args=like, output_args=like, **fields)
    return stage, Schedule1F1B(stage, n_microbatches=2, loss_fn=lambda y, _: y.sum(), scale_grads=False)


def run(schedule: Any) -> None:
    import torch

    schedule._step_microbatches(
        arg_mbs=[(torch.ones(1, 1),), (torch.ones(1, 1),)],
        kwarg_mbs=[{}, {}],
        target_mbs=[torch.tensor(0), torch.tensor(1)],
        return_outputs=False,
    )


@row("torch.distributed.pipelining.schedules._PipelineSchedule._step_microbatches")
def _() -> None:
    """`engine/pipeline.py` calls it, because our code has already made the microbatches, each with
    masks of its own. The public `step` would cut one tensor along its first dimension.

    If it changes: loud

    Until: `step` takes a list of microbatches
    """
    from torch.distributed.pipelining import schedules

    expected = ["self", "arg_mbs", "kwarg_mbs", "target_mbs", "losses", "return_outputs", "loss_kwargs"]
    for name in ("1F1B", "Interleaved1F1B"):
        assert parameters(schedules.get_schedule_class(name)._step_microbatches) == expected
    stage, schedule = one_stage()
    stage.has_backward = True
    run(schedule)
    assert stage.submod.weight.grad.item() == 2.0


@row("torch.distributed.pipelining.schedules._PipelineSchedule._has_backward, PipelineStage.has_backward")
def _() -> None:
    """`engine/pipeline.py` sets both, to say whether a call computes gradients. torch's public methods
    `eval` and `step` set both in the same way.

    If it changes: silent: a call without a backward pass adds gradients, or a call with a backward
    pass adds none; `tests/engine/test_pipeline.py`

    Until: `_step_microbatches` sets them itself
    """
    import torch

    stage, schedule = one_stage()
    assert schedule._has_backward is True
    assert isinstance(inspect.getattr_static(stage, "has_backward"), property)
    schedule._has_backward = stage.has_backward = False
    with torch.no_grad():
        run(schedule)
    assert stage.submod.weight.grad is None


@row("torch.distributed.pipelining.schedules.PipelineScheduleSingle._stage, PipelineScheduleMulti._stages")
def _() -> None:
    """`engine/pipeline_stages.py` takes the stages out of the schedule that torchtitan's
    `pipeline_llm` builds.

    If it changes: loud

    Until: `pipeline_llm` returns its stages
    """
    from torch.distributed.pipelining.schedules import (
        PipelineScheduleMulti,
        PipelineScheduleSingle,
        ScheduleInterleaved1F1B,
        get_schedule_class,
    )

    stage, schedule = one_stage()
    assert isinstance(schedule, PipelineScheduleSingle) and schedule._stage is stage
    interleaved = ScheduleInterleaved1F1B([stage], n_microbatches=1, loss_fn=lambda *_: None)
    assert isinstance(interleaved, PipelineScheduleMulti) and interleaved._stages == [stage]
    assert not issubclass(get_schedule_class("Interleaved1F1B"), PipelineScheduleSingle)


@row("torch.distributed.pipelining.PipelineStage._post_metadata_inference_cleanup")
def _() -> None:
    """`engine/pipeline_stages.py` overrides it to do nothing, because torch's method drops the
    gradients that earlier calls of the step accumulated under FSDP.

    If it changes: silent: gradients of earlier calls are lost; `tests/engine/test_pipeline.py`
    (slow)

    Until: torch drops only the gradients of its own metadata inference
    """
    import torch
    from torch.distributed.fsdp import fully_shard

    from rl_actors.engine.pipeline_stages import Stage

    stage, schedule = one_stage()
    fully_shard(stage.submod, mesh=mesh())
    stage.has_backward = True
    stage.submod(torch.ones(1, 1)).sum().backward()  # gradients of an earlier call
    stage._post_metadata_inference_cleanup()
    assert stage.submod.weight.grad is None, "torch now keeps accumulated gradients, so delete our override"
    stage.submod(torch.ones(1, 1)).sum().backward()
    Stage._post_metadata_inference_cleanup(stage)
    assert stage.submod.weight.grad is not None
    assert "stage._post_metadata_inference_cleanup()" in source(type(schedule)._initialize_pp_stages)


@row(
    "torch.distributed.pipelining.PipelineStage._setup_forward_recv_info, _setup_backward_recv_info, get_fwd_recv_ops, "
    "get_bwd_recv_ops, backward_one_chunk, args_recv_info, grad_recv_info, fwd_cache"
)
def _() -> None:
    """`engine/pipeline_stages.py` allocates a receive buffer just before a microbatch arrives. After
    the backward pass of the microbatch it frees the buffer and the graph of the microbatch's loss.
    torch allocates the buffers of all microbatches in the first call of a schedule, and keeps these
    buffers for later calls. torch keeps the graphs of all losses until the end of a call.

    If it changes: silent: memory grows with the microbatches of a call;
    `tests/engine/test_pipeline.py` counts the buffers and the graphs

    Until: torch frees both after the backward pass of a microbatch
    """
    import torch
    from torch.distributed.pipelining import PipelineStage

    assert parameters(PipelineStage.get_fwd_recv_ops) == ["self", "fwd_chunk_id"]
    assert parameters(PipelineStage.get_bwd_recv_ops) == ["self", "bwd_chunk_id"]
    assert parameters(PipelineStage.backward_one_chunk)[:3] == ["self", "bwd_chunk_id", "loss"]
    assert "loss.detach" not in source(PipelineStage.backward_one_chunk), (
        "torch now frees the loss's graph, so delete our override"
    )
    like = torch.empty(1, 1, device="meta").requires_grad_()
    shapes = dict.fromkeys(("input_args", "output_args"), like) | dict.fromkeys(
        ("input_grads", "output_grads"), like.detach()
    )
    mesh()
    stage = PipelineStage(torch.nn.Linear(1, 1), 1, 3, torch.device("cpu"), **shapes)
    stage._stage_meta.inputs, stage._stage_meta.outputs = stage._user_meta.inputs, stage._user_meta.outputs
    stage._stage_meta.output_grads = stage._user_meta.output_grads
    stage._setup_forward_recv_info(2, True)
    stage._setup_forward_send_info()
    stage._setup_backward_recv_info(2)
    for received in (stage.args_recv_info, stage.grad_recv_info):
        assert [len(received[number]) for number in range(2)] == [1, 1]
        assert not received[1][0].buffer.is_meta, (
            "torch now allocates a buffer only when it is needed, so delete our overrides"
        )
    operations = [*stage.get_fwd_recv_ops(0), *stage._get_recv_ops(stage.grad_recv_info[0])]
    assert [
        operation.tensor is received[0][0].buffer
        for operation, received in zip(operations, (stage.args_recv_info, stage.grad_recv_info), strict=True)
    ] == [True, True]
    assert "self.fwd_cache.pop(bwd_chunk_id)" in source(PipelineStage.backward_one_chunk)


@row("torch.distributed.checkpoint.FileSystemWriter.prepare_global_plan, finish, path")
def _() -> None:
    """`engine/checkpoint.py` overrides the two methods, which are public. Our writer writes into a
    directory next to the target and then renames this directory. Our writer relies on two facts.
    torch calls both methods only on the first rank. torch calls `prepare_global_plan` before any
    rank writes, and `finish` after all ranks have written.

    If it changes: silent: a directory may be half a checkpoint; `tests/engine/test_checkpoint.py`

    Until: DCP replaces a directory atomically
    """
    from torch.distributed.checkpoint import FileSystemWriter

    assert parameters(FileSystemWriter.prepare_global_plan) == ["self", "plans"]
    assert parameters(FileSystemWriter.finish) == ["self", "metadata", "results"]
    assert FileSystemWriter("somewhere").path == Path("somewhere")


@row("torch._inductor.config.emulate_precision_casts")
def _() -> None:
    """`engine/gpu.py` turns it off while the logprobs are compiled, because torchtitan's rowwise
    float8 turns it on for the whole process.

    If it changes: loud

    Until: torchtitan sets it for its own functions only
    """
    import torch._inductor

    assert "emulate_precision_casts" in torch._inductor.list_options()


@row("torch.distributed.ProcessGroupGloo._Options, _devices, _timeout")
def _() -> None:
    """`transports/communicator.py` makes a process group of two members from a store. The group uses
    the address at which the two members have met, and it has its own timeout. The public
    constructor would use the address to which the host's name resolves.

    If it changes: loud

    Until: torch takes the device as an argument
    """
    from datetime import timedelta

    from torch.distributed import HashStore, ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=TIMEOUT)
    group = ProcessGroupGloo(HashStore(), 0, 1, options)
    assert group.size() == 1 and options._timeout == timedelta(seconds=TIMEOUT)


@row("TORCH_NCCL_BLOCKING_WAIT, torch.distributed.ProcessGroupNCCL.Options.config.blocking")
def _() -> None:
    """`transports/communicator.py` sets the variable while it makes a group of its own. The `wait` of
    the group then ends at a timeout, and the group has no watchdog. A watchdog would end the
    trainer's process when a generator has died. `blocking` is off, so that a call of the group can
    be aborted. NCCL was tested only between two GPUs of one host.

    If it changes: silent: a dead generator ends the trainer; `tests/gpu/test_weights.py` fails

    Until: torch has an option for it
    """
    import torch.distributed

    # torch's build for CPUs has no NCCL library, but it has this header, which names the variable.
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    text = header.read_text()
    assert (
        '"TORCH_NCCL_BLOCKING_WAIT"' in text
        and "// operations. This is only used when blockingWait_ is enabled." in text
    )
    if torch.distributed.is_nccl_available():
        torch.distributed.ProcessGroupNCCL.Options().config.blocking = 0


@row("NCCL_P2P_DISABLE, NCCL_SHM_DISABLE")
def _() -> None:
    """`benchmarks/weight_sync.py --network` sets both variables of NCCL, so that two GPUs of one host
    exchange bytes in the same way as two GPUs of different hosts. The check needs a torch with
    NCCL.

    If it changes: silent: the benchmark measures another path of the bytes

    Until: the benchmark runs on two hosts
    """
    import torch.distributed

    if not torch.distributed.is_nccl_available():
        return
    library = Path(torch.__file__).parents[1] / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    content = library.read_bytes()
    # NCCL puts "NCCL_" in front of the names of its parameters.
    assert b"P2P_DISABLE" in content and b"SHM_DISABLE" in content


@row("TORCHELASTIC_USE_AGENT_STORE")
def _() -> None:
    """`processes/spawn.py` sets it for the ranks. The process that spawns the ranks has already bound
    the port of their store. The variable makes every rank a client of this store, also rank 0.

    If it changes: loud: rank 0 finds the port taken

    Until: torch lets rank 0 be a client by an argument
    """
    # The attribute torch.distributed.rendezvous is a function. import_module returns the module of the same name.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    assert rendezvous._torchelastic_use_agent_store()
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    assert not rendezvous._torchelastic_use_agent_store()


@row("TORCH_COMPILE_DISABLE")
def _() -> None:
    """`vllm/cpu.py` sets it, because vLLM's helper kernels would be compiled at their first use, which
    takes twelve seconds. The variable applies to the whole process of the generator.

    If it changes: silent: slow start

    Until: vLLM has an option for it
    """
    import torch._dynamo.config

    assert 'disable = os.environ.get("TORCH_COMPILE_DISABLE", "0") == "1"' in source(torch._dynamo.config)


@row("TORCHINDUCTOR_COMPILE_THREADS")
def _() -> None:
    """`benchmarks/harness/ranks.py` and `tests/drills/determinism.py` limit the threads of each
    process, because several processes share the cores while they compile.

    If it changes: silent: compiling takes longer

    Until: no benchmark compiles in several processes at once
    """
    import torch._inductor.config

    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "3"
    assert torch._inductor.config.decide_compile_threads() == 3


section("torchtitan")


@row("torchtitan.tools.utils.device_type, device_module")
def _() -> None:
    """`engine/cpu.py` sets both, because torchtitan takes "cuda" if it finds no accelerator.
    `engine/cpu.py` sets them before it imports any other module of torchtitan, because those
    modules copy the values.

    If it changes: loud: every test of the engine fails

    Until: torchtitan supports a CPU
    """
    import torch
    import torchtitan.distributed.utils as copies
    import torchtitan.tools.utils as originals

    import rl_actors.engine  # sets both names before torchtitan's other modules copy their values

    assert rl_actors.engine
    expected = ("cuda", torch.cuda) if torch.cuda.is_available() else ("cpu", torch.cpu)
    assert (originals.device_type, originals.device_module) == expected
    assert (copies.device_type, copies.device_module) == expected


@row("torchtitan.models.common.attention._compiled_create_block_mask")
def _() -> None:
    """`engine/cpu.py` replaces it and `engine/gpu.py` reads it, for the reasons given above for
    torch's function of this name.

    If it changes: silent: slow on a CPU; loud on a GPU

    Until: as above
    """
    import torchtitan.models.common.attention as attention

    assert "_compiled_create_block_mask" in vars(attention)
    assert "_compiled_create_block_mask(" in source(attention.create_attention_mask)


@row("torchtitan.models.common.attention.FlexAttention._compiled_flex_attn, inductor_configs")
def _() -> None:
    """`engine/gpu.py` turns autotuning off, because it takes minutes at every new shape.

    If it changes: silent: minutes of autotuning

    Until: torchtitan has an option for it
    """
    from torchtitan.models.common.attention import FlexAttention

    assert {"max_autotune", "coordinate_descent_tuning"} <= set(FlexAttention.inductor_configs)
    assert "_compiled_flex_attn" in vars(FlexAttention)
    assert "FlexAttention._compiled_flex_attn(" in source(FlexAttention.compiled_flex_attn)


@row("torchtitan.models.common.attention.FlexAttention.forward")
def _() -> None:
    """`engine/cpu.py` overrides it with scaled dot-product attention with a dense mask, because flex
    attention has no backward pass on a CPU. Our function relies on the names of the arguments.

    If it changes: loud for the names; silent if a new argument changes the result;
    `tests/engine/test_train_engine.py`

    Until: flex attention has a backward pass on a CPU
    """
    from torchtitan.models.common.attention import FlexAttention

    from rl_actors.engine.cpu import DenseAttention

    theirs, ours = parameters(FlexAttention.forward), parameters(DenseAttention.forward)
    assert theirs[:4] == ours[:4] == ["self", "q_BLNH", "k_BLNH", "v_BLNH"]
    assert {"attention_masks", "scale", "enable_gqa"} <= set(theirs)


@row("torchtitan.models.common.attention.VarlenAttention.__init__")
def _() -> None:
    """`engine/flash4.py` skips this constructor, because it activates FlashAttention 3 on a Hopper
    GPU. Our constructor sets `window_size` itself. This is enough as long as `forward` reads no
    other attribute.

    If it changes: loud; `tests/gpu`

    Until: torchtitan lets the kernel be chosen
    """
    from torchtitan.models.common.attention import VarlenAttention

    assert set(re.findall(r"self\.(\w+)", source(VarlenAttention.forward))) == {"window_size"}
    assert set(re.findall(r"self\.(\w+)", source(VarlenAttention.__init__))) == {"window_size"}
    assert "window_size" in VarlenAttention.Config.__dataclass_fields__


@row("torchtitan.components.optimizer.OptimizersContainer._resolve_optimizer_factory")
def _() -> None:
    """`engine/optimizer.py` overrides it. Our function finds an optimizer by its import path, and
    takes our own classes for the names Adam and AdamW.

    If it changes: loud for a path; silent for Adam: slower steps

    Until: torchtitan takes classes
    """
    import torch
    from torchtitan.components.optimizer import OptimizersContainer

    assert parameters(OptimizersContainer._resolve_optimizer_factory) == ["name"]
    assert OptimizersContainer._resolve_optimizer_factory("AdamW") is torch.optim.AdamW
    assert "self._resolve_optimizer_factory(" in source(OptimizersContainer.__init__)


@row("torchtitan.components.optimizer.OptimizersContainer._build_impl_kwargs")
def _() -> None:
    """`engine/optimizer.py` overrides it, so that an optimizer by import path does not get the
    arguments `fused` and `foreach`.

    If it changes: loud: such optimizers refuse the arguments

    Until: torchtitan passes what a class takes
    """
    from torchtitan.components.optimizer import OptimizersContainer

    config = SimpleNamespace(implementation="foreach")
    assert OptimizersContainer._build_impl_kwargs(config) == {"fused": False, "foreach": True}
    assert "self._build_impl_kwargs(config)" in source(OptimizersContainer.__init__)


@row("torchtitan.components.optimizer.OptimizersContainer._build_param_groups")
def _() -> None:
    """`engine/optimizer.py` calls it with the model's own parameter names. torchtitan would match the
    patterns of the config against names that have one more segment, which activation checkpointing
    adds.

    If it changes: silent: multipliers of a pattern are lost under activation checkpointing;
    `tests/engine/test_optimizer.py`

    Until: torchtitan searches canonical names
    """
    import torch
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    parameter = torch.nn.Parameter(torch.ones(1))
    renamed: Any = SimpleNamespace(named_parameters=lambda: [("given.name", parameter)])
    config = ParamGroupConfig(pattern="given", optimizer_name="AdamW")
    groups, _ = OptimizersContainer._build_param_groups(renamed, [config], {})
    (group,) = groups["AdamW"]
    assert group["params"] == [parameter] and group["param_names"] == ["given.name"]
    assert "self._build_param_groups(" in source(OptimizersContainer.__init__)


@row("torchtitan.distributed.activation_checkpoint.SelectiveAC._wrap_block, get_save_ops")
def _() -> None:
    """`engine/recomputation.py` overrides `_wrap_block` and calls `get_save_ops`, for an activation
    checkpointing policy that keeps the result of every matrix product.

    If it changes: silent: more is recomputed

    Until: torchtitan has such a policy
    """
    import torch
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    assert parameters(vars(SelectiveAC)["_wrap_block"]) == ["self", "module", "base_fqn"]
    assert "self._wrap_block(" in source(SelectiveAC.apply)
    assert torch.ops.aten.linear.default in set(SelectiveAC.Config().build().get_save_ops())


@row("torchtitan.models.common.moe.GroupedExperts.forward, _grouped_mm")
def _() -> None:
    """`engine/moe.py` replaces the whole `forward`, because torchtitan casts to bfloat16 whatever the
    compute dtype is.

    If it changes: silent if torchtitan's `forward` computes something new: wrong numbers; the check
    compares our `forward` with torchtitan's, and `tests/engine/test_moe.py` compares our training
    with transformers

    Until: torchtitan computes in the dtype of the input
    """
    import torch
    from torchtitan.models.common.moe import GroupedExperts

    from rl_actors.engine.moe import Experts

    theirs = GroupedExperts(GroupedExperts.Config(dim=16, hidden_dim=16, num_experts=2))
    ours = Experts(Experts.Config(dim=16, hidden_dim=16, num_experts=2))
    draw = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, generator=draw)
    ours.load_state_dict(theirs.state_dict())
    x_RD, counts_E = torch.randn(8, 16, generator=draw), torch.tensor([3, 5])
    with torch.no_grad():
        assert torch.equal(ours(x_RD.bfloat16(), counts_E), theirs(x_RD.bfloat16(), counts_E))
        exact = torch.cat([expert(theirs, e, x) for e, x in enumerate(x_RD.split([3, 5]))])
        assert torch.allclose(ours(x_RD, counts_E), exact, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(theirs(x_RD, counts_E), exact, rtol=1e-5, atol=1e-5), (
            "torchtitan now computes in the dtype of the input, so delete Experts"
        )


def expert(experts: Any, number: int, x_RD: Any) -> Any:
    """The output of one of torchtitan's experts, computed in the dtype of its weights."""
    import torch.nn.functional as F

    gate_RF, up_RF = x_RD @ experts.w1_EFD[number].T, x_RD @ experts.w3_EFD[number].T
    return (F.silu(gate_RF) * up_RF) @ experts.w2_EDF[number].T


@row("torchtitan.models.common.moe.MoE.router, routed_experts, tokens_per_expert_E")
def _() -> None:
    """`engine/moe.py` has two hooks. One hook subtracts the padding from the counters, and for this it
    reads the expert ids from the router's second output. The other hook makes the experts wait for
    the all-gather of their input, because torch's `local_map` drops the gradient of an input that
    is still being gathered.

    If it changes: loud for the names; silent for the order of the outputs

    Until: `local_map` keeps the gradient (a test in `tests/engine/test_layout_refusals.py` then
    fails), and torchtitan can leave positions out of the counters
    """
    import torch

    model = tiny().build()
    block = model.layers["1"]
    assert block.moe_enabled
    for parameter in block.moe.parameters():
        torch.nn.init.normal_(parameter)
    seen: dict[str, Any] = {}
    block.moe.router.register_forward_hook(lambda _, __, output: seen.update(ids=output[1]))
    block.moe.routed_experts.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    x_BLD = torch.randn(2, 3, 32)
    with torch.no_grad():
        block.moe.train()(x_BLD)
        counts_E = block.moe.tokens_per_expert_E.clone()
        block.moe.eval()(x_BLD)
    assert torch.equal(seen["x"], x_BLD) and seen["ids"].shape == (2, 3, 2)
    assert torch.equal(counts_E, torch.bincount(seen["ids"].flatten(), minlength=4).float())
    assert torch.equal(block.moe.tokens_per_expert_E, counts_E)  # counted in training mode only


@row("torchtitan.components.lora: lora_a, lora_b, _lora_scaling")
def _() -> None:
    """`engine/lora.py` reads the matrices and the scaling of an adapter from these attributes. It
    merges adapters for a push, and names them as peft does.

    If it changes: loud: when the model is built, the trained parameters are compared with the
    adapters that were found

    Until: torchtitan exports adapters
    """
    import torch

    from rl_actors.config import LoRAConfig
    from rl_actors.engine import lora

    config = LoRAConfig(rank=4, alpha=6.0, train_unembed=True)
    with torch.device("meta"):
        model = lora.convert(tiny(fuse_qkv=False), config).build()
    lora.require_found(model, config)
    assert model.lm_head._lora_scaling == 1.5
    assert (model.lm_head.lora_a.weight.shape, model.lm_head.lora_b.weight.shape) == ((4, 32), (32, 4))


@row("torchtitan.components.loss.ChunkedLossWrapper.loss_fn")
def _() -> None:
    """`engine/logprobs.py` makes a wrapper for each microbatch and sets its loss. The wrapper's config
    takes only the config of a loss, but our loss comes with the call.

    If it changes: loud

    Until: torchtitan takes the loss with the call
    """
    import torch
    from torchtitan.components.loss import ChunkedLossWrapper

    wrapper = ChunkedLossWrapper(ChunkedLossWrapper.Config(num_chunks=2))
    assert "loss_fn" in vars(wrapper)
    calls = []

    def loss(logits_BLV: torch.Tensor, targets_BL: torch.Tensor, _: Any, *, column: torch.Tensor) -> Any:
        calls.append((tuple(logits_BLV.shape), tuple(targets_BL.shape), column.tolist()))
        return logits_BLV.sum(), {}

    wrapper.loss_fn = loss
    wrapper.set_lm_head(torch.nn.Linear(3, 5))
    hidden_BLD = torch.ones(1, 4, 3, requires_grad=True)
    total, _ = wrapper(hidden_BLD, torch.zeros(1, 4), column=torch.arange(4)[None])
    assert calls == [((1, 2, 5), (1, 2), [[0, 1]]), ((1, 2, 5), (1, 2), [[2, 3]])]
    assert wrapper.lm_head.weight.grad is not None and hidden_BLD.grad is None
    total.backward()
    assert hidden_BLD.grad is not None


@row("torchtitan.models.common.decoder.Decoder._skip_lm_head")
def _() -> None:
    """`engine/logprobs.py` and `benchmarks/titan.py` set it, as torchtitan's trainer does, because the
    head is applied in chunks.

    If it changes: loud: the hidden states have the wrong width

    Until: torchtitan has an option for it
    """
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.models.qwen3 import Qwen3Model

    assert Qwen3Model._skip_lm_head is False
    assert Qwen3Model.forward is Decoder.forward and "if self._skip_lm_head:" in source(Decoder.forward)


@row("torchtitan.models.qwen3: _build_qwen3_layers, _build_qwen3_moe_layers, _qwen3_norm, three _INIT")
def _() -> None:
    """`engine/build.py` builds a model of any size with the functions and the `_LINEAR_INIT`,
    `_EMBEDDING_INIT`, `_EMBEDDING_SKIP_INIT` that torchtitan's own flavors use.

    If it changes: loud

    Until: torchtitan builds a model from a config.json
    """
    import torchtitan.models.qwen3 as qwen3

    same = {"n_layers", "dim", "n_heads", "n_kv_heads", "head_dim", "fuse_qkv", "attn_backend", "rope"}
    assert set(parameters(qwen3._build_qwen3_layers)) == same | {"hidden_dim"}
    experts = {"moe_hidden_dim", "num_experts", "top_k", "moe_comm_backend", "non_blocking_capacity_factor"}
    assert set(parameters(qwen3._build_qwen3_moe_layers)) == same | experts
    assert qwen3._qwen3_norm(8).normalized_shape == 8
    for init in (qwen3._LINEAR_INIT, qwen3._EMBEDDING_INIT, qwen3._EMBEDDING_SKIP_INIT):
        assert callable(init["weight"])


@row("torchtitan.protocols.module.Module._param_init, the order of init_weights")
def _() -> None:
    """`engine/initial_weights.py` takes the initialisers off the modules, so that `init_weights` fills
    only buffers. `engine/initial_weights.py` then calls the initialisers, with whole parameters on
    the CPU, in the order in which torchtitan's `init_weights` would call them. torchtitan's own
    `init_weights` would draw different weights in each layout, and on a CPU it would draw the same
    numbers for all shards of a parameter.

    If it changes: loud for the name; silent for the order: a trainer of one process then starts
    from other weights than torchtitan draws; `tests/engine/test_initial_weights.py` and the check
    compare our weights with torchtitan's

    Until: torchtitan draws the same weights in every layout, also on a CPU
    """
    import torch

    from rl_actors.engine.initial_weights import draw, take_initialisers

    models = []
    for _ in range(2):
        with torch.device("meta"):
            models.append(tiny().build())
    theirs, ours = models
    initialisers = take_initialisers(ours)
    for model in models:
        model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.fill_(7.0)
        ours.init_weights()
        assert all((parameter == 7.0).all() for parameter in ours.parameters())
        draw(initialisers, ours, seed=3)
        torch.manual_seed(3)
        theirs.init_weights()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), name


@row("torchtitan.models.qwen3: fields of built layer configs")
def _() -> None:
    """`engine/build.py` sets `moe.load_balance_coeff`, `moe.router.route_norm`,
    `moe.routed_experts.inner_experts`, `attention.inner_attention`, `attention.rope`,
    `attention.qk_norm` and the norms.

    If it changes: loud: the configs have `__slots__`, so setting an unknown field raises

    Until: the builders take these fields
    """
    layer = tiny(load_balance_coeff=0.5).layers[0]
    for config, name in (
        (layer.moe, "load_balance_coeff"),
        (layer.moe.router, "route_norm"),
        (layer.moe.routed_experts, "inner_experts"),
        (layer.attention, "inner_attention"),
        (layer.attention, "rope"),
        (layer.attention, "qk_norm"),
        (layer, "attention_norm"),
        (layer, "ffn_norm"),
        (layer.attention.rope, "max_seq_len"),
    ):
        assert name in config.__dataclass_fields__
    with pytest.raises(AttributeError):
        layer.moe.router.renamed = True  # the configs have slots, so they refuse a renamed field


@row("torchtitan.models.common.ComplexRoPE._precompute_cache")
def _() -> None:
    """`engine/rope.py` takes Llama 3's scaled angles from it. torchtitan has them only for heads whose
    neighbouring values form pairs. In Hugging Face's layout a pair has one value from each half of
    a head, so `engine/rope.py` arranges the angles for this layout.

    If it changes: loud for the name; silent if it gives the angles in another layout: then numbers
    are wrong; `tests/engine/test_hf.py` compares with transformers

    Until: CosSinRoPE takes Llama's scaling
    """
    import torch
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE

    values = {"dim": 8, "max_seq_len": 5}
    rotations = ComplexRoPE._precompute_cache(SimpleNamespace(config=ComplexRoPE.Config(**values)))
    cosines_and_sines = CosSinRoPE.Config(**values).build().cache
    assert torch.allclose(rotations.real, cosines_and_sines[:, :4], atol=1e-6)
    assert torch.allclose(rotations.imag, cosines_and_sines[:, 8:12], atol=1e-6)
    try:
        CosSinRoPE.Config(**values, scaling="llama").build()
    except NotImplementedError:
        return
    raise AssertionError("CosSinRoPE now has Llama's scaling, so delete Llama3RoPE")


@row("torchtitan.models.qwen3.Qwen3StateDictAdapter.model_config, rows of wqkv")
def _() -> None:
    """`engine/hf_names.py` splits the fused query, key and value as torchtitan's own state dict does,
    but without gathering them on every rank.

    If it changes: silent: weights in the wrong rows; the check compares our split with
    torchtitan's, and `tests/engine/test_hf.py` compares logprobs with transformers

    Until: torchtitan splits shards without gathering
    """
    import torch
    from torchtitan.models.qwen3 import Qwen3StateDictAdapter

    from rl_actors.engine.hf_names import split_qkv

    adapter = Qwen3StateDictAdapter(tiny(), None)
    attention = tiny().build().layers["0"].attention
    torch.nn.init.normal_(attention.qkv_linear.wqkv.weight)
    theirs = attention.qkv_linear.state_dict()
    ours = split_qkv(adapter, "wqkv.weight", attention.qkv_linear.wqkv.weight)
    assert len(theirs) == 3 and theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)


@row("torchtitan.components.quantization.float8.Float8LinearConverter.torchao_config")
def _() -> None:
    """`engine/build.py` replaces it, because torchtitan knows only two of torchao's three recipes, and
    its emulation always has one scale for each tensor.

    If it changes: silent: the model computes with another recipe

    Until: torchtitan takes every recipe and emulates it
    """
    from torchtitan.components.quantization.float8 import Float8LinearConverter

    converter = Float8LinearConverter.Config(recipe_name="rowwise", emulate=True).build()
    assert converter.torchao_config.emulate
    assert "self.torchao_config" in source(Float8LinearConverter.convert)
    emulated = converter.torchao_config.cast_config_weight.scaling_granularity
    assert emulated.name == "TENSORWISE", "torchtitan now emulates the requested recipe, so delete our replacement"


section("torchstore and Monarch")


@row("torchstore.api.Controller")
def _() -> None:
    """`transports/torchstore.py` replaces it by a class whose endpoints are all asynchronous, because
    Monarch 0.7 refuses torchstore 0.1.2's mixture of synchronous and asynchronous endpoints.

    If it changes: loud: Monarch refuses the actor

    Until: a torchstore later than 0.1.2 is on PyPI
    """
    import torchstore.api
    import torchstore.controller
    from monarch._src.actor.endpoint import EndpointProperty

    assert "get_or_spawn_controller(store_name, Controller)" in source(torchstore.api._controller)
    theirs = torchstore.controller.Controller

    def kinds(controller: type) -> set[bool]:
        found = {name: getattr(controller, name) for name in dir(theirs)}
        endpoints = [value for value in found.values() if isinstance(value, EndpointProperty)]
        return {inspect.iscoroutinefunction(value._method) for value in endpoints}

    importlib.import_module("rl_actors.transports.torchstore")
    assert kinds(theirs) == {True, False}, (
        "torchstore's endpoints are now all sync or all async, so delete AsyncController"
    )
    assert torchstore.api.Controller is not theirs and kinds(torchstore.api.Controller) == {True}


@row("monarch._src.actor.endpoint.EndpointProperty._method")
def _() -> None:
    """`transports/torchstore.py` finds with it the functions of the controller's synchronous
    endpoints, and makes asynchronous endpoints of these functions.

    If it changes: loud

    Until: as above
    """
    from monarch._src.actor.endpoint import EndpointProperty
    from monarch.actor import endpoint

    async def call(self: Any) -> None:
        pass

    made = endpoint(call)
    assert isinstance(made, EndpointProperty) and made._method is call


@row("monarch._rust_bindings.monarch_hyperactor.supervision.SupervisionError")
def _() -> None:
    """`clients/ranks.py` uses this class to tell the loss of a process from the failure of a call.

    If it changes: loud

    Until: Monarch exports it in `monarch.actor`
    """
    import monarch.actor
    from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

    assert issubclass(SupervisionError, RuntimeError) and not hasattr(monarch.actor, "SupervisionError")


@row("monarch.actor.unhandled_fault_hook")
def _() -> None:
    """`processes/spawn.py` replaces this hook at the first spawn, in the way that Monarch documents,
    unless the program has set a hook of its own. Monarch's default ends the whole program when an
    actor dies.

    If it changes: silent: a dead actor ends the program; `tests/monarch/test_lifecycle.py`

    Until: Monarch raises in the caller only
    """
    import monarch.actor
    from monarch._src.actor import actor_mesh

    assert parameters(monarch.actor.unhandled_fault_hook) == ["failure"]
    # actor_mesh imports the hook when a fault occurs, so it finds our hook.
    assert "from monarch.actor import unhandled_fault_hook" in source(actor_mesh)


def absent_from_monarchs_library(names: Iterable[str]) -> list[str]:
    """The `names` that Monarch's compiled library does not contain."""
    import mmap

    import monarch._rust_bindings

    with (
        open(monarch._rust_bindings.__file__, "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as library,
    ):
        return [name for name in names if library.find(name.encode()) < 0]


@row("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY")
def _() -> None:
    """`processes/spawn.py` sets it if the user did not, so that a dead process is noticed after about
    one second instead of nine.

    If it changes: silent: dead processes are noticed late

    Until: Monarch notices a dead process as soon by default
    """
    from rl_actors.processes.spawn import _SUPERVISION

    assert absent_from_monarchs_library(_SUPERVISION) == []


@row("HYPERACTOR_CODEC_MAX_FRAME_LENGTH")
def _() -> None:
    """`transports/torchstore.py` sets it to the value that torchstore sets when it is imported,
    because torchstore then also prints a warning and configures logging.

    If it changes: silent: a line on the terminal

    Until: torchstore is silent
    """
    import rl_actors.transports.torchstore

    ours = re.search(
        r'setdefault\("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", ("\d+")\)', source(rl_actors.transports.torchstore)
    )
    assert ours is not None and ours[1] in source(importlib.import_module("torchstore"))


@row(
    "HYPERACTOR_TLS_CERT, HYPERACTOR_TLS_KEY, HYPERACTOR_TLS_CA; "
    "monarch._rust_bindings.monarch_hyperactor.config.reload_config_from_env"
)
def _() -> None:
    """`processes/tls.py` sets the variables, because Monarch 0.7 takes the paths of the certificates
    for mutual TLS only from these variables. Then `processes/tls.py` makes Monarch read the
    environment again, because Monarch reads the environment only when it is imported.

    If it changes: silent for the variables: clients of `tls://` addresses get no answer;
    `tests/monarch/test_service.py`

    Until: the arguments `private_key` and `ca` of Monarch work
    """
    from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env

    from rl_actors.processes.tls import MONARCH_VARIABLES

    assert callable(reload_config_from_env)
    assert absent_from_monarchs_library(MONARCH_VARIABLES) == []


@row("monarch._src.job.job.SSHJob")
def _() -> None:
    """`processes/jobs.py`: `monarch.job` has the other jobs, but not `SSHJob`. The constructor of each
    job, also of `SSHJob`, chooses the address at which Monarch will listen: the one to which this
    machine's name resolves. Monarch panics if that is a loopback address. So `processes/hosts.py`
    then replaces the address by that of the interface that leads to the workers.

    If it changes: loud for the name; silent if a later version of Monarch chooses the address after
    our code has set it: then Monarch listens on another interface;
    `tests/monarch/test_worker_hosts.py` (slow)

    Until: Monarch exports `SSHJob`, and takes the address as an argument
    """
    import monarch.job
    from monarch._src.job.job import LoginJob, SSHJob

    assert not hasattr(monarch.job, "SSHJob") and issubclass(SSHJob, LoginJob)
    assert parameters(SSHJob) == ["python_exe", "ssh_args", "monarch_port", "transport"]
    assert "enable_transport(transport)" in source(SSHJob.__init__)
    assert "transport" not in source(LoginJob._state)


@row("monarch._src.job.kubernetes.KubernetesJob._discover_monarch_port")
def _() -> None:
    """`processes/jobs.py` puts the port of a worker into the variable `MONARCH_PORT` of its pod, where
    Monarch looks for it.

    If it changes: silent: Monarch looks for the workers at port 26600; `tests/test_jobs.py`

    Until: Monarch takes the port from the mesh
    """
    from monarch._src.job.kubernetes import KubernetesJob

    from rl_actors.processes.jobs import PORT_VARIABLE

    assert f'== "{PORT_VARIABLE}"' in source(KubernetesJob._discover_monarch_port)


@row("monarch.actor.Actor._handle_undeliverable_message")
def _() -> None:
    """`service/door.py` overrides it and drops an answer whose client has ended. Monarch's method ends
    the actor.

    If it changes: silent: a client that is killed during a call ends the service;
    `tests/monarch/test_service.py`

    Until: Monarch has a public hook
    """
    from monarch.actor import Actor

    assert parameters(Actor._handle_undeliverable_message) == ["self", "message"]


section(
    "vLLM",
    """The *core* is vLLM's engine core, the part of vLLM that schedules requests and runs the model.
It runs in the process of the actor `Generator`, or in a process of its own.
A *reload* is a call of vLLM's `reload_weights`, which replaces all weights of a running engine.

The environment variables below are set in the process in which the actor `Generator` runs.
A program may spawn the actor without `GeneratorClient.spawn`, in a process that also does other work.
Then the variables apply to this work, too.""",
)


@row("vllm.platforms.current_platform.simple_compile_backend")
def _() -> None:
    """`vllm/cpu.py` sets it to "eager" on the class of the platform, because vLLM's helper kernels
    would be compiled at their first use, which takes twelve seconds.

    If it changes: silent: slow start

    Until: vLLM has an option for it
    """
    import vllm.v1.sample.ops.logprobs as compiled_when_imported
    from vllm.platforms.interface import Platform

    assert isinstance(Platform.simple_compile_backend, str)
    assert "@torch.compile(backend=current_platform.simple_compile_backend)" in source(compiled_when_imported)


@row("vllm Qwen3MoeForCausalLM.moe_layers, routed_experts.quant_method.moe_kernel")
def _() -> None:
    """`vllm/cpu.py` drops the expert kernels before a reload, so that the reload packs the weights
    again.

    If it changes: loud for the names; silent if a later vLLM packs weights also while a kernel
    exists, or not even without one: then numbers are wrong; `tests/monarch/test_expert_sync.py`

    Until: a reload on a CPU packs weights
    """
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    assert "self.moe_layers.append(layer.mlp.experts)" in source(Qwen3MoeForCausalLM.__init__)
    assert "return self.routed_experts.quant_method" in source(MoERunner)
    assert "self.moe_kernel: " in source(FusedMoEMethodBase.__init__)
    assert issubclass(UnquantizedFusedMoEMethod, FusedMoEMethodBase)
    assert "is_weight_update = self.moe_kernel is not None" in source(UnquantizedFusedMoEMethod)


@row("vllm lm_head.quant_method.process_weights_after_loading")
def _() -> None:
    """`vllm/cpu.py` packs a tied head again after a reload, because the reload leaves the old weights
    in the kernel of the head.

    If it changes: loud

    Until: as above
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    assert parameters(UnquantizedEmbeddingMethod.process_weights_after_loading) == ["self", "layer"]
    assert "self.quant_method" in source(VocabParallelEmbedding.__init__)


@row("vllm LLMEngine.set_weight_version, CompletionOutput.weight_versions")
def _() -> None:
    """`vllm/engine.py` sets the policy version as vLLM's version of the weights, and
    `vllm/requests.py` reads from `weight_versions` which version sampled each token.

    If it changes: loud

    Until: vLLM documents both
    """
    from vllm.outputs import CompletionOutput, WeightVersionSpan
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.llm_engine import LLMEngine

    assert parameters(LLMEngine.set_weight_version) == ["self", "weight_version"]
    assert "weight_versions" in parameters(CompletionOutput)
    assert {"version", "start", "end"} <= set(WeightVersionSpan.__annotations__)
    assert source(EngineCore.step).count("self._attach_weight_version(") == 1


@row("vllm LLMEngine.sleep(level=0, mode=keep), wake_up([scheduling])")
def _() -> None:
    """While the weights change, `vllm/core.py` pauses a core that runs in a process of its own.
    Otherwise tokens of a step that is under way would get the new version.

    If it changes: silent: tokens carry the wrong version; `tests/monarch/test_own_process.py`

    Until: `LLMEngine` has `pause_generation`, as `AsyncLLM` has
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.engine.llm_engine import LLMEngine

    assert {"level", "mode"} <= set(parameters(LLMEngine.sleep))
    assert "self.pause_scheduler(mode=mode" in source(EngineCore.sleep)
    assert "engine_idle_callback" in source(EngineCoreProc.pause_scheduler)


@row("vllm.inputs.engine.tokens_input(cache_salt)")
def _() -> None:
    """`vllm/engine.py` salts the prefix cache with the policy version, so that a request never finds
    keys and values of another version.

    If it changes: loud

    Until: vLLM documents the module
    """
    from vllm.inputs.engine import tokens_input

    salted = tokens_input([1, 2], cache_salt="7")
    assert salted == {"type": "token", "prompt_token_ids": [1, 2], "cache_salt": "7"}


@row(
    "vllm SyncMPClient.utility_results, outputs_queue, resources.engine_dead, resources.engine_manager.processes; "
    "multiprocessing.set_executable"
)
def _() -> None:
    """When the core's process ends, `vllm/core.py` raises an error in every call that waits for the
    core. vLLM's synchronous client would wait for ever for a core that was killed. If the core ends
    while it starts, our code recognizes this by the text of `wait_for_engine_startup`'s error. A
    core that is starting does not notice that its parent was killed. With `set_executable` the
    core's process first runs a program of ours, which makes Linux end the core when its parent
    ends.

    If it changes: loud for the names; silent: a call hangs, or a process is left over;
    `tests/monarch/test_own_process.py`

    Until: vLLM's client raises, and its core ends with its parent
    """
    from multiprocessing import popen_spawn_posix, util

    from vllm.v1.engine.core_client import BackgroundResources, SyncMPClient
    from vllm.v1.engine.utils import CoreEngineProcManager, wait_for_engine_startup

    made = source(SyncMPClient.__init__)
    assert "self.outputs_queue = queue.Queue" in made and "utility_results = self.utility_results" in made
    assert "raise self._format_exception(outputs)" in source(SyncMPClient.get_output)
    assert "self.utility_results[call_id] = future" in source(SyncMPClient.call_utility)
    assert "self.ensure_alive()" in source(SyncMPClient._send_input)
    # The next assertion fails when vLLM itself wakes the callers that wait for a killed engine core. Then delete wake_callers.
    assert "# shutdown signal, exit thread." in made and "outputs_queue.put_nowait(EngineDeadError" not in made
    assert {"engine_dead", "engine_manager"} <= set(BackgroundResources.__annotations__)
    assert "self.processes: list[BaseProcess]" in source(CoreEngineProcManager.__init__)
    # rl_actors/vllm/core.py recognizes by this text that a core was killed before it was ready.
    assert '"Failed core proc(s): {finished}"' in source(wait_for_engine_startup)
    assert "spawn.get_command_line" in source(popen_spawn_posix.Popen) and callable(util.spawnv_passfds)


@row("vllm LLMEngine.reset_prefix_cache(reset_running_requests)")
def _() -> None:
    """With `recompute_running`, `vllm/engine.py` drops all cached keys and values after a pull of
    weights, also those of running requests. vLLM then computes the keys and values of running
    requests again with the new weights.

    If it changes: loud

    Until: vLLM drops them when the weights change
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    assert "reset_running_requests" in parameters(LLMEngine.reset_prefix_cache)


@row(
    "vllm LLMEngine.collective_rpc(method, args), EngineArgs.worker_extension_cls, "
    "Worker.reload_weights(weights_iterator), Worker.get_model"
)
def _() -> None:
    """`vllm/weights.py` has a class whose methods vLLM adds to its workers, and `vllm/start.py` passes
    the name of this class. The methods replace the weights of a running engine, because a new
    engine takes seconds to start. `vllm/pull.py` calls the methods. If a worker does not answer,
    `vllm/pull.py` recognizes this by the text of vLLM's error.

    If it changes: loud

    Until: vLLM documents a call that replaces weights on a CPU and a GPU
    """
    from vllm import EngineArgs
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    from rl_actors.vllm.start import WORKER_EXTENSION
    from rl_actors.vllm.weights import WeightsExtension

    assert {"method", "timeout", "args"} <= set(parameters(LLMEngine.collective_rpc))
    assert 'TimeoutError(f"RPC call to {method} timed out.")' in source(MultiprocExecutor.collective_rpc)
    assert "method failed: {str(e)}" in source(EngineCoreProc)  # form in which a core process sends an error
    assert "worker_extension_cls" in parameters(EngineArgs)
    assert f"{WeightsExtension.__module__}.{WeightsExtension.__qualname__}" == WORKER_EXTENSION
    assert "self.model_runner.reload_weights(*args, **kwargs)" in source(Worker.reload_weights)
    assert "weights_iterator" in parameters(GPUModelRunner.reload_weights)
    assert parameters(Worker.get_model) == ["self"]


@row("VLLM_DIST_IDENT and /dev/shm/<ident>-…-cpushm_<rank> of vLLM's ranks on a CPU")
def _() -> None:
    """vLLM's ranks share memory through these files. `vllm/weights.py` removes the files when all
    ranks have opened them, because vLLM does not remove the files if its process is killed.

    If it changes: silent: 4 MB of shared memory for each rank stays after a run;
    `tests/monarch/test_own_process.py`

    Until: vLLM removes the files
    """
    from vllm.distributed.device_communicators import cpu_communicator
    from vllm.v1.worker import cpu_worker

    assert 'os.environ["VLLM_DIST_IDENT"] = (' in source(cpu_worker)
    assert 'f"{instance_identifier}-{shm_group_identifier}-cpushm"' in source(cpu_communicator)


@row("vllm.v1.kv_cache_interface.KVCacheConfig.needs_kv_cache_zeroing, EngineArgs.scheduler_cls")
def _() -> None:
    """`vllm/scheduler.py` sets the first to True, so that vLLM fills new blocks of the KV cache
    with zeros: attention on a CPU multiplies what earlier requests left in unused slots by 0, so a
    NaN there would reach other requests. With `scheduler_cls` a core in a process of its own
    imports `vllm/scheduler.py`, which does it there.

    If it changes: silent: one request with NaN keys or values spoils later requests;
    `tests/test_clean_blocks.py`

    Until: vLLM has an option for it, or its kernels do not read unused slots
    """
    from vllm import EngineArgs
    from vllm.config import SchedulerConfig
    from vllm.v1.core import kv_cache_coordinator
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker import cpu_model_runner, gpu_worker

    from rl_actors.vllm.core import SCHEDULER
    from rl_actors.vllm.scheduler import scheduler

    assert hasattr(KVCacheConfig, "needs_kv_cache_zeroing")
    assert "kv_cache_config.needs_kv_cache_zeroing" in source(Scheduler.__init__)
    assert "self.kv_cache_config.needs_kv_cache_zeroing" in source(kv_cache_coordinator)
    assert "kv_cache_config.needs_kv_cache_zeroing" in source(gpu_worker)
    assert "def _zero_block_ids" in source(cpu_model_runner)
    assert "scheduler_cls" in parameters(EngineArgs)
    assert "resolve_obj_by_qualname(self.scheduler_cls)" in source(SchedulerConfig.get_scheduler_cls)
    assert f"{scheduler.__module__}.{scheduler.__name__}" == SCHEDULER


@row("vllm.v1.core.sched.scheduler.Scheduler; KVCacheManager.allocate_slots, cache_blocks; LogprobsLists.slice_request")
def _() -> None:
    """`vllm/scheduler.py` keeps a request's tokens until it sends several together, all of them before
    the version of the weights changes, and skips the cache's blocks at tokens that neither begin nor
    complete one.

    If it changes: an error at the engine's start, or tokens that are missing or have the version of
    later weights; `tests/test_scheduler.py`, and `tests/monarch/test_own_process.py` with real weights

    Until: vLLM sends the tokens of FINAL_ONLY requests together
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    update = source(Scheduler.update_from_output)
    assert "logprobs = model_runner_output.logprobs" in update
    assert "new_logprobs = logprobs.slice_request(req_index, len(new_token_ids))" in update
    call = "self.kv_cache_manager.allocate_slots( request, num_new_tokens, num_lookahead_tokens=self.num_lookahead_tokens, )"
    assert call in " ".join(source(Scheduler.schedule).split())
    assert "or self.has_finished_requests()" in source(Scheduler.has_requests)
    assert "not self.has_work()" in source(EngineCoreProc._pause_complete)
    assert "Weight versions change only while generation is paused." in source(EngineCore._attach_weight_version)


@row(
    "vllm QKVParallelLinear: num_heads, num_kv_heads, num_kv_head_replicas, head_size; "
    "MergedColumnParallelLinear.output_sizes; tp_rank, tp_size; VocabParallelEmbedding.shard_indices; packed_modules_mapping"
)
def _() -> None:
    """`vllm/in_place.py` finds the rows of the running model's parameters into which a pull copies
    each tensor.

    If it changes: loud for the names; if the rows do not fill every parameter exactly, a warning
    says that pulls use vLLM's slower reload

    Until: vLLM says which rows each tensor fills
    """
    from vllm.model_executor.layers import linear, vocab_parallel_embedding
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    made = source(linear.QKVParallelLinear.__init__)
    for name in ("num_heads", "num_kv_heads", "num_kv_head_replicas", "head_size"):
        assert f"self.{name} = " in made
    assert "self.output_sizes = output_sizes" in source(linear.MergedColumnParallelLinear.__init__)
    assert "self.tp_rank = " in source(linear) and "self.tp_size = " in source(linear)
    assert "self.shard_indices = " in source(vocab_parallel_embedding.VocabParallelEmbedding.__init__)
    assert Qwen3ForCausalLM.packed_modules_mapping == {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }


@row("vllm.model_executor.model_loader.reload.layerwise.finalize_layerwise_reload")
def _() -> None:
    """`vllm/weights.py` calls it to end a reload that failed, so that another reload can begin.

    If it changes: loud

    Until: vLLM's `reload_weights` cleans up after an error
    """
    from vllm.model_executor.model_loader.reload import layerwise

    assert parameters(layerwise.finalize_layerwise_processing) == ["model", "model_config"]
    assert "finalize_layerwise_processing(*args, **kwargs)" in source(layerwise.finalize_layerwise_reload)


@row(
    "vllm LoRAModel.from_lora_tensors, PEFTHelper, lora_manager._adapter_manager: "
    "add_adapter, remove_adapter, activate_adapter"
)
def _() -> None:
    """`vllm/weights.py` makes an adapter from tensors and replaces the former adapter by it, because
    vLLM's own call reads an adapter from a directory.

    If it changes: loud

    Until: vLLM loads an adapter from tensors
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LRUCacheLoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    wanted = {"lora_model_id", "tensors", "peft_helper", "device", "dtype", "model_vocab_size", "weights_mapper"}
    assert wanted <= set(parameters(LoRAModel.from_lora_tensors))
    assert PEFTHelper(r=4, lora_alpha=8, target_modules=["q_proj"]).vllm_lora_scaling_factor == 2
    assert "self._adapter_manager = lora_manager" in source(WorkerLoRAManager.create_lora_manager)
    assert "self.lora_manager = " in source(LoRAModelRunnerMixin.load_lora_model)
    for name in ("add_adapter", "remove_adapter", "activate_adapter"):
        assert len(parameters(getattr(LRUCacheLoRAModelManager, name))) == 2


@row("vllm Platform.get_punica_wrapper, PunicaWrapperCPU.update_metadata, add_lora_linear, add_lora_logits")
def _() -> None:
    """On a CPU `vllm/cpu.py` makes vLLM apply adapters with our `vllm/cpu_adapters.py`. If any row of
    a step has an adapter, vLLM's own code applies the last adapter to the rows without an adapter.
    vLLM's code also copies an adapter once for every row.

    If it changes: silent: requests without an adapter get the adapter of another request;
    `tests/monarch/test_named_adapters.py`

    Until: vLLM's code leaves rows without an adapter as they are
    """
    import torch
    from vllm.lora.ops import torch_ops
    from vllm.lora.punica_wrapper import punica_selector
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from rl_actors.vllm.cpu_adapters import GroupedAdapters

    assert "current_platform.get_punica_wrapper()" in source(punica_selector.get_punica_wrapper)
    for name in ("add_lora_linear", "add_lora_logits"):
        ours, theirs = (parameters(getattr(kind, name)) for kind in (GroupedAdapters, PunicaWrapperCPU))
        assert ours[:-1] == theirs[: len(ours) - 1]
    for name in ("token_lora_indices", "sampler_indices"):
        assert isinstance(getattr(PunicaWrapperCPU, name), property)
    # The index -1 means no adapter. vLLM's own kernel applies the last adapter to a token with this index, so GroupedAdapters is needed.
    found = torch.zeros(1, 1)
    torch_ops.bgmv_shrink(torch.ones(1, 1), torch.tensor([3.0, 5.0]).reshape(2, 1, 1, 1), found, torch.tensor([-1]))
    assert found.item() == 5


@row("vllm GPUModelRunner._get_prompt_logprobs_dict, LogitsProcessorWithLoRA.punica_wrapper")
def _() -> None:
    """`vllm/weights.py` replaces the method, so that adapters of the output projection are also
    applied to the logprobs of a prompt. vLLM's own method knows only the adapters of the sampled
    positions, so it fails or gives wrong logprobs.

    If it changes: silent: wrong logprobs of prompts; `tests/monarch/test_named_adapters.py`

    Until: vLLM applies these adapters to prompts, too
    """
    from vllm.lora.layers import LogitsProcessorWithLoRA
    from vllm.lora.layers.base_linear import BaseLayerWithLoRA
    from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    compute = source(GPUModelRunner._get_prompt_logprobs_dict)
    assert parameters(GPUModelRunner._get_prompt_logprobs_dict) == ["self", "hidden_states", "num_scheduled_tokens"]
    assert "self._get_prompt_logprobs_dict(" in source(GPUModelRunner)
    assert "prompt_hidden_states = hidden_states[offset : offset + num_logits]" in compute
    assert "self.model.compute_logits(prompt_hidden_states)" in compute
    assert "self.punica_wrapper.add_lora_logits(" in source(LogitsProcessorWithLoRA._get_logits)
    assert "self.punica_wrapper" in source(BaseLayerWithLoRA.set_mapping)
    assert isinstance(PunicaWrapperBase.token_lora_indices, property)


@row("vllm LLMEngine.add_lora, remove_lora; LoRARequest")
def _() -> None:
    """`vllm/engine.py` loads an adapter from its directory. Our code relies on two facts: vLLM reads
    the directory again after it has dropped the adapter, and the keys of vLLM's prefix cache
    contain the adapter's name.

    If it changes: loud for the names; silent: tokens of another adapter;
    `tests/monarch/test_named_adapters.py`

    Until: vLLM documents both
    """
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    assert (parameters(LLMEngine.add_lora), parameters(LLMEngine.remove_lora)) == (
        ["self", "lora_request"],
        ["self", "lora_id"],
    )
    request = LoRARequest("a#1", 1, "/a")
    assert (request.lora_name, request.lora_int_id, request.lora_path) == ("a#1", 1, "/a")
    assert "lora_request.lora_name" in source(_gen_lora_extra_hash_keys)
    assert "remove_oldest_adapter" in source(LRUCacheWorkerLoRAManager.add_adapter)
    assert "remove_all_adapters()" in source(LoRAModelRunnerMixin.reset_lora_state)


@row("vllm.model_executor.model_loader.reload.layerwise.logger")
def _() -> None:
    """`vllm/weights.py` filters this logger. It drops the warning "Failed to load weights" for a tied
    head and for the rotary embedding, which never have weights to load.

    If it changes: silent: two more lines in the log of every pull

    Until: vLLM warns only of layers whose weights a checkpoint holds
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import layerwise

    from rl_actors.vllm.weights import NO_WEIGHTS_TO_LOAD, RELOAD_LOGGER

    assert layerwise.logger.name == RELOAD_LOGGER
    assert 'logger.warning("%s: Failed to load weights", layer.__class__.__name__)' in source(layerwise)
    assert {
        f"{layer.__name__}: Failed to load weights" for layer in (RotaryEmbedding, ParallelLMHead)
    } == NO_WEIGHTS_TO_LOAD


@row("vllm._custom_ops.cpu_attn_get_scheduler_metadata")
def _() -> None:
    """`vllm/cpu.py` refuses heads whose width is not in our list `HEAD_DIMS`, because vLLM's kernel
    would refuse other widths only in the first step, some twenty seconds after the start.

    If it changes: loud: our code refuses a width that vLLM takes, or vLLM refuses a width only in
    the first step

    Until: vLLM's own list of supported widths matches its kernels; today vLLM's list lacks 48,
    although a kernel takes it
    """
    import torch
    from vllm import _custom_ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import cpu_attn

    from rl_actors.vllm.cpu import HEAD_DIMS

    if not current_platform.is_cpu():
        return  # only vLLM's package for CPUs has these kernels
    current_platform.import_kernels()

    def has_kernel(head_dim: int, dtype: torch.dtype) -> bool:
        lengths, starts = torch.tensor([3], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
        isa = cpu_attn._get_attn_isa(dtype, 128, head_dim)
        try:
            _custom_ops.cpu_attn_get_scheduler_metadata(
                1,
                2,
                1,
                head_dim,
                lengths,
                dtype,
                starts,
                causal=True,
                sliding_window_size=-1,
                isa=isa,
                enable_kv_split=True,
            )
        except RuntimeError as error:
            assert "Unsupported CPU attention configuration" in str(error)
            return False
        return True

    for dtype in (torch.float32, torch.bfloat16):
        assert tuple(width for width in range(1, 600) if has_kernel(width, dtype)) == HEAD_DIMS


@row("vllm.config.lora.MaxLoRARanks")
def _() -> None:
    """`vllm/start.py` chooses the smallest of these ranks that is not below the adapter's rank.
    `config.py` refuses ranks above 512, which is the largest of these ranks.

    If it changes: loud

    Until: vLLM takes every rank
    """
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    from rl_actors.config import MAX_VLLM_RANK

    assert max(get_args(MaxLoRARanks)) == MAX_VLLM_RANK


@row(
    "VLLM_ENABLE_V1_MULTIPROCESSING, VLLM_WORKER_MULTIPROC_METHOD, VLLM_RPC_BASE_PATH, "
    "VLLM_LOGGING_LEVEL, VLLM_CONFIGURE_LOGGING, VLLM_CPU_OMP_THREADS_BIND, "
    "VLLM_USE_FLASHINFER_SAMPLER, VLLM_BATCH_INVARIANT"
)
def _() -> None:
    """`vllm/core.py`, `vllm/start.py`, `vllm/cpu.py`, `vllm/gpu.py`, `processes/output.py`: the
    variables choose whether the core runs in the actor's process or in a spawned process whose
    sockets are in a folder of ours. They make the core log only warnings, leave the logging of the
    program as it is and bind no threads to cores. They prevent a compilation of vLLM's sampler,
    which would take minutes. They make the core compute batch-invariantly if the config asks for
    it.

    If it changes: silent: another process, more output, slow starts; for the last variable, results
    depend on the batch

    Until: vLLM has arguments for them
    """
    import vllm.envs

    from rl_actors.vllm import cpu, gpu, start

    # rl_actors/vllm/core.py sets these variables.
    core = {"VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_RPC_BASE_PATH"}
    ours = {*core, *start.ENGINE_ENV, *start.BATCH_INVARIANT_ENV, *cpu.ENV, *gpu.ENV, "VLLM_CONFIGURE_LOGGING"}
    known = {name for name in ours if name.startswith("VLLM_")}
    assert len(known) == 8 and known <= set(vllm.envs.environment_variables)


@row("TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR, VLLM_CACHE_ROOT")
def _() -> None:
    """`processes/kernel_caches.py` sets the folders of compiled kernels, also of FlashAttention 4 and QuACK,
    whose packages only a GPU machine has. torch sets its own variable to its folder in /tmp as soon as
    a process asks for it, so a value with torch's prefix is not taken for the user's.

    If it changes: silent: the next run compiles again; `tests/test_kernel_caches.py`

    Until: it stays
    """
    import torch._inductor.runtime.cache_dir_utils as cache_dir_utils
    import vllm.envs

    from rl_actors.processes import kernel_caches

    assert 'os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache_dir' in source(cache_dir_utils)
    assert Path(cache_dir_utils.default_cache_dir()).name.startswith(kernel_caches.TORCHS_OWN)
    assert "TRITON_CACHE_DIR" in source(cache_dir_utils) and "VLLM_CACHE_ROOT" in vllm.envs.environment_variables
    assert {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"} <= set(kernel_caches.FOLDERS)


@row("HF_HUB_OFFLINE")
def _() -> None:
    """`vllm/start.py` sets it, because weights are local and nothing needs to be looked up on the
    network.

    If it changes: silent: waits for the network

    Until: vLLM has an argument for it
    """
    import huggingface_hub.constants

    assert 'os.environ.get("HF_HUB_OFFLINE"' in source(huggingface_hub.constants)


@row("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
def _() -> None:
    """`vllm/cpu.py` lets oneDNN keep at most 256 kernels. A kernel takes about 0.4 MiB, and oneDNN
    makes one for each number of rows that a layer has met. Without the limit a generator grew by
    some hundred MiB in its first ten thousand requests.

    If it changes: silent: memory grows

    Until: vLLM pads the number of rows on a CPU
    """
    import vllm

    libraries = list(Path(vllm.__file__).parent.glob("_C*.so"))  # they contain oneDNN
    assert any(b"PRIMITIVE_CACHE_CAPACITY" in library.read_bytes() for library in libraries)


# The page, the checks and the code


def test_the_page_is_what_the_checks_say():
    assert PAGE.read_text() == page(), "run: python tests/test_upstream.py --write"


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """Maps each row that no longer holds to the reason.

    A new process runs the checks, because they import vLLM and our modules. These imports change global state of torch
    and torchtitan, which other tests of this file also use.
    """
    program = subprocess.run([sys.executable, __file__], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    lines = program.stdout.splitlines()
    assert lines, program.stderr
    return json.loads(lines[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_every_row_holds_for_the_installed_packages(failures, name):
    assert failures.get(name) is None, failures[name]


RENAMED = [  # (row, module or class, its attribute that the test deletes)
    ("torch._foreach_norm, torch._foreach_mul_", "torch", "_foreach_norm"),
    ("torch.optim.Adam._init_group", "torch.optim:Adam", "_init_group"),
    (
        "torch.distributed.tensor.experimental._context_parallel._attention._compiled_create_block_mask",
        "torch.distributed.tensor.experimental._context_parallel._attention",
        "_compiled_create_block_mask",
    ),
    (
        "torchtitan.components.optimizer.OptimizersContainer._build_param_groups",
        "torchtitan.components.optimizer:OptimizersContainer",
        "_build_param_groups",
    ),
    (
        "torchtitan.distributed.activation_checkpoint.SelectiveAC._wrap_block, get_save_ops",
        "torchtitan.distributed.activation_checkpoint:SelectiveAC",
        "_wrap_block",
    ),
    (
        "torchtitan.models.common.moe.GroupedExperts.forward, _grouped_mm",
        "torchtitan.models.common.moe:GroupedExperts",
        "_grouped_mm",
    ),
    (
        "torchtitan.models.common.decoder.Decoder._skip_lm_head",
        "torchtitan.models.common.decoder:Decoder",
        "_skip_lm_head",
    ),
    ("monarch.actor.unhandled_fault_hook", "monarch.actor", "unhandled_fault_hook"),
]


@pytest.mark.parametrize(("name", "owner", "attribute"), RENAMED)
def test_a_check_fails_when_the_attribute_that_it_checks_is_gone(monkeypatch, name, owner, attribute):
    importlib.import_module("rl_actors.engine")
    CHECKS[name]()
    monkeypatch.delattr(pkgutil.resolve_name(owner), attribute)
    with pytest.raises((AssertionError, AttributeError, ImportError, KeyError)):
        CHECKS[name]()


def test_a_check_fails_when_torchtitans_grouped_experts_give_other_outputs(monkeypatch):
    importlib.import_module("rl_actors.engine")
    from torchtitan.models.common.moe import GroupedExperts

    forward = GroupedExperts.forward
    monkeypatch.setattr(GroupedExperts, "forward", lambda self, *given: forward(self, *given).clamp(max=0.1))
    with pytest.raises(AssertionError):
        CHECKS["torchtitan.models.common.moe.GroupedExperts.forward, _grouped_mm"]()


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in CODE:
        for path in sorted(set((ROOT / folder).rglob("*.py")) - set((ROOT / folder).rglob("*_pb2.py"))):  # generated
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(trees: Sequence[ast.Module]) -> set[str]:
    """Names that our own code defines: functions, classes, variables, attributes of self."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def reached_names() -> Iterator[tuple[str, str]]:
    """Yields (where, name) for the private names and the environment variables of other packages that our code uses."""
    trees = dict(sources())
    own = own_names(list(trees.values()))
    for path, tree in trees.items():
        for node in ast.walk(tree):
            for name in reached_by(node, own):
                yield f"{path}:{node.lineno}", name


def reached_by(node: ast.AST, own: set[str]) -> list[str]:
    """The private names and environment variables of other packages that one node of the syntax tree uses.

    own: the names that our code defines.
    """
    names: list[str] = []
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in FOREIGN:
        names = [*node.module.split("."), *(alias.name for alias in node.names)]
    elif isinstance(node, ast.Import):
        names = [part for alias in node.names for part in alias.name.split(".")]
    elif isinstance(node, ast.Attribute):
        # Our code uses its own private attributes only through self, cls or super(). A private attribute of any other
        # object belongs to another package, even if our code has an attribute of the same name.
        is_own = node.attr in own and ast.unparse(node.value) in ("self", "cls", "super()")
        names = [] if is_own or node.attr == "_replace" else [node.attr]  # _replace of named tuples is public
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
        looked_up = node.args[1]
        if isinstance(looked_up, ast.Constant) and ast.unparse(node.args[0]) not in ("self", "cls"):
            names = [looked_up.value]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if VARIABLES.fullmatch(node.value):
            return [node.value]
        if FOREIGN_PATH.fullmatch(node.value):  # an argument of import_module, resolve_name or getLogger
            names = re.split("[.:]", node.value)
    return [name for name in names if is_private(name)]


@pytest.mark.parametrize(
    ("code", "reached"),
    [
        ("import torch._inductor", ["_inductor"]),
        ("from torch.distributed._tools import MemTracker", ["_tools"]),
        ("schedule._stages", ["_stages"]),
        ("schedule._stage", ["_stage"]),  # our code also defines the name _stage
        ("self._stage", []),
        ("getattr(schedule, '_stage')", ["_stage"]),
        ("hasattr(self, '_stage')", []),
        ("import_module('monarch._src.actor')", ["_src"]),
        ("{'TORCH_LOGS': 'all'}", ["TORCH_LOGS"]),
        ("point._replace(x=1)", []),
    ],
)
def test_a_private_name_is_found_in_whatever_way_the_code_reaches_it(code, reached):
    assert [name for node in ast.walk(ast.parse(code)) for name in reached_by(node, own={"_stage"})] == reached


def overridden_names() -> Iterator[tuple[str, str]]:
    """Yields (class, name) for each private method of another package that a class of ours overrides."""
    importlib.import_module("rl_actors.engine")  # first, because it sets torchtitan's device
    for package in ("rl_actors", "controllers"):
        for module in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
            for thing in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(thing) and thing.__module__.startswith(package):
                    yield from ((thing.__qualname__, name) for name in overridden_in(thing))


def overridden_in(thing: type) -> list[str]:
    """The private methods of other packages' classes that are overridden in this class or in a base class of ours."""
    foreign = [base for base in thing.__mro__ if base.__module__.split(".")[0] in FOREIGN]
    ours = [base for base in thing.__mro__ if base.__module__.split(".")[0] in CODE]
    methods = {name for base in ours for name, value in vars(base).items() if inspect.isroutine(value)}
    return [name for name in methods if is_private(name) and any(name in vars(base) for base in foreign)]


def test_the_page_has_every_private_name_of_other_packages_that_our_code_uses():
    words = set(re.findall(r"\w+", PAGE.read_text()))
    reached = [*reached_names(), *overridden_names()]
    assert {"_step_microbatches", "_local_tensor", "_init_group", "VLLM_BATCH_INVARIANT"} <= {
        name for _, name in reached
    }
    assert sorted(f"{where}: {name}" for where, name in reached if name not in words) == []


def main() -> None:
    """Print the rows that no longer hold, with the reasons, as JSON. The exit status is 1 if there is such a row.

    With --write, write docs/upstream.md instead.
    """
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
        return
    sys.path.insert(0, str(ROOT))
    found = {}
    for name, check in CHECKS.items():
        try:
            check()
        except (Exception, pytest.fail.Exception) as error:  # pytest.raises raises pytest.fail.Exception
            failed = traceback.extract_tb(error.__traceback__)[-1]
            found[name] = f"{type(error).__name__}: {error} at {failed.filename}:{failed.lineno}: {failed.line}"
    print(json.dumps(found))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
