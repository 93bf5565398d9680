"""Every parallel layout gives the numbers of one process: real processes over gloo, float32, packed samples of which few are long.

A row of the table is a layout; its processes are forked from one that has imported torch, so a row takes seconds.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from references import VOCAB_SIZE, ppo_samples, save_random
from safetensors.torch import load_file
from torch import Tensor

from rl_actors import layouts
from rl_actors.config import LoRAConfig, ModelConfig, TrainerConfig
from rl_actors.losses import GSPO, KL, PPO
from rl_actors.trainer_client import merge_outputs
from rl_actors.types import ForwardBackwardOutput, OptimParams, Sample

TIED = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
)
UNTIED = replace(TIED, tie_word_embeddings=False)
FOUR_BLOCKS = replace(UNTIED, num_hidden_layers=4)
EXPERTS = replace(UNTIED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
ADAPTERS = LoRAConfig(rank=4, train_unembed=True)
MODELS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "tied": (TIED, {}),
    "untied": (UNTIED, {}),
    "four blocks": (FOUR_BLOCKS, {}),
    "experts": (EXPERTS, {}),
    "balanced experts": (EXPERTS, {"load_balance_coeff": 0.01}),
    "adapters": (UNTIED, {"lora": ADAPTERS}),
    "adapters beside experts": (EXPERTS, {"lora": LoRAConfig(rank=4, train_mlp=False)}),
}


def layout(replicate=1, shard=1, context=1, tensor=1, expert=1, pipeline=1, **fields) -> dict[str, Any]:
    """The fields of ParallelismConfig."""
    degrees = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "context_parallel_degree": context,
        "tensor_parallel_degree": tensor,
        "expert_parallel_degree": expert,
        "pipeline_parallel_degree": pipeline,
    }
    return {**degrees, **fields}


NO_SP = {"enable_sequence_parallel": False}
INTERLEAVED = {"pipeline_parallel_schedule": "Interleaved1F1B"}
QUICK = {("FSDP2", "tied"), ("CP2", "tied"), ("FSDP2, EP2", "experts")}
TABLE = [  # name, parallelism, processes, model
    ("FSDP2", layout(shard=2), 2, "tied"),
    ("DDP2", layout(replicate=2), 2, "tied"),
    ("HSDP2x2", layout(replicate=2, shard=2), 4, "tied"),
    ("TP2", layout(tensor=2), 2, "tied"),
    ("TP2 without SP", layout(tensor=2, **NO_SP), 2, "tied"),
    ("CP2", layout(context=2), 2, "tied"),
    ("CP2 by the blocks of the mask", layout(context=2, context_parallel_load_balancer="ptrr"), 2, "tied"),
    ("CP2 in order", layout(context=2, context_parallel_load_balancer=None), 2, "tied"),
    ("CP4", layout(context=4), 4, "tied"),
    ("FSDP2xTP2", layout(shard=2, tensor=2), 4, "tied"),
    ("FSDP2xCP2", layout(shard=2, context=2), 4, "tied"),
    ("DDP2xCP2", layout(replicate=2, context=2), 4, "tied"),
    ("CP2xTP2", layout(context=2, tensor=2), 4, "tied"),
    ("CP2xTP2 without SP", layout(context=2, tensor=2, **NO_SP), 4, "tied"),
    ("TP2", layout(tensor=2), 2, "untied"),
    ("CP2", layout(context=2), 2, "untied"),
    ("FSDP2", layout(shard=2), 2, "experts"),
    ("DDP2", layout(replicate=2), 2, "experts"),
    ("TP2", layout(tensor=2), 2, "experts"),
    ("TP2 without SP", layout(tensor=2, **NO_SP), 2, "experts"),
    ("CP2", layout(context=2), 2, "experts"),
    ("FSDP2, EP2", layout(shard=2, expert=2), 2, "experts"),
    ("CP2, EP2", layout(context=2, expert=2), 2, "experts"),
    ("TP2, EP2", layout(tensor=2, expert=2), 2, "experts"),
    ("FSDP2xTP2", layout(shard=2, tensor=2), 4, "experts"),
    ("FSDP4, EP2", layout(shard=4, expert=2), 4, "experts"),
    ("HSDP2x2, EP2", layout(replicate=2, shard=2, expert=2), 4, "experts"),
    ("FSDP2xTP2, EP2", layout(shard=2, tensor=2, expert=2), 4, "experts"),
    ("FSDP2xTP2, EP4", layout(shard=2, tensor=2, expert=4), 4, "experts"),
    ("CP2xTP2, EP4", layout(context=2, tensor=2, expert=4), 4, "experts"),
    ("TP2, EP2", layout(tensor=2, expert=2), 2, "balanced experts"),
    ("CP2, EP2", layout(context=2, expert=2), 2, "balanced experts"),
    ("FSDP2", layout(shard=2), 2, "adapters"),
    ("TP2", layout(tensor=2), 2, "adapters"),
    ("TP2 without SP", layout(tensor=2, **NO_SP), 2, "adapters"),
    ("CP2", layout(context=2), 2, "adapters"),
    ("FSDP2xTP2", layout(shard=2, tensor=2), 4, "adapters"),
    ("TP2, EP2", layout(tensor=2, expert=2), 2, "adapters beside experts"),
    ("PP2", layout(pipeline=2), 2, "four blocks"),
    ("PP2 of two stages a rank", layout(pipeline=2, **INTERLEAVED), 2, "four blocks"),
    ("PP2xFSDP2", layout(pipeline=2, shard=2), 4, "four blocks"),
    ("PP2xTP2", layout(pipeline=2, tensor=2), 4, "four blocks"),
    ("PP2xCP2", layout(pipeline=2, context=2), 4, "four blocks"),
    ("PP2xDDP2", layout(pipeline=2, replicate=2), 4, "four blocks"),
    ("PP4", layout(pipeline=4), 4, "four blocks"),  # with ranks that are neither the first nor the last
    ("PP2xFSDP2", layout(pipeline=2, shard=2), 4, "experts"),
    ("PP2xFSDP2", layout(pipeline=2, shard=2), 4, "adapters"),
    ("PP2xCP2", layout(pipeline=2, context=2), 4, "adapters"),
]
COLLECTIVE_TIMEOUT = 100.0  # seconds
LENGTHS = [7, 31, 1, 230, 13, 3, 22, 45, 9, 120, 2, 64, 5, 180, 17]
POLICY = PPO(ratio_low=0.8, ratio_high=1.28, kl=KL(coefficient=0.1), entropy_coefficient=0.05)
SEQUENCE = GSPO(ratio_low=0.5, ratio_high=2.0, sequence_mean=True)
# A large eps: Adam's first step is the sign of the gradient, which noise may turn.
STEP = OptimParams(learning_rate=1e-2, eps=1e-2, weight_decay=0.1, grad_divisor=100.0, grad_clip_norm=1.0)


def samples_with(*columns: str) -> list[Sample]:
    draw = torch.Generator().manual_seed(7)
    samples = []
    for sample in ppo_samples(LENGTHS):
        length = len(sample)
        extra = {
            "ref_logprobs": -4 * torch.rand(length, generator=draw),
            "target_ids": torch.randint(VOCAB_SIZE, (length, 3), generator=draw),
        }
        all_columns = {**sample.columns, **extra}
        samples.append(replace(sample, columns={name: all_columns[name] for name in columns}))
    return samples


TRAINED = ("loss_weights", "advantages", "old_logprobs")


class FailsOnTheLastRank:
    def __call__(self, logprobs_BL: Tensor, **columns: Tensor):
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ArithmeticError("the loss is broken")
        return super().__call__(logprobs_BL, **columns)


class FailingPolicy(FailsOnTheLastRank, PPO):
    pass


class FailingSequence(FailsOnTheLastRank, GSPO):
    pass


# --- what a rank does ---------------------------------------------------------------------------------------------


def make_engine(path: str, parallelism: dict[str, Any], fields: dict[str, Any]):
    from rl_actors.engine.train_engine import TrainEngine

    limits = {"max_sequence_length": 256, "rows_per_microbatch": 2, "logprob_chunk_tokens": 100}
    config = TrainerConfig(hf_path=path, **limits, **fields)
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    config.tokens_per_row = max(256, layouts.row_multiple(config))
    return TrainEngine(config)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def gradients(engine) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in engine.parts.model.named_parameters() if p.grad is not None}


def refused(engine) -> list[tuple[str, str]]:
    """What a rank says when a loss failed on one alone, and the state it is in then: of many microbatches, and of one."""
    answers = []
    for samples, loss in ((samples_with(*TRAINED), FailingPolicy()), (samples_with(*TRAINED)[:3], FailingSequence())):
        with pytest.raises((ArithmeticError, RuntimeError)) as failure:
            engine.forward_backward(samples, loss)
        answers.append((str(failure.value), engine.step.state))
        engine.discard_gradients()
    return answers


def train(path: str, parallelism: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Every kind of call, and a step between two of them."""
    engine = make_engine(path, parallelism, fields)
    numbers: dict[str, Any] = {"refused": refused(engine)}
    numbers["pushed"] = {name: whole(tensor) for name, tensor in push(engine).items()}
    numbers["forward"] = [engine.forward(samples_with("target_ids"), entropy=True)]
    policy_samples = samples_with(*TRAINED, "ref_logprobs")
    halves = (policy_samples[:9], policy_samples[9:])
    numbers["policy"] = [engine.forward_backward(half, POLICY) for half in halves]
    numbers["policy gradients"] = gradients(engine)
    numbers["policy grad_norm"] = engine.optim_step(STEP).grad_norm
    numbers["pushed later"] = {name: whole(tensor) for name, tensor in push(engine).items()}
    numbers["sequence"] = [engine.forward_backward(samples_with(*TRAINED), SEQUENCE, entropy=True)]
    numbers["sequence gradients"] = gradients(engine)
    numbers["sequence grad_norm"] = engine.optim_step(STEP).grad_norm
    return numbers


def push(engine) -> dict[str, Tensor]:
    return {} if engine.config.load_balance_coeff else engine.hf_state_dict()


def save(path: str, parallelism: dict[str, Any], fields: dict[str, Any], checkpoint: str) -> list[tuple[Any, float]]:
    engine = make_engine(path, parallelism, fields)
    for _ in range(2):
        engine.forward_backward(samples_with(*TRAINED), "ppo")
        engine.optim_step(STEP)
    engine.save_checkpoint(checkpoint).result()
    return go_on(engine)


def load(path: str, parallelism: dict[str, Any], fields: dict[str, Any], checkpoint: str) -> list[tuple[Any, float]]:
    engine = make_engine(path, parallelism, fields)
    assert engine.load_checkpoint(checkpoint) == 2
    return go_on(engine)


def go_on(engine) -> list[tuple[Any, float]]:
    """Two steps: the second shows whether the optimizer's state came along."""
    steps = []
    for _ in range(2):
        output = engine.forward_backward(samples_with(*TRAINED), "ppo")
        steps.append((output, engine.optim_step(STEP).grad_norm))
    return steps


def child(rank: int, world_size: int, folder: str, work: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)})
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT)
    )
    torch.save(work(*args), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


# --- the processes and what they answer ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(num_processes, work, *args) -> what work(*args) returns on each rank, in new processes that find everything imported.

    Raises ProcessRaisedException with the traceback of a rank that failed.
    """
    mp.get_context("forkserver").set_forkserver_preload(["rl_actors.engine.train_engine", "references"])

    def run(num_processes: int, work: Callable, *args) -> list[Any]:
        folder = tmp_path_factory.mktemp("run")
        mp.start_processes(
            child, args=(num_processes, str(folder), work, args), nprocs=num_processes, start_method="forkserver"
        )
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_processes)]

    return run


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    return cache(lambda model: save_random(tmp_path_factory.mktemp("model"), MODELS[model][0]))


@dataclass(frozen=True, kw_only=True)
class Numbers:
    outputs: dict[str, list[ForwardBackwardOutput]]  # by kind of call
    gradients: dict[str, dict[str, Tensor]]
    grad_norms: dict[str, float]
    pushed: dict[str, Tensor]
    pushed_later: dict[str, Tensor]  # after a step: the adapters are no longer zero


def merged(answers: list[dict[str, Any]]) -> Numbers:
    """What the client makes of the ranks' answers; of gradients and weights each rank of a pipeline has its own."""
    first = answers[0]
    gradients: dict[str, dict[str, Tensor]] = {"policy": {}, "sequence": {}}
    pushed: dict[str, Tensor] = {}
    pushed_later: dict[str, Tensor] = {}
    for answer in answers:
        for kind, known in gradients.items():
            known.update(answer[f"{kind} gradients"])
        pushed.update(answer["pushed"])
        pushed_later.update(answer["pushed later"])
        assert all(answer[f"{kind} grad_norm"] == first[f"{kind} grad_norm"] for kind in gradients)
    counts = {"forward": [len(LENGTHS)], "policy": [9, len(LENGTHS) - 9], "sequence": [len(LENGTHS)]}
    return Numbers(
        outputs={
            kind: [merge_outputs(n, [answer[kind][call] for answer in answers]) for call, n in enumerate(sizes)]
            for kind, sizes in counts.items()
        },
        gradients=gradients,
        grad_norms={kind: first[f"{kind} grad_norm"] for kind in gradients},
        pushed=pushed,
        pushed_later=pushed_later,
    )


@pytest.fixture(scope="module")
def one_process(run, directory_of):
    """one_process(model) -> Numbers."""

    return cache(lambda model: merged(run(1, train, directory_of(model), layout(), MODELS[model][1])))


def errors_of(actual: Numbers, expected: Numbers) -> dict[str, float]:
    """The worst of each kind: logprobs and entropies of a position to 1 + their size, a gradient by its norm and 1e-7 of all."""
    errors: dict[str, float] = {}

    def note(name: str, error: float) -> None:
        assert math.isfinite(error), f"{name}: {error}"
        errors[name] = max(errors.get(name, 0.0), float(error))

    for kind, calls in expected.outputs.items():
        for output, reference in zip(actual.outputs[kind], calls, strict=True):
            for name in ("logprobs", "entropy", "target_logprobs"):
                values, references = getattr(output, name), getattr(reference, name)
                assert (values is None) == (references is None)
                for value, known in zip(values or (), references or (), strict=True):
                    note(name, ((value - known).abs() / (1 + known.abs())).max())
            if kind != "forward":
                known = reference.metrics["loss:sum"]
                note("loss", abs(output.metrics["loss:sum"] - known) / abs(known))
    for kind, gradients in expected.gradients.items():
        note("grad_norm", abs(actual.grad_norms[kind] / expected.grad_norms[kind] - 1))
        assert actual.gradients[kind].keys() == gradients.keys()
        noise = 1e-7 * torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        for name, gradient in gradients.items():
            difference = ((actual.gradients[kind][name] - gradient).norm() - noise).clamp(min=0)
            note("gradients", difference / gradient.norm() if difference else 0.0)
    assert actual.pushed_later.keys() == expected.pushed_later.keys()
    for name, weight in expected.pushed_later.items():
        note("pushed", (actual.pushed_later[name] - weight).norm() / weight.norm())
    return errors


@pytest.mark.parametrize(
    "parallelism, num_processes, model",
    [
        pytest.param(*row, id=f"{name} {row[-1]}", marks=[] if (name, row[-1]) in QUICK else [pytest.mark.slow])
        for name, *row in TABLE
    ],
)
def test_a_layout_gives_the_numbers_of_one_process(run, one_process, directory_of, parallelism, num_processes, model):
    config, fields = MODELS[model]
    expected = one_process(model)
    answers = run(num_processes, train, directory_of(model), parallelism, fields)
    actual = merged(answers)
    errors = errors_of(actual, expected)
    print({name: f"{error:.1e}" for name, error in errors.items()})
    tolerance = 1e-4 if config.num_experts else 1e-5
    assert all(error <= tolerance for error in errors.values()), errors
    for kind, calls in expected.outputs.items():
        for output, reference in zip(actual.outputs[kind], calls, strict=True):
            assert [len(logprobs) for logprobs in output.logprobs] == [len(logprobs) for logprobs in reference.logprobs]
            assert output.metrics == pytest.approx(reference.metrics, rel=tolerance, abs=tolerance)
    if not config.num_experts or "load_balance_coeff" not in fields:
        weights = load_file(f"{directory_of(model)}/model.safetensors")
        assert actual.pushed.keys() == weights.keys()
        assert all(torch.equal(actual.pushed[name], weight) for name, weight in weights.items())
    *others, failed = [answer["refused"] for answer in answers]
    assert failed == [("the loss is broken", "broken")] * 2
    told = f"rank {num_processes - 1} failed: ArithmeticError('the loss is broken')"
    assert all(answer == [(told, "broken")] * 2 for answer in others)


MOVES = [  # saved under, loaded under, model
    (layout(shard=2), layout(context=2), "tied"),
    (layout(context=2), layout(tensor=2), "tied"),
    (layout(context=2), layout(), "tied"),
    (layout(shard=2, expert=2), layout(), "experts"),
    (layout(), layout(shard=2, expert=2), "balanced experts"),
    (layout(shard=2, expert=2), layout(tensor=2, expert=2), "balanced experts"),
    (layout(tensor=2), layout(context=2, expert=2), "experts"),
    (layout(tensor=2), layout(shard=2), "adapters"),
    (layout(pipeline=2), layout(context=2), "four blocks"),
    (layout(tensor=2), layout(pipeline=2, **INTERLEAVED), "four blocks"),
]


def size(parallelism: dict[str, Any]) -> int:
    return math.prod(parallelism[f"{name}_degree"] for name in layouts.DEGREES)


@pytest.mark.slow
@pytest.mark.parametrize("saved_under, loaded_under, model", MOVES)
def test_a_checkpoint_of_one_layout_goes_on_under_another(
    run, directory_of, tmp_path, saved_under, loaded_under, model
):
    config, fields = MODELS[model]
    path, checkpoint = directory_of(model), str(tmp_path / "checkpoint")
    saved = run(size(saved_under), save, path, saved_under, fields, checkpoint)
    loaded = run(size(loaded_under), load, path, loaded_under, fields, checkpoint)
    tolerance = 1e-4 if config.num_experts else 1e-5
    for step in range(2):
        before, after = (
            merge_outputs(len(LENGTHS), [rank[step][0] for rank in answers]).metrics["loss:sum"]
            for answers in (saved, loaded)
        )
        assert after == pytest.approx(before, rel=tolerance)
        assert loaded[0][step][1] == pytest.approx(saved[0][step][1], rel=tolerance)


REFUSED = [
    (layout(shard=2, expert=2), "tied", "expert_parallel_degree=2 with model.num_experts=0"),
    (layout(shard=3, expert=3), "experts", "num_experts=4 is not divisible by parallelism.expert_parallel_degree=3"),
    (
        layout(shard=2, replicate=2, expert=4),
        "experts",
        "expert_parallel_degree=4 does not divide .* tensor_parallel=2",
    ),
    (
        layout(tensor=2, expert=2, **NO_SP),
        "experts",
        "enable_sequence_parallel=False: torchtitan cannot put the experts'",
    ),
    (layout(shard=2, expert=0), "experts", "expert_parallel_degree=0; it must be at least 1"),
    (layout(tensor=3), "experts", "moe_intermediate_size=32 is not divisible by parallelism.tensor_parallel_degree=3"),
    (layout(context=2, context_parallel_load_balancer="tail"), "tied", "load_balancer='tail'; it must be 'headtail'"),
    (layout(context=3), "tied", "tokens_per_row=256, of which 0 are a multiple of 384, is below"),
]


@pytest.mark.parametrize("parallelism, model, message", REFUSED)
def test_what_no_layout_can_be_is_refused_before_any_process_starts(parallelism, model, message):
    config = TrainerConfig(model=MODELS[model][0], max_sequence_length=256, tokens_per_row=256)
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    with pytest.raises(ValueError, match=message):
        config.validate()


class Unchecked(TrainerConfig):
    def validate(self) -> None:
        pass


def upstream_rows(row_length: int) -> None:
    """What torch says to a row that is not of whole blocks on every rank."""
    from rl_actors.engine.train_engine import TrainEngine

    layouts.row_multiple = lambda config: row_length  # of this process, which ends with the call
    config = Unchecked(model=TIED, max_sequence_length=row_length, tokens_per_row=row_length)
    config.parallelism.context_parallel_degree = 2
    TrainEngine(config).forward(ppo_samples([row_length]))


def upstream_experts(num_experts: int, parallelism: dict[str, Any]) -> None:
    """What torchtitan says to experts that do not come out even, or cannot be put back together."""
    from rl_actors.engine.train_engine import TrainEngine

    model = replace(EXPERTS, num_experts=num_experts)
    config = Unchecked(model=model, max_sequence_length=64, tokens_per_row=64)
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    TrainEngine(config).forward(ppo_samples([20, 30]))


def upstream_local_map() -> bool:
    """Whether what local_map makes of an input whose all-gather is under way has a gradient."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import local_map

    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()
    gathered = x.redistribute(placements=[Replicate()], async_op=True)
    double = local_map(
        lambda local: 2 * local, out_placements=[Replicate()], in_placements=([Replicate()],), device_mesh=mesh
    )
    return double(gathered).requires_grad


@pytest.mark.parametrize(
    "work, arguments, message",
    [
        (upstream_rows, (192,), "Q_LEN 192 is not divisible by CP mesh world size 2 [*] BLOCK_SIZE 128"),
        (upstream_experts, (5, layout(shard=2, expert=2)), r"shape '\[2, -1\]' is invalid for input of size 5"),
        (upstream_experts, (4, layout(tensor=2, expert=2, **NO_SP)), r"Can not redistribute from S\(1\) to P\(sum\)"),
    ],
)
def test_what_is_refused_fails_upstream(run, work, arguments, message):
    with pytest.raises(mp.ProcessRaisedException, match=message):
        run(2, work, *arguments)


def test_the_gradient_that_wait_for_input_keeps_is_still_cut_upstream(run):
    assert run(2, upstream_local_map) == [False, False]
