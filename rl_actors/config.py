"""The configs of the trainer and the generator: plain dataclasses, importable without Monarch, vLLM or a GPU."""

import pkgutil
import re
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import tyro
from torchtitan.config import CompileConfig, ParallelismConfig

from rl_actors import layouts
from rl_actors.model_config import ModelConfig

MAX_VLLM_RANK = 512


@dataclass(kw_only=True)
class OptimizerConfig:
    """Which optimizer; its learning rate, betas, eps and weight decay come with each optim_step."""

    name: str = "AdamW"
    """AdamW, Adam, or the import path of a torch.optim.Optimizer: "torch.optim:SGD"."""
    arguments: dict[str, float | bool] = field(default_factory=dict)
    """Of its constructor, but for those that come with each optim_step: {"momentum": 0.9}."""
    groups: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Regular expression, searched in torchtitan's parameter names -> multipliers of learning rate and weight decay: {"norm": (1.0, 0.0)}.
    The first that matches holds the parameter; the rest has multipliers of 1."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """torch's implementation of AdamW and Adam; an import path takes its own from `arguments`."""

    def validate(self) -> None:
        """Raises ValueError naming the value and the limit for an optimizer that cannot be made."""
        if self.name not in ("AdamW", "Adam"):
            try:
                found = pkgutil.resolve_name(self.name) if ":" in self.name else None
            except (ImportError, AttributeError, ValueError) as error:
                raise ValueError(f"optimizer.name={self.name!r} cannot be imported: {error}") from None
            if not callable(found):
                raise ValueError(
                    f"optimizer.name={self.name!r}; it must be AdamW, Adam or an import path such as 'torch.optim:SGD'"
                )
        if taken := sorted({"lr", "betas", "eps", "weight_decay"} & set(self.arguments)):
            raise ValueError(f"optimizer.arguments has {taken[0]!r}, which comes with each optim_step")
        if ":" not in self.name and (taken := sorted({"fused", "foreach"} & set(self.arguments))):
            raise ValueError(f"optimizer.arguments has {taken[0]!r}, which optimizer.implementation says")
        self._require_arguments()
        for pattern, multipliers in self.groups.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"optimizer.groups has the pattern {pattern!r}: {error}") from None
            if not pattern:
                raise ValueError("optimizer.groups has an empty pattern; the rest is a group of its own")
            if len(multipliers) != 2 or not all(0 <= multiplier < float("inf") for multiplier in multipliers):
                raise ValueError(
                    f"optimizer.groups[{pattern!r}]={multipliers}; it must be two numbers of at least 0, finite: "
                    "multipliers of learning rate and weight decay"
                )

    def _require_arguments(self) -> None:
        """Raises ValueError with what its constructor says of the arguments."""
        import torch

        make = pkgutil.resolve_name(self.name) if ":" in self.name else getattr(torch.optim, self.name)
        try:
            made = make([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.0, **self.arguments)
        except Exception as error:
            raise ValueError(f"optimizer.arguments={self.arguments} does not fit {self.name}: {error}") from None
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(
                f"optimizer.name={self.name!r} makes a {type(made).__name__}, which is no torch.optim.Optimizer"
            )


@dataclass(kw_only=True)
class LoRAConfig:
    """Low-rank adapters on frozen weights (arXiv 2106.09685), in Tinker's terms."""

    rank: int = 0
    """Rank of the adapters; 0: none, every weight is trained."""
    alpha: float = 32.0
    """The adapters' output is scaled by alpha / rank."""
    train_attn: bool = True
    """Adapters on the attention's four projections."""
    train_mlp: bool = True
    """Adapters on the MLP's three projections."""
    train_unembed: bool = False
    """An adapter on the output projection."""
    seed: int = 0
    """Of the adapters' first values, which are the same in every layout."""
    sync: Literal["merged", "adapter"] = "merged"
    """What a push publishes. merged: whole weights with the adapters in them; adapter: the adapters alone, which the generator's vLLM
    applies to the weights of hf_path."""

    @property
    def syncs_adapter(self) -> bool:
        """Whether there are adapters and generators get them alone."""
        return self.rank > 0 and self.sync == "adapter"

    def validate(self, model: ModelConfig, hf_path: str) -> None:
        """Raises ValueError naming the value and the limit for adapters that this model cannot have."""
        if self.rank < 0 or not 0 < self.alpha < float("inf"):
            raise ValueError(f"lora.rank={self.rank}, lora.alpha={self.alpha}; rank must be at least 0, alpha positive")
        if not self.rank:
            return
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise ValueError(f"lora.rank={self.rank}, but train_attn, train_mlp and train_unembed are all False")
        if not hf_path:
            raise ValueError(f"lora.rank={self.rank} with an empty hf_path: a checkpoint holds the adapters alone")
        if self.syncs_adapter and self.rank > MAX_VLLM_RANK:
            raise ValueError(
                f'lora.rank={self.rank} with lora.sync="adapter"; vLLM takes at most {MAX_VLLM_RANK}, or sync them merged'
            )
        if self.train_unembed and model.tie_word_embeddings:
            raise ValueError(
                "lora.train_unembed=True with model.tie_word_embeddings=True: the merged head would not be tied"
            )
        if self.train_mlp and model.num_experts:
            raise ValueError(
                f"lora.train_mlp=True with model.num_experts={model.num_experts}: torchtitan has no adapters for experts"
            )


def _parallelism() -> ParallelismConfig:
    # "spmd_types", torchtitan's default, fails on torch 2.13 in every world larger than one process.
    return ParallelismConfig(data_parallel_shard_degree=1, spmd_backend="partial_dtensor")


@dataclass(kw_only=True)
class TrainerConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    """Not given, it is read from hf_path."""
    hf_path: str = ""
    """Hugging Face directory to load weights from; empty: random weights from `seed`."""
    tokenizer_path: str = ""
    """Directory whose tokenizer files checkpoints and exports hold, too; empty: hf_path."""
    parallelism: ParallelismConfig = field(default_factory=_parallelism)
    attention: Literal["flex", "flash4"] = "flex"
    """Attention kernel of a GPU: torch's flex attention, or FlashAttention 4 in bfloat16 (the package flash-attn-4, for Hopper and
    Blackwell). A CPU has one of its own."""
    activation_checkpointing: Literal["none", "products", "selective", "full"] = "none"
    """What the backward pass recomputes instead of storing. products: what lies between attention and matrix products; selective:
    every second matrix product as well; full: whole blocks."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    """torch.compile of the blocks, when it is enabled and "model" is among its components."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the forward and backward pass; parameters, gradients and optimizer state stay float32."""
    float8: bool = False
    """Linear layers of the blocks in float8 by torchao; emulated, for tests, on a machine without such hardware."""
    float8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """Scales of float8: one a tensor, with the fastest kernels; one a row; one a row with the weights' gradients in compute_dtype."""
    max_sequence_length: int = 4096
    """Longest sample in positions; longer ones are refused."""
    tokens_per_row: int = 4096
    """A row has at most this many positions, rounded down to a multiple of 64, or of 128 for each context-parallel rank."""
    rows_per_microbatch: int = 1
    """Rows that one forward and backward pass of a data-parallel rank takes, at most."""
    packing: layouts.Policy = "packed"
    """packed: samples share rows; token_budget: one sample a row, as many rows as have the positions of a microbatch's full rows;
    fixed: one sample a row."""
    logprob_chunk_tokens: int = 1024
    """Positions whose [tokens, vocabulary] logits exist at a time."""
    max_call_bytes: int = 1 << 30
    """Samples of one call may hold this many bytes."""
    optimizer: Annotated[OptimizerConfig | None, tyro.conf.AvoidSubcommands] = field(default_factory=OptimizerConfig)
    """None: a trainer that only infers, without gradients and optimizer state."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    load_balance_coeff: float = 0.0
    """Step of the routers' expert bias at every optim_step (arXiv 2408.15664); 0: no bias, which is how transformers and vLLM route."""
    seed: int = 0
    """Of the random weights."""
    deterministic: bool = False
    """Deterministic kernels only, at a cost in speed."""
    setup_timeout: float = 300.0
    """Seconds until the model must be built and loaded."""
    call_timeout: float = 600.0
    """Seconds until any other call must answer."""

    def __post_init__(self) -> None:
        if self.hf_path and self.model == ModelConfig():
            self.model = ModelConfig.from_hf(self.hf_path)

    def num_processes(self) -> int:
        """One per device of the layout. Raises ValueError for a degree below 1."""
        product = 1
        for name, degree in self.layout().items():
            if degree < 1:
                raise ValueError(f"parallelism.{name}_degree={degree}; it must be at least 1")
            product *= degree
        return product

    def layout(self) -> dict[str, int]:
        """Their product is the number of processes: {"data_parallel_shard": 2, "tensor_parallel": 4, ...}"""
        return {name: getattr(self.parallelism, f"{name}_degree") for name in layouts.DEGREES}

    def validate(self) -> None:
        """Raises ValueError naming the value and the limit for a config that no trainer can be built from."""
        model = self.model
        model.validate()
        if self.hf_path:
            model.require_same(self.hf_path)
        if self.optimizer is not None:
            self.optimizer.validate()
        self.lora.validate(model, self.hf_path)
        if self.float8 and self.lora.rank:
            raise ValueError(f"float8=True with lora.rank={self.lora.rank}; only one of them is supported")
        if self.float8 and model.num_experts:
            raise ValueError(f"float8=True with model.num_experts={model.num_experts}; only dense models are supported")
        compiles = self.compile.enable and "model" in self.compile.components
        if compiles and model.num_experts and self.compute_dtype == "float32":
            raise ValueError(
                f"compile.enable=True with model.num_experts={model.num_experts} and compute_dtype='float32': torch compiles the "
                "experts' grouped matrix products in bfloat16 alone"
            )
        if not 0 <= self.load_balance_coeff < float("inf"):
            raise ValueError(f"load_balance_coeff={self.load_balance_coeff}; it must be a number of at least 0, finite")
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
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}; it must be positive")
        layouts.validate(self)

    def require_hf(self, call: str) -> None:
        """Raises ValueError naming the call, the value and the reason for a model that Hugging Face's Qwen3, and so vLLM, cannot be."""
        if self.model.num_experts and self.load_balance_coeff:
            raise ValueError(
                f"{call} is not possible with load_balance_coeff={self.load_balance_coeff:g}: Hugging Face's Qwen3 has no place for "
                "the expert bias, so the weights would route otherwise there"
            )


@dataclass(kw_only=True)
class GeneratorConfig:
    model: Annotated[ModelConfig, tyro.conf.Suppress] = field(default_factory=ModelConfig)
    """In a run it is the trainer's."""
    lora: Annotated[LoRAConfig, tyro.conf.Suppress] = field(default_factory=LoRAConfig)
    """The adapters that a pull brings when lora.sync is "adapter"; in a run they are the trainer's."""
    hf_path: str = ""
    """Hugging Face directory of config.json and weights; empty: weights come with the first pull."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the weights and of the forward pass."""
    max_model_len: int = 4096
    """Longest prompt plus completion in tokens."""
    max_num_seqs: int = 256
    """Sequences that run at a time; further ones queue."""
    kv_cache_bytes: int | None = None
    """Memory of the key-value cache. None: on a CPU 256 MiB, on a GPU what is left of gpu_memory_utilization, which vLLM measures as it
    starts: nothing else may then take or free memory there."""
    gpu: int | None = None
    """Index of the GPU, among those that the program sees; None: the first, which it then shares with the trainer's first rank."""
    gpu_memory_utilization: float = 0.8
    """Share of the GPU's memory that the engine may take."""
    enforce_eager: bool = False
    """Run without CUDA graphs."""
    batch_invariant: bool = False
    """vLLM's batch-invariant mode, for GPUs of compute capability 9 and later, at a cost in speed: what a request with a seed of its own
    is answered does not depend on what runs beside it."""
    num_threads: int | None = None
    """CPU threads of the process. None: OMP_NUM_THREADS, else beside a GPU four and on a CPU as many as there are cores."""
    seed: int = 0
    """Of sampling without a seed of its own."""
    setup_timeout: float = 300.0
    """Seconds until the engine must be up."""
    call_timeout: float = 600.0
    """Seconds until any other call must answer."""

    @classmethod
    def of(cls, trainer: TrainerConfig) -> "GeneratorConfig":
        """A generator of the trainer's model and adapters, for sequences as long as its samples. Shares no object with the trainer's."""
        # A sample of T positions is a sequence of T + 1 tokens.
        longest = min(trainer.max_sequence_length + 1, trainer.model.max_position_embeddings)
        base = trainer.hf_path if trainer.lora.syncs_adapter else ""
        return cls(model=replace(trainer.model), lora=replace(trainer.lora), hf_path=base, max_model_len=longest)

    def validate(self) -> None:
        """Raises ValueError naming the value and the limit for a config that no engine can be started from."""
        names = ("max_model_len", "max_num_seqs", "kv_cache_bytes", "num_threads", "setup_timeout", "call_timeout")
        for name in names:
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"generator.{name}={getattr(self, name)}; it must be positive")
        if self.gpu is not None and self.gpu < 0:
            raise ValueError(f"generator.gpu={self.gpu}; it must be at least 0")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"generator.gpu_memory_utilization={self.gpu_memory_utilization}; it must be in (0, 1]")
        if self.lora.syncs_adapter and not self.hf_path:
            raise ValueError(
                'generator.hf_path is empty with lora.sync="adapter": the weights under the adapters come from there'
            )
        longest = self.model.max_position_embeddings
        if self.max_model_len > longest:
            raise ValueError(f"generator.max_model_len={self.max_model_len} exceeds max_position_embeddings={longest}")
