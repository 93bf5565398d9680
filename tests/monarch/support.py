"""Helpers of the tests with real processes: a small model, reference logprobs, and actors that fail or wait on request.

In names of tensors, T is the number of tokens of a sequence, C the number of tokens of a completion, V the size of the vocabulary,
B the number of rows of a batch, and L the length of a row.
"""

import asyncio
import contextlib
import gc
import hashlib
import itertools
import logging
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from logging.handlers import BufferingHandler
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from monarch.actor import concurrent_endpoint, endpoint
from published import get_tensors
from torch import Tensor
from torch.distributed.tensor import DTensor
from waiting import GUARD, wait_until

from rl_actors import Completion, GeneratorConfig, ModelConfig, OptimParams, Sample, TrainerConfig
from rl_actors.engine import checkpoint
from rl_actors.engine.collectives import by_rank
from rl_actors.generator import Generator
from rl_actors.policy_trainer import PolicyTrainer
from rl_actors.transports.base import LoadedTensors, Manifest, Transport, publish, wait_for_manifest
from rl_actors.transports.memory import MemoryTransport
from rl_actors.transports.publisher import Publisher
from rl_actors.transports.snapshot import DoubleBuffer
from rl_actors.vllm import weights
from rl_actors.vllm.start import this_machine

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
        sleep_mode=True,  # without this option `sleep` raises an error; on a CPU the option has no other effect
    )


def random_samples(count: int = 8, seed: int = 0) -> list[Sample]:
    draw = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        return torch.randint(VOCAB_SIZE, (length,), generator=draw).tolist()

    return [Sample.from_tokens(ids(3 + index), ids(12)) for index in range(count)]


def step(trainer, *, seed: int = 0, learning_rate: float = 0.02) -> int:
    """Take a step that moves every weight far enough to change the completions of a generator. Returns the new version.

    The weight decay keeps the weights small. After 40 steps without weight decay, rounding changes logprobs by more
    than 1e-5.
    """
    trainer.forward_backward(random_samples(seed=seed), loss="cross_entropy").result()
    params = OptimParams(learning_rate=learning_rate, weight_decay=5.0, grad_divisor=96)
    return trainer.optim_step(params).result().policy_version


def descendants(pid: int) -> set[int]:
    """The ids of the living descendants of a process."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return set()
    return {process.pid for process in below if process.is_running() and process.status() != psutil.STATUS_ZOMBIE}


def process_of(name: str) -> psutil.Process:
    """The process with this name, such as "generator-0", among the processes that this test has started."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RL_ACTORS_PROCESS") == name:
                return process
    raise AssertionError(f"no process {name}")


def shared_memory() -> set[str]:
    """Names of the shared-memory segments, which are files in /dev/shm.

    Folders in /dev/shm hold other temporary files, and are left out.
    """
    return {entry.name for entry in os.scandir("/dev/shm") if not entry.is_dir()}


def left_in_shared_memory(before: set[str]) -> set[str]:
    """Segments that are not in `before` and that no living process maps.

    The result has no segments of other programs that run at the same time.
    """
    # A segment of another program is not mapped for a moment after its creation, and for a moment before its removal.
    # So this function checks up to 60 times, and keeps only segments that no check has found mapped.
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
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
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
    """Large random weights under Hugging Face names. With them the policy's distribution is far from uniform."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**model_config(tied=tied).to_hf()))
    return {name: torch.randn_like(parameter) * 0.15 for name, parameter in model.named_parameters()}


def logits_TV(model, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def reference_logprobs(model, prompt, completion, *, temperature=1.0, top_p=1.0, top_k=0) -> Tensor:
    """Logprobs of the completion under the distribution that tokens are sampled from.

    This is the model's distribution after temperature, then top-k, then top-p, renormalized.
    """
    logits_CV = logits_TV(model, [*prompt, *completion])[len(prompt) - 1 : -1] / temperature
    for row in logits_CV:
        order = row.argsort(descending=True)
        keep = top_k or len(row)
        mass = torch.softmax(row[order[:keep]], -1).cumsum(-1)
        # The token that crosses top_p is kept.
        keep = min(keep, int((mass < top_p).sum()) + 1)
        row[order[keep:]] = -torch.inf
    return torch.log_softmax(logits_CV, -1)[range(len(completion)), completion]


def forward_logprobs(trainer, sequences: list[list[int]]) -> list[Tensor]:
    """For each sequence, the trainer's logprobs of all tokens except the first."""
    return trainer.forward([Sample.from_tokens(tokens[:1], tokens[1:]) for tokens in sequences]).result().logprobs


def with_prompts(prompts: list[list[int]], groups: list[list[Completion]]) -> list[tuple[list[int], Completion]]:
    """Pairs (prompt, completion) for all completions, in the order of the groups."""
    pairs = []
    for prompt, group in zip(prompts, groups, strict=True):
        pairs += [(prompt, completion) for completion in group]
    return pairs


def worst(some, others) -> float:
    """The largest absolute difference between two lists of tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


def published_weights(transport: Transport, version: int) -> dict[str, Tensor]:
    """The weights of a version, as a generator would get them."""

    async def get():
        return await get_tensors(transport, await wait_for_manifest(transport, version, 5.0))

    return asyncio.run(get())


def publish_from_here(transport: Transport, weights: dict[str, Tensor], *, stream: str, version: int) -> Manifest:
    """Publish these weights as a trainer with one rank would."""
    everything = {"stream": stream, "version": version, "rank": 0, "gather": lambda text: [text]}
    return asyncio.run(publish(transport, weights, **everything))


# --- actors that fail and wait on request -------------------------------------------------------------------------


class DyingTensors(dict):
    """Tensors of a push that kill the process. The kill comes after `copied` of these tensors have been copied."""

    def __init__(self, tensors: dict[str, Tensor], copied: int) -> None:
        super().__init__(tensors)
        self.copied = copied
        self.num_walks = 0

    def items(self):
        self.num_walks += 1
        for number, item in enumerate([*super().items(), None]):
            if self.num_walks == 2 and number == self.copied:  # the first iteration copies nothing
                os.kill(os.getpid(), signal.SIGKILL)
            if item is not None:
                yield item


class TestTrainer(PolicyTrainer):
    __test__ = False  # not a class of tests

    @endpoint
    async def use_transport(self, transport: Transport | None) -> None:
        """Publish through this transport from now on, like a trainer that has not published anything yet."""
        self.publisher = Publisher(transport, rank=self.rank, gather=by_rank) if transport is not None else None

    @endpoint
    async def fail_puts(self, failing_rank: int | None) -> None:
        """Make every later put of the rank `failing_rank` fail after half of its tensors. None: puts work again."""
        transport = self.publisher.transport
        inner = transport.inner if isinstance(transport, FailingTransport) else transport
        failing = None if failing_rank is None else FailingTransport(inner=inner, failing_rank=failing_rank)
        self.publisher.transport = failing or inner

    @endpoint
    async def die_in_push(self, rank: int, copied: int | str) -> None:
        """Kill the process of `rank` in its next write.

        copied: number of tensors that the rank has copied when it is killed. "written": the rank has copied all tensors
        and has ended its write.
        """
        if self.rank != rank:
            return
        write = DoubleBuffer.write

        def write_and_die(snapshot, key, tensors, dtype):
            write(snapshot, key, tensors if copied == "written" else DyingTensors(tensors, copied), dtype)
            os.kill(os.getpid(), signal.SIGKILL)

        DoubleBuffer.write = write_and_die

    @endpoint
    async def shown(self) -> str:
        return repr(self)

    @endpoint
    async def num_frozen(self) -> int:
        """Number of objects that gc.freeze has taken out of garbage collection in this process."""
        return gc.get_freeze_count()

    @endpoint
    async def pack(self, limits: dict[str, int]) -> None:
        """Change limits of the packing for later calls. limits: fields of TrainerConfig, with their new values."""
        self.engine.config = replace(self.engine.config, **limits)
        self.engine.head.chunk_tokens = self.engine.config.logprob_chunk_tokens

    @endpoint
    async def whole_gradients(self) -> dict[str, Tensor]:
        """The accumulated gradients, unsharded, under Hugging Face names. All ranks must call this together."""
        parameters = list(self.engine.built.model.parameters())
        weights = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            # hf_state_dict splits fused parameters into query, key and value. To split the gradients in the same way,
            # the parameters hold the gradients while hf_state_dict runs.
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
        """The bytes of memory that this rank's parameters, gradients, optimizer state and buffers hold."""

        def size(tensors) -> int:
            shards = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
            storages = [shard.untyped_storage() for shard in shards]  # FSDP puts several gradients into one storage
            return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

        parameters = list(self.engine.built.model.parameters())
        optimizers = self.engine.built.optimizers.optimizers
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        moments = [tensor for state in states for tensor in state.values()]
        return tuple(map(size, (parameters, grads, moments, self.engine.built.model.buffers())))

    @endpoint
    async def hold_saves(self, folder: Path, error: str = "") -> None:
        """Make the next save wait after it has written all tensors. The wait ends when `folder` has a file named `open`.

        Then the save finishes. If `error` is not empty, the save fails instead, with this text.
        """
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
        """Make the next save fail on the rank `rank`, before this rank's tensors are on disk."""

        def fail(*_, **__):
            del checkpoint._WholeDirectoryWriter.write_data
            raise OSError(error)

        if self.rank == rank:
            checkpoint._WholeDirectoryWriter.write_data = fail


class TestGenerator(Generator):
    __test__ = False

    @concurrent_endpoint
    async def num_tokens_under_way(self) -> list[int]:
        """For each unfinished request, the number of tokens that it has generated so far."""
        states = self.engine.engine.output_processor.request_states
        return [len(state.detokenizer.output_token_ids) for state in list(states.values())]

    @concurrent_endpoint
    async def num_aborted(self) -> int:
        """Number of unfinished requests that were aborted since the first call of this endpoint."""
        if not hasattr(self, "aborted"):
            self.aborted: list[str] = []
            abort = self.engine._abort

            def record_and_abort(request_ids: list[str]) -> None:
                self.aborted += request_ids
                abort(request_ids)

            self.engine._abort = record_and_abort
        return len(self.aborted)

    @concurrent_endpoint
    async def num_waiting_pulls(self) -> int:
        """Number of pulls and sleeps that wait for the end of the running requests."""
        return len(self.engine.waiting)

    @concurrent_endpoint
    async def recompute_running(self, recompute: bool) -> None:
        """Set the config's field recompute_running."""
        self.engine.config = replace(self.engine.config, recompute_running=recompute)

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
        """The weights that every layer of the engine computes with.

        The weights have vLLM's names. In vLLM q, k and v are one weight, and gate and up are one weight.
        """
        return await self._held_weights()

    async def _held_weights(self) -> dict[str, Tensor]:
        """The weights that `held_weights` returns.

        On a CPU vLLM holds a weight W only in packed form. So this method gives the identity matrix to each
        layer. The output of the layer is exactly W^T.
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
    async def digests(self) -> dict[str, str]:
        """vLLM's own digest of every parameter, and a SHA-256 of every weight that the engine computes with."""
        engine = self.engine.engine
        own = self.engine.submit(lambda: engine.collective_rpc("compute_weight_checksums"))
        [found] = await asyncio.wrap_future(own)
        for name, weight in (await self._held_weights()).items():
            found[f"held {name}"] = hashlib.sha256(weight.contiguous().view(torch.uint8).numpy()).hexdigest()
        return found

    @concurrent_endpoint
    async def load_weights_of(self, path: str) -> None:
        """Replace all weights by the weights in a Hugging Face directory. vLLM's own loader reads them."""
        from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

        engine = self.engine.engine
        files = sorted(map(str, Path(path).glob("*.safetensors")))

        def load() -> None:
            [reloading] = engine.apply_model(lambda model: this_machine().reloading(model))
            read = safetensors_weights_iterator(files, use_tqdm_on_load=False)
            with reloading, weights.filtered_warnings(weights.is_of_a_layer_with_weights):
                engine.collective_rpc("reload_weights", kwargs={"weights_iterator": read})

        await asyncio.wrap_future(self.engine.submit(load))

    @concurrent_endpoint
    async def fail_load_after(self, num_tensors: int, message: str) -> None:
        """Make the next load of weights raise after `num_tensors` tensors."""
        whole = weights.cast_tensors

        def broken(version, dtype):
            weights.cast_tensors = whole
            yield from itertools.islice(whole(version, dtype), num_tensors)
            raise OSError(message)

        weights.cast_tensors = broken

    @concurrent_endpoint
    async def die_in_load(self, num_tensors: int) -> None:
        """Kill this process in the next load of weights, after `num_tensors` tensors."""
        whole = weights.cast_tensors

        def dying(version, dtype):
            yield from itertools.islice(whole(version, dtype), num_tensors)
            os.kill(os.getpid(), signal.SIGKILL)

        weights.cast_tensors = dying

    @concurrent_endpoint
    async def fail_next_forward(self, message: str) -> None:
        """Make vLLM's next step raise in the middle, after its scheduler has planned the step."""
        executor = self.engine.engine.model_executor

        def fail(*_, **__):
            del executor.execute_model
            raise RuntimeError(message)

        executor.execute_model = fail


@dataclass(frozen=True, kw_only=True)
class FailingTransport(Transport):
    """A transport that works like `inner`, except that every put of one rank fails half way."""

    inner: Transport
    failing_rank: int

    async def put_tensors(self, key, tensors, rank, dtype=None):
        if rank == self.failing_rank:
            half = dict(list(tensors.items())[: len(tensors) // 2])
            await self.inner.put_tensors(key, half, rank, dtype)
            raise OSError(f"rank {rank} lost its disk")
        return await self.inner.put_tensors(key, tensors, rank, dtype)

    async def discard_tensors(self, key, rank) -> None:
        await self.inner.discard_tensors(key, rank)

    async def source(self, manifest):
        return await self.inner.source(manifest)

    async def put_object(self, key, value) -> None:
        await self.inner.put_object(key, value)

    async def get_object(self, key):
        return await self.inner.get_object(key)

    async def delete(self, manifest) -> None:
        await self.inner.delete(manifest)


@dataclass(frozen=True, kw_only=True)
class UnreadableTensors(LoadedTensors):
    """Tensors whose `open` fails in one of vLLM's workers, or does not return in time if `hangs` is True."""

    worker: int
    hangs: bool = False

    def open(self):
        if dist.get_rank() == self.worker and self.hangs:
            time.sleep(GUARD)
        if dist.get_rank() == self.worker:
            raise OSError(f"worker {self.worker} lost its disk")
        return super().open()


class WorkersFail(MemoryTransport):
    """A transport with versions that one of vLLM's workers cannot open.

    The object "failing_worker" or "hanging_worker" in the transport is the number of this worker. None: no worker fails or hangs.
    """

    async def source(self, manifest):
        source = await super().source(manifest)
        failing, hanging = [await self.get_object(f"{how}_worker") for how in ("failing", "hanging")]
        if hanging is not None:
            return UnreadableTensors(
                source.loaded, source.stream, source.version, timeout=2.0, worker=hanging, hangs=True
            )
        if failing is not None:
            return UnreadableTensors(source.loaded, source.stream, source.version, worker=failing)
        return source


@dataclass(frozen=True, kw_only=True)
class DeadlyTensors(LoadedTensors):
    """Tensors that kill the reading process when it has read half of them."""

    def tensors(self):
        yield from itertools.islice(super().tensors(), len(self.loaded) // 2)
        os.kill(os.getpid(), signal.SIGKILL)


class ReadersDie(MemoryTransport):
    """A transport that kills a process in the middle of a load.

    The object "victim" in the transport is the name of this process.
    """

    async def source(self, manifest):
        source = await super().source(manifest)
        if await self.get_object("victim") != os.environ["RL_ACTORS_PROCESS"]:
            return source
        await self.put_object("victim", None)
        return DeadlyTensors(source.loaded, source.stream, source.version)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A loss that makes the trainer wait.

    The loss creates the file `name` in a folder, and returns when the folder has the file `open`.
    """

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
    """A loss that raises an exception that cannot be pickled. So only the text of the exception can be sent to the caller."""

    def __call__(self, logprobs_BL, *, loss_weights):
        raise UnpicklableError("it holds a lock", threading.Lock())


@dataclass(frozen=True, kw_only=True)
class FailingLoss:
    """A loss that fails on one rank."""

    rank: int
    message: str = "the loss is broken"

    def __call__(self, logprobs_BL, *, loss_weights):
        if torch.distributed.get_rank() == self.rank:
            raise ArithmeticError(self.message)
        return (logprobs_BL * loss_weights).sum(), {}
