"""Models, samples and ranks for tests of parallel layouts. Each rank is a process, forked from a process that has already imported torch."""

import faulthandler
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from references import BASE, VOCAB_SIZE, ppo_samples
from torch import Tensor
from waiting import GUARD

from rl_actors import layouts
from rl_actors.config import LoRAConfig, ModelConfig, TrainerConfig
from rl_actors.losses import GSPO, KL, PPO
from rl_actors.types import IGNORE_TARGET, OptimParams, Sample

TIED = replace(BASE, max_position_embeddings=512, tie_word_embeddings=True)
UNTIED = replace(TIED, tie_word_embeddings=False)
FOUR_BLOCKS = replace(UNTIED, num_hidden_layers=4)
EXPERTS = replace(UNTIED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LLAMA = replace(
    UNTIED,
    architecture="llama",
    rope_scaling={
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64.0,
    },
)
ADAPTERS = LoRAConfig(rank=4, train_unembed=True)
MODELS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "tied": (TIED, {}),
    "untied": (UNTIED, {}),
    "four blocks": (FOUR_BLOCKS, {}),
    "experts": (EXPERTS, {}),
    "balanced experts": (EXPERTS, {"load_balance_coeff": 0.01}),
    "adapters": (UNTIED, {"lora": ADAPTERS}),
    "Llama": (LLAMA, {}),
    "Llama with adapters": (LLAMA, {"lora": ADAPTERS}),
    # Experts cannot have adapters, so only the attention layers have adapters.
    "adapters beside experts": (EXPERTS, {"lora": LoRAConfig(rank=4, train_mlp=False)}),
    # Models without a directory. Their weights are drawn from the seed.
    "tied, drawn": (TIED, {"model": TIED, "seed": 5}),
    "untied, drawn": (UNTIED, {"model": UNTIED, "seed": 5}),
    "recomputed, drawn": (UNTIED, {"model": UNTIED, "seed": 5, "activation_checkpointing": "full"}),
    "four blocks, drawn": (FOUR_BLOCKS, {"model": FOUR_BLOCKS, "seed": 5}),
    "experts, drawn": (EXPERTS, {"model": EXPERTS, "seed": 5}),
}
"""Maps the name of a model to (model, fields of TrainerConfig)."""


def layout(replicate=1, shard=1, context=1, tensor=1, expert=1, pipeline=1, **fields) -> dict[str, Any]:
    """Fields of ParallelismConfig, by name: the degrees, and other fields."""
    degrees = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "context_parallel_degree": context,
        "tensor_parallel_degree": tensor,
        "expert_parallel_degree": expert,
        "pipeline_parallel_degree": pipeline,
    }
    return {**degrees, **fields}


def layout_cases(table: list[tuple], quick: set[tuple[str, str]]) -> list:
    """Parameters of a test: a case for each (name, parallelism, processes, model). Cases whose (name, model) is not in `quick` are slow."""
    cases = []
    for name, parallelism, num_processes, model in table:
        marks = [] if (name, model) in quick else [pytest.mark.slow]
        cases.append(pytest.param(parallelism, num_processes, model, id=f"{name} {model}", marks=marks))
    return cases


NO_SP = {"enable_sequence_parallel": False}
INTERLEAVED = {"pipeline_parallel_schedule": "Interleaved1F1B"}
LENGTHS = [7, 31, 1, 230, 13, 3, 22, 45, 9, 120, 2, 64, 5, 180, 17]
POLICY = PPO(ratio_low=0.8, ratio_high=1.28, kl=KL(coefficient=0.1), entropy_coefficient=0.05)
SEQUENCE = GSPO(ratio_low=0.5, ratio_high=2.0, sequence_mean=True)
# eps is large. With a small eps, Adam's first step is nearly the sign of the gradient, and rounding can change the sign of a small gradient.
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
        targets = sample.targets.clone()
        # No loss may count these positions, although some of them have a loss weight above 0.
        targets[2:-1:9] = IGNORE_TARGET
        samples.append(replace(sample, targets=targets, columns={name: all_columns[name] for name in columns}))
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


def make_engine(path: str, parallelism: dict[str, Any], fields: dict[str, Any]):
    from rl_actors.engine.train_engine import TrainEngine

    limits = {"max_sequence_length": 256, "rows_per_microbatch": 2, "logprob_chunk_tokens": 100}
    config = TrainerConfig(hf_path=path, **limits, **fields)
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    config.tokens_per_row = max(256, layouts.row_multiple(config))
    return TrainEngine(config)


def whole(tensor: Tensor) -> Tensor:
    """A copy of the tensor, gathered from all ranks if it is sharded."""
    gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().clone()


def gradients(engine) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in engine.built.model.named_parameters() if p.grad is not None}


def refused(engine) -> list[tuple[str, int, str]]:
    """Make two calls in which the loss fails on only one rank. Returns for each call what this process sees: (error message, rank that failed,
    the engine's state after the error).

    The first call has many microbatches, and the second call has one microbatch.
    """
    answers = []
    for samples, loss in ((samples_with(*TRAINED), FailingPolicy()), (samples_with(*TRAINED)[:3], FailingSequence())):
        with pytest.raises(ArithmeticError) as failure:
            engine.forward_backward(samples, loss)
        answers.append((str(failure.value), failure.value.rank, engine.step.state))
        engine.discard_gradients()
    return answers


def train(path: str, parallelism: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The results of every kind of call. One optimizer step follows the calls with the loss POLICY, and one follows the calls with SEQUENCE."""
    engine = make_engine(path, parallelism, fields)
    numbers: dict[str, Any] = {"refused": refused(engine), "layout": engine.info().layout}
    numbers["pushed"] = {name: whole(tensor) for name, tensor in push(engine).items()}
    numbers["forward"] = [engine.forward(samples_with("target_ids"), entropy=True)]
    policy_samples = samples_with(*TRAINED, "ref_logprobs")
    halves = (policy_samples[:9], policy_samples[9:])
    numbers["policy"] = [engine.forward_backward(half, POLICY) for half in halves]
    numbers["policy evaluated"] = [engine.forward(half, POLICY) for half in halves]
    numbers["policy gradients"] = gradients(engine)
    numbers["policy step"] = engine.optim_step(STEP)
    numbers["pushed later"] = {name: whole(tensor) for name, tensor in push(engine).items()}
    numbers["sequence evaluated"] = [engine.forward(samples_with(*TRAINED), SEQUENCE, entropy=True)]
    numbers["sequence"] = [engine.forward_backward(samples_with(*TRAINED), SEQUENCE, entropy=True)]
    numbers["sequence gradients"] = gradients(engine)
    numbers["sequence step"] = engine.optim_step(STEP)
    return numbers


def push(engine) -> dict[str, Tensor]:
    """The tensors that a push publishes. {} for a model with a load-balancing bias, because the engine refuses to push such a model."""
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
    """Take two more steps and return their results. The first result depends only on the weights, the second also on the optimizer's state."""
    steps = []
    for _ in range(2):
        output = engine.forward_backward(samples_with(*TRAINED), "ppo")
        steps.append((output, engine.optim_step(STEP).grad_norm))
    return steps


def child(rank: int, world_size: int, folder: str, work: Callable, args: tuple) -> None:
    faulthandler.enable()  # prints the stack of a rank that a library aborts
    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)})
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=GUARD))
    torch.save(work(*args), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def fork_processes(target: Callable, args: tuple, num_processes: int) -> None:
    """Run target(rank, *args) in new processes that have already imported the engine, and wait until the processes end."""
    mp.get_context("forkserver").set_forkserver_preload(["rl_actors.engine.train_engine", "references"])
    mp.start_processes(target, args=args, nprocs=num_processes, start_method="forkserver")


def run_processes(tmp_path_factory, num_processes: int, work: Callable, *args) -> list[Any]:
    """The result of work(*args) on each rank. Each rank is a new process that has already imported the engine.

    Raises ProcessRaisedException with the traceback of a rank that failed.
    """
    folder = tmp_path_factory.mktemp("run")
    fork_processes(child, (num_processes, str(folder), work, args), num_processes)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_processes)]
