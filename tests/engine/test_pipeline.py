"""Tests that a pipeline of several processes gives the numbers of one process.

The processes use gloo. The samples of a call have very different lengths.
"""

import asyncio
import os
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from layout_work import fork_processes
from published import get_tensors
from references import ppo_samples, random_samples, save_random
from safetensors.torch import load_file
from test_hf import BASE, MOE
from torch.distributed.pipelining import PipelineStage
from torchtitan.config import CompileConfig

from rl_actors.config import LoRAConfig, TrainerConfig
from rl_actors.engine.collectives import by_rank
from rl_actors.engine.pipeline_stages import Stage
from rl_actors.losses import GSPO, PPO
from rl_actors.transports.base import publish, wait_for_manifest
from rl_actors.transports.files import FilesTransport
from rl_actors.types import OptimParams

MODEL = replace(BASE, num_hidden_layers=4)
LENGTHS = [7, 31, 1, 64, 13, 3, 22, 45, 9, 2, 64, 5]
MANY, FEW = ppo_samples(LENGTHS), ppo_samples([40, 2], seed=1)
PLAIN = random_samples(LENGTHS, seed=3)
IDS = []  # samples with the column target_ids
for plain in random_samples([50, 3, 17, 64, 1], seed=2):
    target_ids = torch.randint(64, (len(plain), 3), generator=torch.Generator())
    IDS.append(replace(plain, columns={"target_ids": target_ids}))
STEP = OptimParams(learning_rate=1e-3, weight_decay=0.1, grad_divisor=100.0)
INTERLEAVED = {"pipeline_parallel_schedule": "Interleaved1F1B"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline of degree 2 that is compared with one process."""

    layout: dict = field(default_factory=dict)  # fields of ParallelismConfig besides pipeline_parallel_degree
    fields: dict = field(default_factory=dict)  # fields of TrainerConfig
    tolerance: float = 1e-5


CASES = {
    "1F1B": Case(),
    "Interleaved1F1B": Case(layout=INTERLEAVED),
    "experts": Case(fields={"model": replace(MOE, num_hidden_layers=4), "load_balance_coeff": 1e-3}, tolerance=1e-4),
    "adapters": Case(layout=INTERLEAVED, fields={"lora": LoRAConfig(rank=4, train_unembed=True)}),
    "recomputation": Case(layout=INTERLEAVED, fields={"activation_checkpointing": "full"}),
    "bfloat16": Case(fields={"compute_dtype": "bfloat16"}),
    "float8": Case(fields={"float8": True}),
    "compiled": Case(fields={"compile": CompileConfig(enable=True, components=["model"])}),
    "FSDP2": Case(layout={"data_parallel_shard_degree": 2}),
    "FSDP2 Interleaved1F1B": Case(layout={"data_parallel_shard_degree": 2, **INTERLEAVED}),
    "TP2": Case(layout={"tensor_parallel_degree": 2}),
    "TP2 without sequence parallelism": Case(layout={"tensor_parallel_degree": 2, "enable_sequence_parallel": False}),
    "TP2 Interleaved1F1B": Case(layout={"tensor_parallel_degree": 2, **INTERLEAVED}),
}
# The same processes run all cases of a group, because starting the processes takes most of the time.
GROUPS = {
    "1F1B": ["1F1B"],
    "two": ["Interleaved1F1B", "experts", "adapters", "recomputation", "bfloat16", "float8"],
    "compiled": ["compiled"],
    "four": [name for name in CASES if name.startswith(("FSDP2", "TP2"))],
}


def make_config(path: str, **fields) -> TrainerConfig:
    limits = {"max_sequence_length": 64, "tokens_per_row": 64, "rows_per_microbatch": 2, "logprob_chunk_tokens": 50}
    return TrainerConfig(hf_path=path, **{**limits, **fields})


def record(engine, directory: Path) -> dict:
    """Results of two steps, and of a `forward` call after them. Also writes a checkpoint and, if possible, exports.

    The steps use a loss that reads single positions, a loss that reads whole samples, batches of several shapes, and
    `forward` calls between the calls that train.
    """
    outputs = [
        engine.forward_backward(MANY, PPO(), entropy=True),
        engine.forward(IDS, entropy=True),
        engine.forward(MANY, PPO(), entropy=True),
        engine.forward_backward(FEW, GSPO()),
        engine.forward(FEW, GSPO()),
    ]
    gradients = {n: p.grad.full_tensor().clone() for n, p in engine.built.model.named_parameters() if p.requires_grad}
    steps = [engine.optim_step(STEP)]
    outputs += [engine.forward(MANY), engine.forward_backward(PLAIN, "cross_entropy")]
    steps += [engine.optim_step(STEP)]
    outputs += [engine.forward(FEW)]
    engine.save_checkpoint(str(directory / "checkpoint")).result()
    if not engine.config.load_balance_coeff:
        engine.export_hf(str(directory / "export"))
    if engine.config.lora.rank:
        engine.export_lora(str(directory / "adapters"))
    return {"outputs": outputs, "gradients": gradients, "steps": steps, "num_parameters": engine.info().num_parameters}


def going_on(engine, checkpoint: Path) -> dict:
    """Results of a step that starts from the weights and the optimizer state of a checkpoint."""
    version = engine.load_checkpoint(str(checkpoint))
    outputs = [engine.forward_backward(MANY, PPO())]
    steps = [engine.optim_step(STEP)]
    outputs += [engine.forward(FEW)]
    return {"outputs": outputs, "steps": steps, "gradients": {}, "version": version}


class FailsHalfWay(PPO):
    """PPO that raises an error when it is called the third time. It is called once for each chunk of a microbatch."""

    def __call__(self, logprobs_BL, **columns):
        self.calls.append(1)
        if len(self.calls) == 3:
            self.calls.clear()
            raise ArithmeticError("the loss is broken")
        return super().__call__(logprobs_BL, **columns)

    calls: ClassVar[list] = []


def refusing(engine) -> dict:
    """Results of a call after a failed call, and of a step that is skipped.

    In the failed call the loss raises an error at its third chunk, on the last stage. In the skipped step one stage has a gradient that is
    not finite. The failed call and the skipped step do not change the weights.
    """
    with pytest.raises(ArithmeticError, match="the loss is broken"):
        engine.forward_backward(MANY, FailsHalfWay())
    state = engine.step.state
    engine.discard_gradients()
    outputs = [engine.forward_backward(MANY, PPO())]
    gradients = {n: p.grad.full_tensor().clone() for n, p in engine.built.model.named_parameters()}
    name, parameter = list(engine.built.model.named_parameters())[-1]
    if dist.get_rank() == dist.get_world_size() - 1:
        parameter.grad.fill_(float("nan"))
    step = engine.optim_step(STEP)
    return {
        "outputs": outputs,
        "gradients": gradients,
        "steps": [],
        "spoilt": (state, step.skipped, step.nonfinite_parameters),
        "spoilt_name": name,
    }


def interrupted(engine, directory: Path) -> None:
    """Make a call fail inside torch's schedule, and discard its gradients. After this function `child` makes more calls,
    which check that the engine still works.

    Also check that all ranks refuse a checkpoint if only the last stage cannot load it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner.schedule_class, "_update_losses", lambda *_: 1 / 0)  # after the last microbatch
        with pytest.raises(ZeroDivisionError):
            engine.forward_backward(MANY, PPO())
    engine.discard_gradients()
    with pytest.raises(ValueError, match="holds another model: model.layers.3"):
        engine.load_checkpoint(str(directory / "three blocks"))


def num_received(engine) -> list[int]:
    """Number of tensors that a stage holds, counted before each forward pass of a microbatch in two long calls.

    The held tensors are received tensors, and the outputs of microbatches for which backward_one_chunk has not run
    yet. Also check that the stage holds no tensors after the calls.
    """
    counts: list[int] = []
    stages = set()
    forward_one_chunk = PipelineStage.forward_one_chunk

    def count(stage) -> int:
        received = (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        buffers = [info.buffer for infos in received for info in infos if info.buffer is not None]
        return sum(not buffer.is_meta for buffer in buffers) + len(stage.fwd_cache)

    def counting(stage, *args, **kwargs):
        stages.add(stage)
        counts.append(count(stage))
        return forward_one_chunk(stage, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineStage, "forward_one_chunk", counting)
        engine.forward(MANY * 4)
        engine.forward_backward(MANY * 4, PPO())
    engine.discard_gradients()
    assert len(counts) > 12 and all(count(stage) == 0 for stage in stages)
    return counts


def num_graphs(engine) -> list[int]:
    """Number of losses on this rank that still have their autograd graph, counted after the backward pass of each
    microbatch of a long call.
    """
    counts: list[int] = []
    kept: list[torch.Tensor] = []
    backward_one_chunk = Stage.backward_one_chunk

    def counting(stage, number, loss=None, **kwargs):
        backward_one_chunk(stage, number, loss, **kwargs)
        if loss is not None:
            kept.append(loss)
        counts.append(sum(loss.grad_fn is not None for loss in kept))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "backward_one_chunk", counting)
        engine.forward_backward(MANY * 4, PPO())
    engine.discard_gradients()
    assert len(counts) > 6 and len(kept) == (len(counts) if engine.runner.reports_metrics else 0)
    return counts


def pushed(engine, directory: Path) -> None:
    names = {"stream": "stream", "version": engine.policy_version, "rank": dist.get_rank(), "gather": by_rank}
    asyncio.run(publish(FilesTransport(directory / "weights"), engine.hf_state_dict(), **names))


def in_one_chunk(engine, expected: dict) -> None:
    """Check that calls give the expected numbers even if the logits of a microbatch would fit into one chunk.

    In a pipeline the engine always makes at least two chunks. With one chunk the gradients of the last norm and of the
    head would have different dtypes, and FSDP would raise an error.
    """
    outputs = [engine.forward_backward(MANY, PPO(), entropy=True), engine.forward_backward(FEW, GSPO())]
    assert torch.equal(outputs[0].logprobs, expected["outputs"][0].logprobs)
    assert engine.optim_step(STEP).grad_norm == pytest.approx(expected["steps"][0].grad_norm, rel=1e-2)


def any_number_of_microbatches(engine, interleaved) -> None:
    """Check that 1F1B and Interleaved1F1B give the same logprobs if the samples fill one to five microbatches.

    torch's interleaved schedule refuses five microbatches over two ranks. So the engine adds a microbatch of padding.
    """
    for count in range(1, 6):
        samples = random_samples([64] * count, seed=count)  # each sample fills a microbatch
        expected, actual = engine.forward(samples), interleaved.forward(samples)
        assert sorted(actual.indices) == sorted(expected.indices)
        torch.testing.assert_close(actual.logprobs, expected.logprobs)


def child(rank: int, world_size: int, directory: str, paths: dict[str, str]) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)})
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    from rl_actors.engine.train_engine import TrainEngine

    for name, path in paths.items():
        case, folder = CASES[name], Path(directory) / name
        config = make_config(path, **case.fields)
        config.parallelism.pipeline_parallel_degree = 2
        for key, value in case.layout.items():
            setattr(config.parallelism, key, value)
        engine = TrainEngine(config)
        if name == "1F1B":
            interrupted(engine, Path(directory))
            assert max(num_received(engine)) <= 2
            assert max(num_graphs(engine)) == 0
            single_rows = replace(config, rows_per_microbatch=1)
            parallelism = replace(config.parallelism, **INTERLEAVED)
            any_number_of_microbatches(
                TrainEngine(single_rows), TrainEngine(replace(single_rows, parallelism=parallelism))
            )
        results = {} if case.fields else {"refused": refusing(engine)}
        results["trained"] = record(engine, folder)
        if name == "bfloat16":
            in_one_chunk(TrainEngine(replace(config, logprob_chunk_tokens=1024)), results["trained"])
        if not case.fields:
            pushed(engine, folder)
        results["resumed"] = going_on(engine, folder.with_name(f"{name} of one") / "checkpoint")
        torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


def run_in_one_process(case: Case, base: str, folder: Path, make_engine) -> None:
    """Write the results of one process. The test compares the results of the pipeline with them."""
    folder.mkdir()
    engine = make_engine(base, logprob_chunk_tokens=50, **case.fields)
    results = {} if case.fields else {"refused": refusing(engine)}
    results["trained"] = record(engine, folder)
    results["resumed"] = going_on(engine, folder / "checkpoint")
    torch.save(results, folder / "0.pt")


@pytest.fixture(scope="module")
def run_group(tmp_path_factory):
    """A function run_group(name, make_engine) that returns the folder with the results of all cases of the group.

    A group runs only once.
    """
    folders: dict[str, Path] = {}

    def run(group: str, make_engine) -> Path:
        if group not in folders:
            folder = folders[group] = tmp_path_factory.mktemp(group)
            bases = {}
            for name in GROUPS[group]:
                bases[name] = save_random(folder / f"{name} base", CASES[name].fields.get("model", MODEL))
                (folder / name).mkdir()
                run_in_one_process(CASES[name], bases[name], folder / f"{name} of one", make_engine)
            world_size = 4 if group == "four" else 2
            shallow = make_engine("", model=replace(MODEL, num_hidden_layers=3))
            shallow.save_checkpoint(str(folder / "three blocks")).result()
            fork_processes(child, (world_size, str(folder), bases), world_size)
        return folders[group]

    return run


def assert_same(ranks: list[dict], one: dict, tolerance: float) -> None:
    from rl_actors.clients.conversion import merge_outputs

    outputs_of_calls = zip(*(rank["outputs"] for rank in ranks), strict=True)
    for outputs, expected in zip(outputs_of_calls, one["outputs"], strict=True):
        indices = sorted(chain.from_iterable(output.indices for output in outputs))
        assert indices == sorted(expected.indices)  # each sample once
        actual, expected = merge_outputs(len(indices), outputs), merge_outputs(len(indices), [expected])
        assert actual.policy_version == expected.policy_version
        torch.testing.assert_close(actual.logprobs, expected.logprobs, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(actual.entropy, expected.entropy, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(actual.target_logprobs, expected.target_logprobs, rtol=tolerance, atol=tolerance)
        assert actual.metrics == pytest.approx(expected.metrics, rel=tolerance, abs=tolerance)
    results_of_steps = zip(*(rank["steps"] for rank in ranks), strict=True)
    for results, expected in zip(results_of_steps, one["steps"], strict=True):
        assert all(result == results[0] for result in results)
        assert results[0].grad_norm == pytest.approx(expected.grad_norm, rel=tolerance)
    gradients: dict[str, torch.Tensor] = {}
    for rank in ranks:
        gradients |= rank["gradients"]
    assert gradients.keys() == one["gradients"].keys()
    norm = sum(float(gradient.norm()) ** 2 for gradient in one["gradients"].values()) ** 0.5
    for name, expected in one["gradients"].items():
        error = float((gradients[name] - expected).norm())
        assert error <= tolerance * float(expected.norm()) + 1e-7 * norm, f"{name}: {error} of {float(expected.norm())}"


def marked(name: str):
    return pytest.param(name, marks=[] if name == "1F1B" else [pytest.mark.slow])


@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_a_pipeline_gives_the_numbers_of_one_process(run_group, make_engine, name):
    case, group = CASES[name], next(group for group, names in GROUPS.items() if name in names)
    folder = run_group(group, make_engine)
    ranks = [torch.load(file, weights_only=False) for file in sorted((folder / name).glob("*.pt"))]
    one = torch.load(folder / f"{name} of one" / "0.pt", weights_only=False)
    trained = [rank["trained"] for rank in ranks]
    assert_same(trained, one["trained"], case.tolerance)
    assert {rank["num_parameters"] for rank in trained} == {one["trained"]["num_parameters"]}
    # A pipeline continues from a checkpoint of one process, and one process continues from a checkpoint of the
    # pipeline.
    assert_same([rank["resumed"] for rank in ranks], one["resumed"], case.tolerance)
    # In bfloat16 the head's gradient depends on the chunks of logits. With other chunks a step could round a weight to
    # another value. So this engine has the same chunks as the engine of run_in_one_process.
    engine = make_engine(str(folder / f"{name} base"), logprob_chunk_tokens=50, **case.fields)
    assert_same([going_on(engine, folder / name / "checkpoint")], one["resumed"], case.tolerance)
    # The pipeline's export has the same weights as its checkpoint.
    engine.load_checkpoint(str(folder / name / "checkpoint"))
    exports = (
        ("export", engine.export_hf, "model.safetensors"),
        ("adapters", engine.export_lora, "adapter_model.safetensors"),
    )
    for kind, export, file in exports:
        if (folder / name / kind).is_dir():
            again = folder / name / f"{kind} of one"
            export(str(again))
            actual, expected = load_file(folder / name / kind / file), load_file(again / file)
            assert actual.keys() == expected.keys()
            assert all(torch.allclose(actual[key], expected[key], rtol=1e-6, atol=1e-6) for key in expected)
    if case.fields:
        return
    transport = FilesTransport(folder / name / "weights")
    weights = asyncio.run(get_tensors(transport, asyncio.run(wait_for_manifest(transport, 2, 1.0))))
    exported = load_file(folder / name / "export" / "model.safetensors")
    assert weights.keys() == exported.keys()
    assert all(torch.equal(weights[key], exported[key]) for key in exported)
    refused = [rank["refused"] for rank in ranks]
    assert_same(refused, one["refused"], case.tolerance)
    assert {rank["spoilt"] for rank in refused} == {("broken", True, (refused[-1]["spoilt_name"],))}


@pytest.mark.slow
def test_a_client_pushes_and_exports_the_weights_of_all_stages(tmp_path):
    from rl_actors.clients.trainer import TrainerClient
    from rl_actors.transports.torchstore import TorchStoreTransport

    config = make_config(save_random(tmp_path / "base", MODEL))
    config.parallelism.pipeline_parallel_degree = 2
    transport = TorchStoreTransport()

    async def weights_of(version: int) -> dict[str, torch.Tensor]:
        return await get_tensors(transport, await wait_for_manifest(transport, version, 5.0))

    async def main() -> None:
        await transport.open()
        async with TrainerClient.spawn(config, transport=transport) as trainer:
            before = await trainer.forward(MANY)
            output = await trainer.forward_backward(MANY, loss=PPO())
            torch.testing.assert_close(output.logprobs, before.logprobs)
            with pytest.raises(ArithmeticError, match="the loss is broken"):
                await trainer.forward_backward(MANY, FailsHalfWay())
            await trainer.discard_gradients()
            await trainer.forward_backward(MANY, loss=PPO())
            assert (await trainer.optim_step(STEP)).policy_version == 1
            weights = await weights_of(await trainer.push_model_state_dict())
            await trainer.export_hf(str(tmp_path / "export"))
            exported = load_file(tmp_path / "export" / "model.safetensors")
            assert weights.keys() == exported.keys()
            assert all(torch.equal(weights[name], exported[name]) for name in exported)
            infos = await trainer.info()
            assert [info.num_parameters for info in infos] == [sum(x.numel() for x in exported.values())] * 2
        await transport.close()

    asyncio.run(main())
