"""Shared by the tests with real processes: a small model, actors that can be made to fail or to wait, reference logprobs.

T tokens of one sequence, V vocabulary.
"""

import asyncio
import contextlib
import gc
import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from logging.handlers import BufferingHandler
from pathlib import Path

import psutil
import torch
from monarch.actor import concurrent_endpoint, endpoint
from torch import Tensor
from torch.distributed.tensor import DTensor
from waiting import wait_until

from rl_actors import GeneratorConfig, ModelConfig, OptimParams, Sample, TrainerConfig
from rl_actors.engine import checkpoint
from rl_actors.engine.collectives import by_rank
from rl_actors.generator import Generator
from rl_actors.policy_trainer import PolicyTrainer
from rl_actors.transports.base import Manifest, Transport, find, publish
from rl_actors.transports.publisher import Publisher

VOCAB_SIZE = 48
MAX_MODEL_LEN = 512


def model_config(*, tied: bool = True) -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        rope_theta=10_000.0,
        tie_word_embeddings=tied,
    )


def trainer_config(*, tied: bool = True, shard: int = 1, tensor: int = 1, **options) -> TrainerConfig:
    length = MAX_MODEL_LEN - 1
    options = {"max_sequence_length": length, "tokens_per_row": MAX_MODEL_LEN, **options}
    config = TrainerConfig(model=model_config(tied=tied), **options)
    config.parallelism.data_parallel_shard_degree = shard
    config.parallelism.tensor_parallel_degree = tensor
    return config


def generator_config(*, tied: bool = True, dtype="float32") -> GeneratorConfig:
    return GeneratorConfig(
        model=model_config(tied=tied),
        dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        kv_cache_bytes=32 << 20,
        enforce_eager=True,
    )


def random_samples(count: int = 8, seed: int = 0) -> list[Sample]:
    draw = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        return torch.randint(VOCAB_SIZE, (length,), generator=draw).tolist()

    return [Sample.from_tokens(ids(3 + index), ids(12)) for index in range(count)]


def step(trainer, *, seed: int = 0, learning_rate: float = 0.02) -> int:
    """One step that moves every weight far enough to change what is sampled; the new version.

    The decay bounds the weights: after 40 steps without it rounding moves logprobs by more than 1e-5.
    """
    trainer.forward_backward(random_samples(seed=seed), loss="cross_entropy").result()
    params = OptimParams(learning_rate=learning_rate, weight_decay=5.0, grad_divisor=96)
    return trainer.optim_step(params).result().policy_version


def descendants(pid: int) -> set[int]:
    """All living processes below this one."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return set()
    return {process.pid for process in below if process.is_running() and process.status() != psutil.STATUS_ZOMBIE}


def shared_memory() -> set[str]:
    """Names of the segments. Folders are somebody's temporary files."""
    return {entry.name for entry in os.scandir("/dev/shm") if not entry.is_dir()}


def left_in_shared_memory(before: set[str]) -> set[str]:
    """Segments that came since `before` and that no living process maps. Other programs run at the same time and use segments, too."""
    # A segment of another program is not mapped for a moment after it was made, and before its tracker removes it. So the segments are
    # looked at until none is left. The last look decides.
    left = shared_memory() - before
    for _ in range(60):
        left &= shared_memory() - mapped_by_processes()
        if not left:
            break
        time.sleep(1)
    return left


def mapped_by_processes() -> set[str]:
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile, or belongs to another user
            mapped |= {Path(line.split()[5]).name for line in maps.read_text().splitlines() if " /dev/shm/" in line}
    return mapped


# --- references ---------------------------------------------------------------------------------------------------


def hf_model(weights: dict[str, Tensor], *, tied: bool = True):
    """transformers' Qwen3 with these weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**model_config(tied=tied).to_hf(), attn_implementation="eager"))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (set(missing), set(unexpected)) == ({"lm_head.weight"} if tied else set(), set())
    return model.eval()


def random_weights(*, tied: bool, seed: int) -> dict[str, Tensor]:
    """Under Hugging Face names, large enough for a policy far from uniform."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**model_config(tied=tied).to_hf()))
    return {name: torch.randn_like(parameter) * 0.15 for name, parameter in model.named_parameters()}


def logits_TV(model, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def reference_logprobs(model, prompt, completion, *, temperature=1.0, top_p=1.0, top_k=0) -> Tensor:
    """Logprobs of the completion under the distribution that is sampled from: temperature, then top-k, then top-p, renormalised."""
    logits_CV = logits_TV(model, [*prompt, *completion])[len(prompt) - 1 : -1] / temperature
    for row in logits_CV:
        order = row.argsort(descending=True)
        keep = top_k or len(row)
        mass = torch.softmax(row[order[:keep]], -1).cumsum(-1)
        # The token that crosses top_p is kept.
        keep = min(keep, int((mass < top_p).sum()) + 1)
        row[order[keep:]] = -torch.inf
    return torch.log_softmax(logits_CV, -1)[range(len(completion)), completion]


def published_weights(transport: Transport, version: int) -> dict[str, Tensor]:
    async def get():
        return await transport.get_tensors(await find(transport, version, 5.0))

    return asyncio.run(get())


def publish_from_here(transport: Transport, weights: dict[str, Tensor], *, stream: str, version: int) -> Manifest:
    """As a trainer of one rank would."""
    everything = {"stream": stream, "version": version, "rank": 0, "gather": lambda text: [text]}
    return asyncio.run(publish(transport, weights, **everything))


# --- actors that fail and wait on request -------------------------------------------------------------------------


class TestTrainer(PolicyTrainer):
    __test__ = False  # not a class of tests

    @endpoint
    async def use_transport(self, transport: Transport | None) -> None:
        """Publish there from now on, as a trainer that has published nothing yet."""
        self.publisher = Publisher(transport, rank=self.rank, gather=by_rank) if transport is not None else None

    @endpoint
    async def shown(self) -> str:
        return repr(self)

    @endpoint
    async def num_frozen(self) -> int:
        """How many objects the garbage collector of this process leaves out."""
        return gc.get_freeze_count()

    @endpoint
    async def pack(self, limits: dict[str, int]) -> None:
        """Plan the calls that follow with other limits."""
        self.engine.config = replace(self.engine.config, **limits)
        self.engine.logprobs.chunk_tokens = self.engine.config.logprob_chunk_tokens

    @endpoint
    async def whole_gradients(self) -> dict[str, Tensor]:
        """The accumulated gradients, unsharded, under Hugging Face names. Collective."""
        parameters = list(self.engine.built.model.parameters())
        weights = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            # The model's state dict splits the fused query, key and value, so the gradients take the weights' places in it.
            for parameter in parameters:
                parameter.copy_(parameter.grad)
            named = self.engine.hf_state_dict()
            whole = {n: grad.full_tensor() if isinstance(grad, DTensor) else grad for n, grad in named.items()}
            whole = {name: grad.clone() for name, grad in whole.items()}
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.copy_(weight)
        return whole

    @endpoint
    async def held_bytes(self) -> tuple[int, ...]:
        """The sizes of this rank's parameters, gradients, optimizer state and buffers."""

        def size(tensors) -> int:
            return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)

        parameters = list(self.engine.built.model.parameters())
        optimizers = self.engine.built.optimizers.optimizers
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        moments = [tensor for state in states for tensor in state.values()]
        return tuple(map(size, (parameters, grads, moments, self.engine.built.model.buffers())))

    @endpoint
    async def hold_saves(self, folder: Path, error: str = "") -> None:
        """A save stops before its last file until `open` is in the folder, and then fails with `error` if there is one."""
        finish = checkpoint._WholeDirectoryWriter.finish

        def wait_and_finish(*args, **kwargs):
            checkpoint._WholeDirectoryWriter.finish = finish
            wait_until((folder / "open").exists)
            if error:
                raise OSError(error)
            finish(*args, **kwargs)

        checkpoint._WholeDirectoryWriter.finish = wait_and_finish

    @endpoint
    async def fail_next_write(self, rank: int, error: str) -> None:
        """The next save fails on this rank before its tensors are on disk."""

        def fail(*_, **__):
            del checkpoint._WholeDirectoryWriter.write_data
            raise OSError(error)

        if self.rank == rank:
            checkpoint._WholeDirectoryWriter.write_data = fail


class TestGenerator(Generator):
    __test__ = False

    @concurrent_endpoint
    async def num_tokens_under_way(self) -> list[int]:
        states = self.engine.engine.output_processor.request_states
        return [len(state.detokenizer.output_token_ids) for state in list(states.values())]

    @concurrent_endpoint
    async def cache_block_size(self) -> int:
        """Tokens of one block of the prefix cache."""
        return self.engine.engine.vllm_config.cache_config.block_size

    @concurrent_endpoint
    async def vllm_log(self) -> list[str]:
        """Lines that vLLM has logged since the last call of this endpoint; the first call begins to record."""
        if not hasattr(self, "recorder"):
            self.recorder = BufferingHandler(capacity=10_000)
            logging.getLogger("vllm").addHandler(self.recorder)
        lines = [record.getMessage() for record in self.recorder.buffer]
        self.recorder.flush()
        return lines

    @concurrent_endpoint
    async def held_weights(self) -> dict[str, Tensor]:
        """The weights that every layer of the engine computes with, under vLLM's names (q, k, v and gate, up are fused there).

        On a CPU vLLM packs a weight W away; the layer's output for the unit vectors, W^T, shows it exactly.
        """

        def read(model) -> dict[str, Tensor]:
            weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.numel()}
            for name, layer in model.named_modules():
                if hasattr(layer, "cpu_linear"):
                    width = getattr(layer, "input_size", model.config.hidden_size)
                    unit = torch.eye(width, dtype=model.model.norm.weight.dtype)
                    weights[f"{name}.weight"] = layer.quant_method.apply(layer, unit, None).T.contiguous()
            return weights

        return await asyncio.wrap_future(self.engine.submit(lambda: self.engine.engine.apply_model(read)[0]))

    @concurrent_endpoint
    async def fail_next_forward(self, message: str) -> None:
        """Raise in the middle of vLLM's next step, where its scheduler already counts on the outcome."""
        executor = self.engine.engine.model_executor

        def fail(*_, **__):
            del executor.execute_model
            raise RuntimeError(message)

        executor.execute_model = fail


@dataclass(frozen=True, kw_only=True)
class FailingTransport(Transport):
    """Puts as `inner` does, but for one rank that fails half way."""

    inner: Transport
    failing_rank: int

    async def put_tensors(self, key, tensors, rank) -> None:
        if rank == self.failing_rank:
            half = dict(list(tensors.items())[: len(tensors) // 2])
            await self.inner.put_tensors(key, half, rank)
            raise OSError(f"rank {rank} lost its disk")
        await self.inner.put_tensors(key, tensors, rank)

    async def get_tensors(self, manifest):
        return await self.inner.get_tensors(manifest)

    async def put_object(self, key, value) -> None:
        await self.inner.put_object(key, value)

    async def get_object(self, key):
        return await self.inner.get_object(key)

    async def delete(self, manifest) -> None:
        await self.inner.delete(manifest)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A loss that holds the trainer: it writes `name` into a folder as it begins and ends once the file `open` is there."""

    folder: Path
    name: str = "begun"

    def __call__(self, logprobs_BL, *, loss_weights):
        (self.folder / self.name).touch()
        wait_until((self.folder / "open").exists)
        loss = -(logprobs_BL * loss_weights).sum()
        return loss, {"loss:sum": loss.detach()}

    def wait_begun(self) -> None:
        wait_until((self.folder / self.name).exists)

    def open(self) -> None:
        (self.folder / "open").touch()


class UnpicklableError(Exception):
    def __init__(self, message: str, lock) -> None:
        super().__init__(message)
        self.lock = lock


@dataclass(frozen=True, kw_only=True)
class UnpicklableLoss:
    """Fails with an exception that cannot be sent."""

    def __call__(self, logprobs_BL, *, loss_weights):
        raise UnpicklableError("it holds a lock", threading.Lock())


@dataclass(frozen=True, kw_only=True)
class FailingLoss:
    """Fails on one rank."""

    rank: int
    message: str = "the loss is broken"

    def __call__(self, logprobs_BL, *, loss_weights):
        if torch.distributed.get_rank() == self.rank:
            raise ArithmeticError(self.message)
        return (logprobs_BL * loss_weights).sum(), {}
