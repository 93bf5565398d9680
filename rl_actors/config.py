"""Configs of the trainer and the generator: plain dataclasses that can be imported without Monarch, vLLM or a GPU."""

import contextlib
import math
import pkgutil
import re
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import tyro
from torchtitan.config import CompileConfig, ParallelismConfig

from rl_actors import hub, layouts, validation
from rl_actors.field_types import require_field_types
from rl_actors.model_config import ModelConfig
from rl_actors.stop_tokens import stop_token_ids

MAX_VLLM_RANK = 512
"""Largest rank of an adapter in vLLM 0.32."""

DEGREES = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel")
"""Kinds of parallelism. The number of processes is the product of their degrees. Expert parallelism is not in the list, because it uses the
ranks of other kinds."""

PackingPolicy = Literal["packed", "token_budget", "fixed"]
HeadName = Literal["logprobs", "values"]


@dataclass(kw_only=True)
class OptimizerConfig:
    """Choice of the optimizer. Its learning rate, betas, eps and weight decay come with each optim_step."""

    name: str = "AdamW"
    """AdamW, Adam, or the import path of a torch.optim.Optimizer: "torch.optim:SGD"."""
    arguments: dict[str, float | bool] = field(default_factory=dict)
    """Arguments of the optimizer's constructor, without those that come with each optim_step: {"momentum": 0.9}."""
    groups: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Regular expression -> multipliers of learning rate and weight decay: {"norm": (1.0, 0.0)}. The expressions are matched anywhere in
    torchtitan's parameter names. A parameter belongs to the first expression that matches its name. If none matches, its multipliers are 1."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """torch's implementation of AdamW and Adam. If `name` is an import path, this field has no effect; `arguments` may then choose an
    implementation."""

    def validate(self) -> None:
        """Raises ValueError naming the value and the limit if the optimizer cannot be built."""
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
    """Low-rank adapters on frozen weights (arXiv 2106.09685). Every field that Tinker also has is named as in Tinker."""

    rank: int = 0
    """Rank of the adapters. 0: there are no adapters and every weight is trained."""
    alpha: float = 32.0
    """The output of an adapter is scaled by alpha / rank."""
    train_attn: bool = True
    """Adapters on the attention's four projections."""
    train_mlp: bool = True
    """Adapters on the MLP's three projections."""
    train_unembed: bool = False
    """An adapter on the output projection."""
    seed: int = 0
    """Seed of the adapters' initial values. The values are the same in every layout."""
    sync: Literal["merged", "adapter"] = "merged"
    """Content of a push of weights to the generators. merged: all weights, with the adapters merged into them. adapter:
    only the adapters; the generator's vLLM then applies them to the weights of hf_path."""

    @property
    def syncs_adapter(self) -> bool:
        """True if there are adapters and a push publishes only the adapters."""
        return self.rank > 0 and self.sync == "adapter"

    def validate(self, model: ModelConfig, hf_path: str) -> None:
        """Raises ValueError naming the value and the limit if this model cannot have these adapters."""
        validation.require_seed("lora.seed", self.seed)
        if self.rank < 0 or not 0 < self.alpha < float("inf"):
            raise ValueError(f"lora.rank={self.rank}, lora.alpha={self.alpha}; rank must be at least 0, alpha positive")
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
    # torchtitan's default, "spmd_types", fails on torch 2.13 with more than one process.
    return ParallelismConfig(data_parallel_shard_degree=1, spmd_backend="partial_dtensor")


@dataclass(kw_only=True)
class TrainerConfig:
    """Config of a trainer: model, layout, precision, packing, optimizer."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Dimensions of the model. If they are left at their defaults and hf_path is given, they are read from config.json in hf_path."""
    hf_path: str = ""
    """Hugging Face directory to load weights from; on the command line also the id of a model on the Hub. Empty: random weights from
    `seed`."""
    tokenizer_path: str = ""
    """Directory of tokenizer files. They are copied into checkpoints and exports. Empty: hf_path. In a run this field must be empty, because
    the run chooses the tokenizer."""
    head: HeadName = "logprobs"
    """Output of the model at each position. logprobs: log probabilities of tokens; the model is a language model. values: one number, the
    value of the tokens up to the position; the model is a value model, whose head starts at zero and is never tied to the embedding."""
    parallelism: ParallelismConfig = field(default_factory=_parallelism)
    attention: Literal["flex", "flash4"] = "flex"
    """Attention kernel on a GPU: torch's flex attention, or FlashAttention 4 in bfloat16 (the package flash-attn-4, for Hopper and
    Blackwell). On a CPU this field has no effect, because there is only one kernel."""
    activation_checkpointing: Literal["none", "products", "selective", "full"] = "none"
    """Activations that the forward pass stores. The backward pass recomputes the others. none: everything is stored, so nothing is
    recomputed. products: a block stores its input and the results of attention and of matrix products. selective: a block stores its
    input and the results of attention and of every second matrix product, but not the results of experts. full: a block stores only its
    input."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    """Options of torch.compile. The blocks are compiled if `enable` is True and "model" is among `components`."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the forward and backward pass. Parameters, gradients and optimizer state stay float32."""
    float8: bool = False
    """True: torchao computes the linear layers of the blocks in float8. On a machine without float8 hardware, float8 is emulated, for
    tests."""
    float8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """Scales of float8. tensorwise: one scale per tensor, with the fastest kernels. rowwise: one scale per row. rowwise_with_gw_hp: one
    scale per row, but the gradients of the weights are computed in compute_dtype."""
    max_sequence_length: int = 4096
    """Largest number of positions of a sample. A text of T + 1 tokens makes a sample of T positions. Longer samples are refused."""
    tokens_per_row: int = 4096
    """Largest number of positions in a row. A row is one sequence of the model's input, and holds one sample or several samples (see
    `packing`). This number is rounded down to a multiple of 64, or, under context or expert parallelism, to a multiple of the number that
    layouts.row_multiple gives."""
    rows_per_microbatch: int = 1
    """Largest number of rows of a microbatch. A microbatch is the input of one forward and backward pass on a data-parallel rank. With
    packing="token_budget" a microbatch may have more rows, up to tokens_per_row * rows_per_microbatch positions in total."""
    packing: PackingPolicy = "packed"
    """packed: samples share rows. token_budget: one sample per row; a microbatch has at most tokens_per_row * rows_per_microbatch
    positions. fixed: one sample per row; a microbatch has at most rows_per_microbatch rows."""
    logprob_chunk_tokens: int = 1024
    """Largest number of positions whose logits exist at the same time. Every position has one logit for each token of the vocabulary."""
    max_call_bytes: int = 1 << 30
    """Largest total size of the samples of one call, in bytes."""
    optimizer: Annotated[OptimizerConfig | None, tyro.conf.AvoidSubcommands] = field(default_factory=OptimizerConfig)
    """Config of the optimizer. None: the trainer only infers and has neither gradients nor optimizer state."""
    fsdp_cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in pinned host memory, and step the optimizer there. The GPU holds the weights of a few
    blocks at a time. This is slow, and meant for a model whose training state does not fit into the GPUs. It is possible only for dense
    models without float8, and data_parallel_shard must be the only kind of parallelism."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    load_balance_coeff: float = 0.0
    """Amount by which every optim_step changes the routers' expert biases (arXiv 2408.15664). 0: there are no biases, as in transformers
    and vLLM."""
    gpu: int | None = None
    """Index of the first rank's GPU among the GPUs that the program sees. The other ranks use the GPUs with the next indices. None: 0. This
    field has no effect on a CPU, or if the trainer runs in processes that exist already."""
    seed: int = 0
    """Seed of the random weights."""
    deterministic: bool = False
    """Use only deterministic kernels, which are slower."""
    setup_timeout: float = 300.0
    """Seconds in which the model must be built and loaded."""
    call_timeout: float = 600.0
    """Seconds in which every call after the setup must answer."""
    collective_timeout: float = 300.0
    """Seconds that a rank waits for another rank in a collective, with gloo and with NCCL. If a rank has to wait longer, the trainer counts
    as dead. The value should be below call_timeout. Sometimes one rank works while the other ranks wait, for example when it writes an
    export. The value should be above the longest time of such work."""

    def __post_init__(self) -> None:
        is_given = isinstance(self.hf_path, str) and self.hf_path
        if is_given and self.model == ModelConfig() and not hub.is_model_id(self.hf_path):
            # A command line shows an error of `validate` on one line, and an error of this method as a traceback. If the directory holds no
            # model, the error is therefore suppressed here, and `validate` raises it later.
            with contextlib.suppress(ValueError):
                self.model = ModelConfig.from_hf(self.hf_path)

    def num_processes(self) -> int:
        """Number of processes, one per device of the layout. Raises ValueError for a degree below 1."""
        product = 1
        for name, degree in self.layout().items():
            if degree < 1:
                raise ValueError(f"parallelism.{name}_degree={degree}; it must be at least 1")
            product *= degree
        return product

    @property
    def ties_head(self) -> bool:
        """True if the head has the weights of the embedding."""
        return self.model.tie_word_embeddings and self.head == "logprobs"

    def gpus(self) -> range:
        """Indices of the ranks' GPUs, on a machine that has GPUs."""
        first = self.gpu or 0
        return range(first, first + self.num_processes())

    def layout(self) -> dict[str, int]:
        """Degree of each kind of parallelism: {"data_parallel_shard": 2, "tensor_parallel": 4, ...}"""
        return {name: getattr(self.parallelism, f"{name}_degree") for name in DEGREES}

    def validate(self) -> None:
        """Raises ValueError naming the value and the limit if no trainer can be built from this config."""
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
        if self.gpu is not None and self.gpu < 0:
            raise ValueError(f"gpu={self.gpu}; it must be at least 0")
        if not 0 <= self.load_balance_coeff < float("inf"):
            raise ValueError(f"load_balance_coeff={self.load_balance_coeff}; it must be finite and at least 0")
        if self.max_sequence_length > model.max_position_embeddings:
            raise ValueError(
                f"max_sequence_length={self.max_sequence_length} exceeds model.max_position_embeddings={model.max_position_embeddings}"
            )
        for name in (
            "max_sequence_length",
            "rows_per_microbatch",
            "logprob_chunk_tokens",
            "max_call_bytes",
            "setup_timeout",
            "call_timeout",
            "collective_timeout",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}; it must be positive and finite")
        validation.require_seed("seed", self.seed)
        layouts.validate(self)

    def require_hf(self, call: str) -> None:
        """Raises ValueError if Hugging Face's format, which vLLM reads, cannot express this model. The error names the call, the value and the
        reason.
        """
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
    """Rules for actors that die: after how long a silent actor counts as dead, how often an actor is started again, and after which pauses."""

    max_per_hour: int = 10
    """Largest number of restarts of an actor in an hour. If the actor dies once more in that hour, it is not started again.
    It then counts as failed, with the error of its first death in that hour. A generator that has never been ready is started again at
    most twice. When all generators of a client have failed, every call raises the error of the generator with index 0. If
    max_per_hour is 0, an actor is never started again."""
    backoff: float = 1.0
    """Seconds between the second death of an hour and the restart after it. The pause doubles with every further death, up to a minute.
    After the first death there is no pause."""
    silent_after: float = 120.0
    """An actor that gives no sign of life for this number of seconds is killed. An actor gives no sign of life while its process does not
    answer. A generator also gives none while its engine runs a single step of vLLM or a single command, such as loading a version of the
    weights."""

    def validate(self, name: str) -> None:
        """Raises ValueError naming the field, its value and the limit. name: the name of the field that holds this policy."""
        for field_name in ("max_per_hour", "backoff"):
            value = getattr(self, field_name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name}.{field_name}={value}; it must be finite and at least 0")
        if not 1 <= self.silent_after < float("inf"):
            raise ValueError(f"{name}.silent_after={self.silent_after}; it must be finite and at least 1 second")


WeightsPath = Literal["auto", "cuda_ipc", "shared_memory", "point_to_point", "tcp"]


@dataclass(kw_only=True)
class WeightsConfig:
    """Config of the transfer of weights from a trainer to generators."""

    path: WeightsPath = "auto"
    """Path on which the weights travel. auto: the fastest path that trainer and generator share. cuda_ipc: from GPU to GPU of one host.
    shared_memory: within one host. point_to_point: between any two hosts, by NCCL between GPUs, else by gloo. tcp: between any two hosts.
    point_to_point and tcp also work within one host, so that they can be tried there. NCCL then needs two GPUs."""
    address: str = ""
    """Address at which every rank of the trainer serves weights to generators on other hosts. "hostname": the name of the rank's host. The
    bytes are not encrypted, so the network must be private. Empty: only generators on the trainer's host can read weights; tcp and
    point_to_point then use the loopback address."""
    timeout: float = 60.0
    """Seconds that each phase of a push or a pull may take: the wait for the lock of a slot (a rank's memory for one version), writing
    the slot, reading it, loading its weights into the engine."""

    def validate(self) -> None:
        """Raises ValueError naming the value and the limit."""
        require_field_types(self, "weights.")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"weights.timeout={self.timeout}; it must be positive and finite")


@dataclass(kw_only=True)
class GeneratorConfig:
    """Config of a generator: model, vLLM's limits and memory, device."""

    model: Annotated[ModelConfig, tyro.conf.Suppress] = field(default_factory=ModelConfig)
    """Dimensions of the model. In a run they are the trainer's."""
    lora: Annotated[LoRAConfig, tyro.conf.Suppress] = field(default_factory=LoRAConfig)
    """Adapters that a pull brings when lora.sync is "adapter". In a run they are the trainer's."""
    hf_path: str = ""
    """Hugging Face directory of config.json and weights. Empty: the weights come with the first pull."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end every completion, except with SamplingParams.ignore_stop. None: the stop tokens of hf_path. In a run, and with
    TrainerClient.spawn_generator, None means those of the trainer's tokenizer. () for a model without files."""
    tokenizer_path: Annotated[str, tyro.conf.Suppress] = ""
    """Directory of the tokenizer for prompts that are given as text. Empty: hf_path. In a run, and with TrainerClient.spawn_generator, it is
    the trainer's tokenizer."""
    max_adapters: int = 0
    """Largest number of different adapters that the requests of one step of the engine may use. `load_adapter` may load more. vLLM
    then moves adapters into and out of the device's memory, and a request waits until its adapter is there. 0: no adapters can be loaded."""
    max_adapter_rank: int = 32
    """Largest rank of an adapter of `load_adapter`. vLLM computes with every adapter as if it had this rank."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the weights and of the forward pass."""
    max_model_len: int = 4096
    """Largest number of tokens of a prompt and its completion together."""
    max_num_seqs: int = 256
    """Largest number of sequences that run at the same time. Others wait in a queue."""
    kv_cache_bytes: int | None = None
    """Bytes of the key-value cache. None: 256 MiB on a CPU. On a GPU, None gives the cache the memory that gpu_memory_utilization allows and
    that weights and activations do not need. vLLM measures this memory while it starts. Meanwhile nothing else may take or free memory of
    the GPU."""
    gpu: int | None = None
    """Index of the GPU among the GPUs that the program sees. None: 0. A trainer with gpu=None also uses GPU 0, so both then
    share this GPU."""
    gpu_memory_utilization: float = 0.8
    """Fraction of the GPU's memory that the engine may take."""
    enforce_eager: bool = False
    """Run without CUDA graphs."""
    batch_invariant: bool = False
    """vLLM's batch-invariant mode, for GPUs of compute capability 9 and later. In this mode the answer to a request with its own seed does
    not depend on the other requests in the batch. The mode is slower."""
    own_process: bool | None = None
    """Run vLLM's engine core in a process of its own, with asynchronous scheduling on a GPU. None: True on a GPU or with tensor_parallel
    above 1, otherwise False. On a CPU a process of its own is not faster, and the start takes 10 s longer."""
    replicas: int = 1
    """Number of engines with the same weights. Each has a process of its own. On a machine with GPUs each engine also has GPUs of its own.
    The first engine's GPUs begin at index `gpu`, and the GPUs of every other engine follow those of the engine before it."""
    tensor_parallel: int = 1
    """Number of vLLM's ranks that share every layer. On a machine with GPUs each rank has one GPU. The GPUs of an engine's ranks
    have consecutive indices. With one engine they begin at `gpu`; with several engines see `replicas`."""
    sleep_mode: bool = False
    """Makes `sleep` possible: vLLM takes the memory of its weights and its cache from an allocator that can release it. On a CPU nothing is
    released."""
    recompute_running: bool = True
    """After a pull, compute the cached keys and values of running requests again, so that all later tokens are exactly the new policy's.
    False: running requests keep the keys and values of the old weights, so nothing is computed again. New requests never use old keys and
    values."""
    num_threads: int | None = None
    """CPU threads of the process. None: the value of OMP_NUM_THREADS. If this variable is not set: four on a machine with a GPU, one per core
    on other machines."""
    seed: int = 0
    """Seed of requests that have no seed of their own."""
    setup_timeout: float = 300.0
    """Seconds in which the engine must start."""
    call_timeout: float = 600.0
    """Seconds in which every call after the setup must answer. A `generate` may take longer: the limit is on each wait for the next finished
    prompt."""
    restarts: Annotated[RestartPolicy, tyro.conf.Suppress] = field(default_factory=RestartPolicy)
    """Rules for the restarts of every generator that the client has spawned. In a run the config field `survival` sets them."""

    def gpus(self, num_hosts: int = 1) -> range:
        """Indices of the GPUs of all replicas, on a machine that has GPUs.

        num_hosts: number of hosts over which the replicas are spread. With several hosts these are the GPUs of the host with the most replicas.
        """
        first = self.gpu or 0
        num_replicas = math.ceil(self.replicas / num_hosts)
        return range(first, first + num_replicas * self.tensor_parallel)

    @property
    def has_adapters(self) -> bool:
        """True if vLLM applies adapters to the weights."""
        return self.max_adapters > 0 or self.lora.syncs_adapter

    def adapters_field(self) -> str:
        """The name and the value of the field that makes vLLM apply adapters, for error texts."""
        return 'lora.sync="adapter"' if self.lora.syncs_adapter else f"generator.max_adapters={self.max_adapters}"

    @classmethod
    def of(cls, trainer: TrainerConfig) -> "GeneratorConfig":
        """Config of a generator for the trainer's model and adapters. The configs of model and adapters are copies.

        max_model_len is the number of tokens of the trainer's longest samples, or the model's number of positions if that is smaller.
        The stop tokens are those of the trainer's tokenizer_path or hf_path.
        """
        # A sample of T positions is a sequence of T + 1 tokens.
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
        """Raises ValueError naming the value and the limit if no engine can be started from this config."""
        require_field_types(self, "generator.")
        self.model.validate()
        hub.require_directory("generator.hf_path", self.hf_path)
        hub.require_directory("generator.tokenizer_path", self.tokenizer_path)
        names = (
            "max_model_len",
            "max_num_seqs",
            "kv_cache_bytes",
            "replicas",
            "tensor_parallel",
            "num_threads",
            "setup_timeout",
            "call_timeout",
        )
        for name in names:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"generator.{name}={value}; it must be positive and finite")
        validation.require_seed("generator.seed", self.seed)
        self.restarts.validate("generator.restarts")
        self._validate_adapters()
        if self.own_process is False and self.tensor_parallel > 1:
            raise ValueError(
                f"generator.own_process=False with generator.tensor_parallel={self.tensor_parallel}: several ranks need processes of "
                "their own"
            )
        if self.gpu is not None and self.gpu < 0:
            raise ValueError(f"generator.gpu={self.gpu}; it must be at least 0")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"generator.gpu_memory_utilization={self.gpu_memory_utilization}; it must be in (0, 1]")
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

    def _validate_adapters(self) -> None:
        if self.max_adapters < 0:
            raise ValueError(f"generator.max_adapters={self.max_adapters}; it must be at least 0")
        if not 1 <= self.max_adapter_rank <= MAX_VLLM_RANK:
            raise ValueError(f"generator.max_adapter_rank={self.max_adapter_rank}; it must be 1 to {MAX_VLLM_RANK}")
        if self.max_adapters and self.lora.syncs_adapter:
            raise ValueError(
                f'generator.max_adapters={self.max_adapters} with lora.sync="adapter": a generator has either the adapter that it pulls '
                "or adapters of load_adapter"
            )
