"""Configs of the trainer and the generator, importable without Monarch, vLLM or a GPU."""

import contextlib
import math
import os
import pkgutil
import re
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
import tyro
from annotated_types import Interval
from torchtitan.config import CompileConfig, ParallelismConfig

from rl_actors import hub, layouts, memory_estimate, validation
from rl_actors.field_types import NaturalInt, NonNegativeFloat, PositiveFloat, PositiveInt, require_field_types
from rl_actors.model_config import ModelConfig
from rl_actors.texts import stop_token_ids

SHARED_GPU_PARAMETERS = 3_000_000_000  # largest model for which engines share a GPU by default
SHARED_GPU_SEQUENCES = 128  # least max_num_seqs for two engines on a GPU
SHARED_GPU_CORES = 8  # least cores of the host for engines that share a GPU

MAX_VLLM_RANK = 512
"""Largest rank of an adapter in vLLM 0.32."""

DEGREES = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel")
"""Kinds of parallelism whose degrees multiply to the number of processes."""

PackingPolicy = Literal["packed", "token_budget", "fixed"]
HeadName = Literal["logprobs", "values"]


@dataclass(kw_only=True)
class OptimizerConfig:
    """The optimizer. Learning rate, betas, eps and weight decay come with each optim_step."""

    name: str = "AdamW"
    """AdamW, Adam, or an import path such as "torch.optim:SGD"."""
    arguments: dict[str, float | bool] = field(default_factory=dict)
    """Other arguments of the constructor, such as {"momentum": 0.9}."""
    groups: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Regular expression over torchtitan's parameter names -> multipliers of learning rate and
    weight decay, such as {"norm": (1.0, 0.0)}. The first match counts; without one they are 1.
    """
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """torch's implementation of AdamW and Adam; for an import path see `arguments`."""

    def validate(self) -> None:
        """Raises ValueError if the optimizer cannot be built."""
        if self.name not in ("AdamW", "Adam"):
            try:
                found = pkgutil.resolve_name(self.name) if ":" in self.name else None
            except (ImportError, AttributeError, ValueError) as error:
                raise ValueError(f"optimizer.name={self.name!r} cannot be imported: {error}") from None
            if not callable(found):
                raise ValueError(
                    f"optimizer.name={self.name!r}; it must be AdamW, Adam or an import path such as 'torch.optim:SGD'"
                )
        for argument in ("betas", "eps", "lr", "weight_decay"):
            if argument in self.arguments:
                raise ValueError(f"optimizer.arguments has {argument!r}, which comes with each optim_step")
        for argument in ("foreach", "fused"):
            if argument in self.arguments and ":" not in self.name:
                raise ValueError(f"optimizer.arguments has {argument!r}, which optimizer.implementation sets")
        validation.validate_optimizer_arguments(self)
        for pattern, multipliers in self.groups.items():
            _validate_group(pattern, multipliers)


def _validate_group(pattern: str, multipliers: tuple[float, float]) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"optimizer.groups has the pattern {pattern!r}: {error}") from None
    if not pattern:
        raise ValueError("optimizer.groups has an empty pattern, which every name matches; leave it out")
    if len(multipliers) != 2 or not all(0 <= multiplier < float("inf") for multiplier in multipliers):
        raise ValueError(
            f"optimizer.groups[{pattern!r}]={multipliers}; it must be two finite numbers of at least 0: "
            "multipliers of learning rate and weight decay"
        )


@dataclass(kw_only=True)
class LoRAConfig:
    """Low-rank adapters on frozen weights (arXiv 2106.09685), with Tinker's names."""

    rank: NaturalInt = 0
    """0: no adapters, all weights are trained."""
    alpha: PositiveFloat = 32.0
    """An adapter's output is scaled by alpha / rank."""
    train_attn: bool = True
    """Adapters on the four projections of attention."""
    train_mlp: bool = True
    """Adapters on the three projections of the MLP."""
    train_unembed: bool = False
    """An adapter on the output projection."""
    seed: int = 0
    """Seed of the adapters' initial values."""
    sync: Literal["merged", "adapter"] = "merged"
    """What a push publishes. merged: all weights, with adapters merged. adapter: only the adapters,
    which vLLM applies to the weights of hf_path.
    """

    @property
    def syncs_adapter(self) -> bool:
        return self.rank > 0 and self.sync == "adapter"

    def validate(self, model: ModelConfig, hf_path: str) -> None:
        """Raises ValueError if this model cannot have these adapters."""
        validation.require_seed("lora.seed", self.seed)
        if not self.rank:
            return
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise ValueError(f"lora.rank={self.rank}, but train_attn, train_mlp and train_unembed are all False")
        if not hf_path:
            raise ValueError(
                f"lora.rank={self.rank} with an empty hf_path: a checkpoint holds only the adapters, so the weights under them "
                "must come from a directory"
            )
        if self.syncs_adapter and self.rank > MAX_VLLM_RANK:
            raise ValueError(
                f'lora.rank={self.rank} with lora.sync="adapter"; vLLM takes at most {MAX_VLLM_RANK}. '
                'lora.sync="merged" takes any rank'
            )
        if self.train_unembed and model.tie_word_embeddings:
            raise ValueError(
                "lora.train_unembed=True with model.tie_word_embeddings=True: the adapter would change the head but not the "
                "embedding, so they would not be tied any more"
            )
        if self.train_mlp and model.num_experts:
            raise ValueError(
                f"lora.train_mlp=True with model.num_experts={model.num_experts}: torchtitan has no adapters for experts"
            )


def _parallelism() -> ParallelismConfig:
    # torchtitan's default, "spmd_types", fails on torch 2.13 with several processes
    return ParallelismConfig(data_parallel_shard_degree=1, spmd_backend="partial_dtensor")


@dataclass(kw_only=True)
class TrainerConfig:
    """A trainer: model, layout, precision, packing, optimizer."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Dimensions of the model. Left at the defaults, they are read from hf_path, if given."""
    hf_path: str = ""
    """Hugging Face directory of the weights; on the command line also an id on the Hub. Empty:
    random weights from `seed`.
    """
    tokenizer_path: str = ""
    """Directory of tokenizer files, copied into checkpoints and exports. Empty: hf_path. Must be
    empty in a run, which chooses the tokenizer.
    """
    head: HeadName = "logprobs"
    """logprobs: a language model. values: a value model, with one number for each position; its
    head starts at zero and is not tied.
    """
    parallelism: ParallelismConfig = field(default_factory=_parallelism)
    attention: Literal["flex", "flash4"] = "flex"
    """Kernel on a GPU: torch's flex attention, or FlashAttention 4 in bfloat16 (flash-attn-4,
    Hopper and Blackwell).
    """
    activation_checkpointing: Literal["none", "products", "selective", "full"] = "none"
    """What a block stores for the backward pass. none: everything. products: its input, attention
    and all matrix products. selective: its input, attention and every second product, but none of
    experts. full: its input.
    """
    compile: CompileConfig = field(default_factory=CompileConfig)
    """torch.compile. Blocks are compiled if `enable` and "model" is among `components`."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of forward and backward. Parameters, gradients and optimizer state stay float32."""
    float8: bool = False
    """Linear layers of the blocks in float8, by torchao; without float8 hardware emulated, for
    tests.
    """
    float8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """Scales of float8: tensorwise (fastest), rowwise, or rowwise_with_gw_hp, with gradients of
    weights in compute_dtype.
    """
    max_sequence_length: PositiveInt = 4096
    """Longest sample in positions (T + 1 tokens make T). Longer ones are refused."""
    tokens_per_row: int = 4096
    """Longest row in positions, rounded down to a multiple of 64, or of layouts.row_multiple under
    context or expert parallelism.
    """
    rows_per_microbatch: PositiveInt = 1
    """Most rows of a microbatch on a data-parallel rank; packing="token_budget" may have more."""
    packing: PackingPolicy = "packed"
    """packed: samples share rows. token_budget: a sample in each row, at most tokens_per_row *
    rows_per_microbatch positions. fixed: a sample in each row.
    """
    logprob_chunk_tokens: PositiveInt = 1024
    """Most positions whose logits exist at the same time."""
    max_call_bytes: PositiveInt = 1 << 30
    """Most bytes of samples in one call."""
    optimizer: Annotated[OptimizerConfig | None, tyro.conf.AvoidSubcommands] = field(default_factory=OptimizerConfig)
    """The optimizer. None: the trainer only infers."""
    fsdp_cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in pinned host memory: slow, for states that do
    not fit the GPUs. Only dense models without float8 and with data_parallel_shard alone.
    """
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    load_balance_coeff: NonNegativeFloat = 0.0
    """Change of the routers' expert biases at every optim_step (arXiv 2408.15664). 0: no biases, as
    in transformers and vLLM.
    """
    gpu: NaturalInt | None = None
    """Index of the first rank's GPU; the other ranks follow. None: 0. Ignored on a CPU and in
    processes that exist already.
    """
    seed: int = 0
    """Seed of random weights."""
    deterministic: bool = False
    """Only deterministic kernels, which are slower."""
    setup_timeout: PositiveFloat = 300.0
    """Seconds to build and load the model."""
    call_timeout: PositiveFloat = 600.0
    """Seconds for every later call."""
    collective_timeout: PositiveFloat = 300.0
    """Seconds that a rank waits in a collective before the trainer counts as dead. Below
    call_timeout, above the longest work of one rank alone, such as writing an export.
    """

    def __post_init__(self) -> None:
        is_given = isinstance(self.hf_path, str) and self.hf_path
        if is_given and self.model == ModelConfig() and not hub.is_model_id(self.hf_path):
            # a command line shows an error of `validate` on one line, but of this method as a
            # traceback
            with contextlib.suppress(ValueError):
                self.model = ModelConfig.from_hf(self.hf_path)

    def num_processes(self) -> int:
        """Number of processes, one per device. Raises ValueError for a degree below 1."""
        product = 1
        for name, degree in self.layout().items():
            if degree < 1:
                raise ValueError(f"parallelism.{name}_degree={degree}; it must be at least 1")
            product *= degree
        return product

    @property
    def ties_head(self) -> bool:
        """True if the head has the embedding's weights."""
        return self.model.tie_word_embeddings and self.head == "logprobs"

    def gpus(self) -> range:
        """Indices of the ranks' GPUs, if there are GPUs."""
        first = self.gpu or 0
        return range(first, first + self.num_processes())

    def layout(self) -> dict[str, int]:
        """Degree of each kind of parallelism, such as {"data_parallel_shard": 2, ...}."""
        return {name: getattr(self.parallelism, f"{name}_degree") for name in DEGREES}

    def validate(self) -> None:
        """Raises ValueError if no trainer can be built from this config."""
        require_field_types(self)
        model = self.model
        model.validate()
        if self.hf_path:
            hub.require_directory("hf_path", self.hf_path)
            model.require_same(self.hf_path)
        if self.optimizer is not None:
            self.optimizer.validate()
        self.lora.validate(model, self.hf_path)
        if self.head == "values" and self.lora.rank:
            raise ValueError(
                f"head='values' with lora.rank={self.lora.rank}: adapters freeze all other weights, and the head of a value model "
                "must train"
            )
        if self.float8 and self.lora.rank:
            raise ValueError(f"float8=True with lora.rank={self.lora.rank}; only one of them is supported")
        if self.float8 and model.num_experts:
            raise ValueError(f"float8=True with model.num_experts={model.num_experts}; only dense models are supported")
        compiles_blocks = self.compile.enable and "model" in self.compile.components
        if compiles_blocks and model.num_experts and self.compute_dtype == "float32":
            raise ValueError(
                f"compile.enable=True with model.num_experts={model.num_experts} and compute_dtype='float32': torch compiles the "
                "experts' grouped matrix products only in bfloat16"
            )
        if self.max_sequence_length > model.max_position_embeddings:
            raise ValueError(
                f"max_sequence_length={self.max_sequence_length} exceeds model.max_position_embeddings={model.max_position_embeddings}"
            )
        validation.require_seed("seed", self.seed)
        layouts.validate(self)

    def require_hf(self, call: str) -> None:
        """Raises ValueError if Hugging Face's format, which vLLM reads, cannot express this model."""
        if self.head == "values":
            raise ValueError(
                f"{call} is not possible with head='values': a generator samples from a language model, not from values"
            )
        if self.model.num_experts and self.load_balance_coeff:
            raise ValueError(
                f"{call} is not possible with load_balance_coeff={self.load_balance_coeff:g}: Hugging Face's Qwen3 has no expert "
                "bias, so it would route tokens differently with these weights"
            )


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When a silent actor counts as dead, and when a dead one is started again."""

    max_per_hour: NaturalInt = 10
    """Most restarts of an actor in an hour; with one more death it has failed, with its first
    error. A generator that was never ready is restarted at most twice. When all have failed, calls
    raise the error of generator 0. 0: no restarts.
    """
    backoff: NonNegativeFloat = 1.0
    """Seconds before the restart after an hour's second death, doubled with every further one up to
    a minute. None after the first.
    """
    silent_after: Annotated[float, Interval(ge=1)] = 120.0
    """Seconds without a sign of life after which an actor is killed: its process does not answer,
    or a generator's engine is in one step or command, such as a load of weights.
    """


WeightsPath = Literal["auto", "cuda_ipc", "shared_memory", "point_to_point", "tcp"]


@dataclass(kw_only=True)
class WeightsConfig:
    """The way of weights from a trainer to generators."""

    path: WeightsPath = "auto"
    """auto: the fastest that both ends share. Within a host: cuda_ipc (GPU to GPU), shared_memory.
    Between any two, also within one: point_to_point (NCCL between GPUs, which then needs two, else
    gloo), tcp.
    """
    address: str = ""
    """Address at which ranks serve weights to other hosts, unencrypted, so in a private network;
    "hostname": the host's name. Empty: only to generators on the same host.
    """
    timeout: PositiveFloat = 60.0
    """Seconds for each phase of a push or a pull: a slot's lock, writing, reading, loading."""

    def validate(self) -> None:
        require_field_types(self, "weights.")


@dataclass(kw_only=True)
class GeneratorConfig:
    """A generator: model, vLLM's limits and memory, device."""

    model: Annotated[ModelConfig, tyro.conf.Suppress] = field(default_factory=ModelConfig)
    """Dimensions of the model. In a run the trainer's."""
    lora: Annotated[LoRAConfig, tyro.conf.Suppress] = field(default_factory=LoRAConfig)
    """Adapters of a pull if lora.sync is "adapter". In a run the trainer's."""
    hf_path: str = ""
    """Hugging Face directory of config.json and weights. Empty: a first pull brings the weights."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end every completion, unless SamplingParams.ignore_stop. None: those of hf_path,
    or in a run and with spawn_generator of the trainer's tokenizer. () without files.
    """
    tokenizer_path: Annotated[str, tyro.conf.Suppress] = ""
    """Directory of the tokenizer for prompts as text. Empty: hf_path, or in a run and with
    spawn_generator the trainer's tokenizer.
    """
    max_adapters: NaturalInt = 0
    """Most adapters that one engine step may use. More may be loaded; vLLM then swaps them, and
    requests wait. 0: none can be loaded.
    """
    max_adapter_rank: Annotated[int, Interval(ge=1, le=MAX_VLLM_RANK)] = 32
    """Largest rank of an adapter of `load_adapter`. vLLM computes all adapters with it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of weights and forward pass."""
    quantization: Literal["fp8"] | None = None
    """fp8: the linear layers of the blocks compute in float8 E4M3, with a scale for each output
    channel of the weights and each token. A pull quantizes its weights anew. Needs a GPU.
    """
    max_model_len: PositiveInt = 4096
    """Longest prompt with its completion, in tokens."""
    max_num_seqs: PositiveInt = 256
    """Most sequences that run at the same time. Others wait."""
    kv_cache_bytes: PositiveInt | None = None
    """Bytes of the KV cache. None: 256 MiB on a CPU; on a GPU what weights and activations leave of
    gpu_memory_utilization, measured at the start, when nothing else may change the GPU's memory
    use.
    """
    gpu: NaturalInt | None = None
    """Index of the GPU. None: 0, which a trainer with gpu=None shares."""
    gpu_memory_utilization: Annotated[float, Interval(gt=0, le=1)] = 0.8
    """Share of the GPU's memory for the engine."""
    enforce_eager: bool = False
    """Without CUDA graphs."""
    batch_invariant: bool = False
    """A seeded request's answer does not depend on the batch. Slower; needs compute capability 9.
    """
    own_process: bool | None = None
    """vLLM's engine core in a process of its own, asynchronous on a GPU. None: on a GPU or with
    tensor_parallel above 1. On a CPU no faster, and the start takes 10 s longer.
    """
    replicas: PositiveInt = 1
    """Engines with the same weights, each with a process and GPUs of its own, from `gpu` on."""
    tensor_parallel: PositiveInt = 1
    """vLLM's ranks that share every layer, on consecutive GPUs."""
    engines_per_gpu: PositiveInt | None = None
    """Engines of each replica on its GPUs; while one waits for the host, another computes. Each has
    an equal share of max_num_seqs and gpu_memory_utilization. None: see `engines`.
    """
    shares_gpu: Annotated[bool, tyro.conf.Suppress] = False
    """Other processes start on its GPU at the same time, so the size of the KV cache is estimated
    and not measured. Set by a run, and for several engines on a GPU.
    """
    sleep_mode: bool = False
    """Makes `sleep` possible, which releases the memory of weights and cache (on a CPU nothing)."""
    recompute_running: bool = True
    """After a pull recompute the KV cache of running requests, so that later tokens are exactly the
    new policy's. False: they keep the old cache; new requests never use it.
    """
    num_threads: PositiveInt | None = None
    """CPU threads of the process. None: OMP_NUM_THREADS, or four with a GPU, else one per core."""
    seed: int = 0
    """Seed of requests without one."""
    setup_timeout: PositiveFloat = 300.0
    """Seconds to start the engine."""
    call_timeout: PositiveFloat = 600.0
    """Seconds for every later call, in `generate` for each wait for the next finished prompt."""
    restarts: Annotated[RestartPolicy, tyro.conf.Suppress] = field(default_factory=RestartPolicy)
    """Restarts of spawned generators. In a run `survival` sets them."""

    def gpus(self, num_hosts: int = 1) -> range:
        """Indices of all replicas' GPUs, with several hosts of the one with the most replicas."""
        first = self.gpu or 0
        num_replicas = math.ceil(self.replicas / num_hosts)
        return range(first, first + num_replicas * self.tensor_parallel)

    @property
    def num_engines(self) -> int:
        return self.replicas * self.engines()[0]

    def engines(self) -> tuple[int, str]:
        """(Engines of each replica, why): engines_per_gpu, or by this machine and the model."""
        if self.engines_per_gpu is not None:
            return self.engines_per_gpu, f"generator.engines_per_gpu={self.engines_per_gpu}"
        if not torch.cuda.is_available():
            return 1, "engines on a CPU would share its cores"
        model = ModelConfig.from_hf(self.hf_path) if self.hf_path else self.model
        size = memory_estimate.num_parameters(TrainerConfig(model=model))
        cores = len(os.sched_getaffinity(0))
        if self.tensor_parallel > 1:
            return 1, f"generator.tensor_parallel={self.tensor_parallel}"
        if size > SHARED_GPU_PARAMETERS:
            return 1, f"{size / 1e9:.1f} billion parameters keep the GPU busy"
        if self.max_num_seqs < SHARED_GPU_SEQUENCES:
            return 1, f"generator.max_num_seqs={self.max_num_seqs} is below {SHARED_GPU_SEQUENCES}"
        if cores < SHARED_GPU_CORES:
            return 1, f"{cores} cores are below {SHARED_GPU_CORES}"
        return 2, f"{size / 1e9:.1f} billion parameters, {self.max_num_seqs} sequences, {cores} cores"

    @property
    def has_adapters(self) -> bool:
        """True if vLLM applies adapters."""
        return self.max_adapters > 0 or self.lora.syncs_adapter

    def adapters_field(self) -> str:
        """The field that makes vLLM apply adapters, for error texts."""
        return 'lora.sync="adapter"' if self.lora.syncs_adapter else f"generator.max_adapters={self.max_adapters}"

    @classmethod
    def of(cls, trainer: TrainerConfig) -> "GeneratorConfig":
        """A generator for the trainer's model and adapters, which are copied, its stop tokens, and its
        longest samples.
        """
        # T positions are T + 1 tokens
        longest = min(trainer.max_sequence_length + 1, trainer.model.max_position_embeddings)
        base = trainer.hf_path if trainer.lora.syncs_adapter else ""
        return cls(
            model=replace(trainer.model),
            lora=replace(trainer.lora),
            hf_path=base,
            stop_token_ids=stop_token_ids(trainer.tokenizer_path or trainer.hf_path),
            tokenizer_path=trainer.tokenizer_path or trainer.hf_path,
            max_model_len=longest,
        )

    def validate(self) -> None:
        """Raises ValueError if no engine can be started from this config."""
        require_field_types(self, "generator.")
        self.model.validate()
        hub.require_directory("generator.hf_path", self.hf_path)
        hub.require_directory("generator.tokenizer_path", self.tokenizer_path)
        validation.require_seed("generator.seed", self.seed)
        if self.max_adapters and self.lora.syncs_adapter:
            raise ValueError(
                f'generator.max_adapters={self.max_adapters} with lora.sync="adapter": a generator has either the adapter that it pulls '
                "or adapters of load_adapter"
            )
        if self.own_process is False and self.tensor_parallel > 1:
            raise ValueError(
                f"generator.own_process=False with generator.tensor_parallel={self.tensor_parallel}: several ranks need processes of "
                "their own"
            )
        if self.quantization is not None and self.model.num_experts:
            raise ValueError(
                f'generator.quantization="{self.quantization}" with model.num_experts={self.model.num_experts}; only dense models '
                "are supported"
            )
        if self.lora.syncs_adapter and not self.hf_path:
            raise ValueError(
                'generator.hf_path is empty with lora.sync="adapter": the generator must load the frozen weights from hf_path'
            )
        if any(not 0 <= token < self.model.vocab_size for token in self.stop_token_ids or ()):
            raise ValueError(
                f"generator.stop_token_ids={self.stop_token_ids}; the model has the tokens 0 to {self.model.vocab_size - 1}"
            )
        longest = self.model.max_position_embeddings
        if self.max_model_len > longest:
            raise ValueError(f"generator.max_model_len={self.max_model_len} exceeds max_position_embeddings={longest}")
