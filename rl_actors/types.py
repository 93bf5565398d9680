"""Values that a caller and the actors send to each other: frozen dataclasses of CPU tensors and
scalars.

Imports neither torch.distributed nor Monarch nor vLLM. T positions of a sample, C completion
tokens, K target ids at a position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_actors.metrics import Partials
from rl_actors.parts import HostMove

IGNORE_TARGET = -100
"""Target id of padding and masked positions, where the logprob and all columns are 0."""

TOP_K_COLUMNS = {"target_ids": torch.int64, "target_weights": torch.float32}
"""Columns of shape [T, K], K the same in all samples of a call. Other columns are [T] float32."""

MAX_NAMES_REPORTED = 10
"""Most parameter names that an error or a result lists."""

FIRST_TENANT = ""
"""Name of the tenant that a trainer has from the start."""


def column_dtype(name: str) -> torch.dtype:
    return TOP_K_COLUMNS.get(name, torch.float32)


def require_convertible(what: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError unless the tensor can become a dense CPU tensor of this dtype: no bool,
    complex, sparse, nested, quantized or meta tensor, and no float as a token id.
    """
    is_dense = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)
    loses_fraction = tensor.is_floating_point() and not dtype.is_floating_point and tensor.numel() > 0
    if not is_dense or tensor.dtype == torch.bool or tensor.is_complex() or loses_fraction:
        raise ValueError(
            f"{what} has dtype {tensor.dtype}, layout {tensor.layout} and device {tensor.device}; "
            f"it must be a dense tensor of {str(dtype).removeprefix('torch.')} numbers"
        )


def _tensor(what: str, values: object) -> Tensor:
    # torch would make numbers of bools in a mixed list
    if isinstance(values, list | tuple) and bool in set(map(type, values)):
        raise ValueError(f"{what} holds a bool; it must hold numbers")
    return torch.as_tensor(values)


def _cast(what: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    require_convertible(what, tensor, dtype)
    return tensor.to("cpu", dtype)


class CollectiveTimeoutError(TimeoutError):
    """A rank has waited too long for another in a collective; later collectives fail, too."""


class NonFiniteError(ValueError):
    """Weights or logprobs are NaN or infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training sequence. Position i reads `tokens[i]` and predicts `targets[i]`, to which entry
    i of every column belongs.

    >>> Sample.from_tokens([5, 6], [7, 8], advantages=0.5).targets
    tensor([6, 7, 8])
    """

    tokens: Tensor  # [T] int64
    targets: Tensor  # [T] int64
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # [T] float32, except TOP_K_COLUMNS
    temperature: float = 1.0  # logprobs are of logits / temperature

    @classmethod
    def from_tokens(
        cls,
        prompt: Sequence[int],
        completion: Sequence[int],
        *,
        temperature: float = 1.0,
        **columns: float | Sequence[float] | Sequence[Sequence[float]] | Tensor,
    ) -> "Sample":
        """A prompt and its completion, with the targets shifted by one. No other code shifts
        tokens.

        A column is one number, or C numbers ([C, K] for TOP_K_COLUMNS), and 0 where the target
        belongs to the prompt. loss_weights default to 1.

        from_tokens([5, 6], [7, 8], advantages=2.0) -> tokens [5, 6, 7], targets [6, 7, 8],
        advantages [0, 2, 2], loss_weights [0, 1, 1]

        Raises ValueError for an empty prompt or completion, a column of a wrong shape, or a value
        that is no number or token id.
        """
        if len(prompt) == 0 or len(completion) == 0:
            raise ValueError(
                f"prompt has {len(prompt)} tokens and completion has {len(completion)}; both need at least 1"
            )
        ids = {"prompt": prompt, "completion": completion}
        tokens = torch.cat([_cast(name, _tensor(name, values), torch.int64) for name, values in ids.items()])
        num_positions = len(tokens) - 1
        num_completion = len(completion)
        full: dict[str, Tensor] = {}
        for name, values in {"loss_weights": 1.0, **columns}.items():
            values = _tensor(f"column {name!r}", values)
            has_right_rank = values.ndim == 2 if name in TOP_K_COLUMNS else values.ndim < 2
            if not has_right_rank or (values.ndim and len(values) != num_completion):
                raise ValueError(
                    f"column {name!r} has shape {tuple(values.shape)}, but the completion has {num_completion} tokens"
                )
            values = _cast(f"column {name!r}", values, column_dtype(name))
            full[name] = torch.zeros(num_positions, *values.shape[1:], dtype=values.dtype)
            full[name][-num_completion:] = values
        # a copy, so that masking a target does not change a token
        return cls(tokens=tokens[:-1], targets=tokens[1:].clone(), columns=full, temperature=temperature)

    def __len__(self) -> int:
        return self.tokens.numel()

    def __reduce__(self):
        return _sample_from_arrays, _arrays([self])


class SampleList(list[Sample]):
    """Samples, pickled as one array of tokens, of targets and of each column if their columns
    agree: a thousand small arrays would take longer than a step of a small model.
    """

    def __reduce__(self):
        if not self or any(sample.columns.keys() != self[0].columns.keys() for sample in self):
            return SampleList, (list(self),)
        return _samples_from_arrays, _arrays(self)


Arrays = tuple[list[int], np.ndarray, np.ndarray, dict[str, np.ndarray], list[float]]
"""Lengths; tokens, targets and columns of all samples in a row; temperatures."""


def _arrays(samples: Sequence[Sample]) -> Arrays:
    # numpy arrays are pickled ten times as fast as tensors
    columns = {name: _joined([sample.columns[name] for sample in samples]) for name in samples[0].columns}
    tokens = _joined([sample.tokens for sample in samples])
    targets = _joined([sample.targets for sample in samples])
    return list(map(len, samples)), tokens, targets, columns, [sample.temperature for sample in samples]


def _joined(tensors: list[Tensor]) -> np.ndarray:
    return torch.cat(tensors).detach().numpy()


def _samples_from_arrays(
    lengths: list[int],
    tokens: np.ndarray,
    targets: np.ndarray,
    columns: Mapping[str, np.ndarray],
    temperatures: list[float],
) -> SampleList:
    tokens_of = torch.from_numpy(tokens).split(lengths)
    targets_of = torch.from_numpy(targets).split(lengths)
    columns_of = {name: torch.from_numpy(column).split(lengths) for name, column in columns.items()}
    samples = SampleList()
    for index, temperature in enumerate(temperatures):
        own = {name: pieces[index] for name, pieces in columns_of.items()}
        samples.append(Sample(tokens=tokens_of[index], targets=targets_of[index], columns=own, temperature=temperature))
    return samples


def _sample_from_arrays(*arrays: Any) -> Sample:
    return _samples_from_arrays(*arrays)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimParams:
    """Of one optimizer step. OptimizerConfig.groups may scale learning_rate and weight_decay."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    # largest gradient norm, after grad_divisor; None: no clipping
    grad_clip_norm: float | None = 1.0
    # divides the gradient of the summed loss; num_loss_tokens(samples) gives the mean per token
    grad_divisor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimResult:
    """Result of one optimizer step."""

    policy_version: int  # after the step
    grad_norm: float  # after grad_divisor, before clipping
    skipped: bool = False  # the gradient was not finite and was only cleared
    # whose gradient is not finite, at most MAX_NAMES_REPORTED
    nonfinite_parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """Of a forward or forward_backward call, in the order of the samples. Metrics: `name:reduction`."""

    # each [T] float32: log p(targets[i] | tokens[:i+1]) at the sample's temperature; value model: []
    logprobs: list[Tensor]
    metrics: dict[str, float]
    policy_version: int
    # each [T] float32: V(tokens[:i+1]), the state before targets[i]; of a value model only
    values: list[Tensor] | None = None
    # each [T] float32: over the vocabulary; None if neither call nor loss needs it
    entropy: list[Tensor] | None = None
    # each [T, K] float32: of the ids in target_ids; None without that column
    target_logprobs: list[Tensor] | None = None
    # `metrics` in the form that merges over calls
    partials: Partials = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutput:
    """What one rank reports of a ForwardBackwardOutput. Here, so that clients need not import the
    engine.

    Metrics come from the last pipeline stage's tensor-parallel rank 0, samples from its
    context-parallel rank 0, so each is reported once.
    """

    rank: int
    indices: list[int]  # of the reported samples in the call
    lengths: list[int]  # T of each
    # "logprobs" or "values", if computed "entropy": [sum of lengths] float32; "target_logprobs":
    # [sum of lengths, K]. Empty without reported samples.
    values: dict[str, Tensor]
    metrics: Partials  # merged over ranks by the client
    policy_version: int

    @property
    def logprobs(self) -> Tensor:
        """[sum of lengths] float32. Empty for a value model, or without reported samples."""
        return self.values.get("logprobs", torch.empty(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of one generate call."""

    max_tokens: int = 128  # of a completion
    n: int = 1  # completions per prompt
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: the whole vocabulary
    # end a completion, which includes them; the model's end tokens do, too
    stop_token_ids: tuple[int, ...] = ()
    # Completion i of prompt p is drawn with hashed_seed(seed, p, i), so different seeds share none.
    # p: index in the call, or the number in `indices`.
    seed: int | None = None
    ignore_stop: bool = False  # the model's end tokens (EOS) end no completion; stop_token_ids still do
    top_logprobs: int = 0  # likeliest tokens in `Completion.top` per sampled token
    # likeliest tokens in `Completion.prompt_top` per prompt token after the first
    prompt_top_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """The K likeliest tokens at P positions, likeliest first."""

    token_ids: Tensor  # [P, K] int64
    logprobs: Tensor  # [P, K] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled completion."""

    tokens: list[int]  # C ids
    # C, of the distribution sampled from, after temperature, top_p and top_k; greedy: at
    # temperature 1
    logprobs: list[float]
    policy_versions: list[int]  # C: of the weights that produced each token
    finish_reason: str  # "stop": end or stop token; "length": max_tokens or max_model_len
    top: TopLogprobs | None = None  # at the C tokens, as `logprobs`
    prompt_top: TopLogprobs | None = None  # at the prompt's tokens after the first, at temperature 1
    text: str | None = None  # without special tokens; None if the prompt was given as token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Record of one push of a trainer, or one pull of a generator."""

    policy_version: int
    # push: where the bytes are ("slots", "files", "memory"); pull: how they came ("shared_memory",
    # "cuda_ipc", "tcp", "point_to_point", "files", "memory")
    path: str
    reason: str = ""  # why a pull took this path
    num_bytes: int  # of the version, over all ranks; 0: the generator had the version already
    # without the waits for the version and running requests, and with path "memory" without the
    # fetch from the actor
    seconds: float
    # push: collect, write; pull: read, load. tcp and point_to_point transfer in `read`;
    # shared_memory, cuda_ipc and files read while they `load`.
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def gb_per_second(self) -> float:
        return self.num_bytes / 1e9 / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Device memory that a generator released in `sleep`, or allocated again in `wake`."""

    num_bytes: int = 0  # over all ranks and replicas; 0 on a CPU or for a call with nothing to do
    seconds: float = 0.0  # of the slowest replica


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerInfo:
    """State and limits of a trainer. Ranks differ only in `rank`, `pid`, `device`, `logs`, memory,
    moves, pushes and times.
    """

    policy_version: int
    steps_skipped: int  # one tenant's optim_steps with a gradient that was not finite
    state: str  # "idle", "open", "broken" or "inconsistent" (some weights may have changed)
    num_parameters: int
    vocab_size: int
    max_sequence_length: int  # this and the next two: TrainerConfig's limits
    tokens_per_row: int
    max_call_bytes: int
    layout: dict[str, int]  # data_parallel_shard, tensor_parallel, …, expert_parallel -> degree
    device: str
    device_name: str  # of the GPU, or "CPU"
    dtype: str  # of forward and backward
    head: str  # "logprobs" or "values"
    rank: int
    world_size: int
    pid: int
    optimizer: str | None  # None: inference only
    optimizer_fields: tuple[str, ...]  # which of beta1, beta2, eps and weight_decay the optimizer has
    memory_bytes: int  # allocated on the GPU; on a CPU, resident memory
    peak_memory_bytes: int  # since the process started
    logs: str  # file with the output and logs of the process
    last_push: Transfer | None = None  # None: no push yet
    on_host: Mapping[str, int] = field(default_factory=dict)  # bytes of each offloaded part
    offloaded: HostMove = HostMove()  # sum of this rank's moves since the trainer was built
    onloaded: HostMove = HostMove()  # sum of the moves back
    # Compute seconds per token in one module, such as a block, without waits for other ranks; mean
    # over the measured modules and forward passes of the last optim_step. None: not measured.
    own_seconds_per_token: float | None = None
    lora_rank: int = 0  # 0: no adapters
    tenants: tuple[str, ...] = ()  # added by TrainerClient.new_tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A generator's sign of life."""

    is_idle: bool  # the engine waits for requests
    num_done: int  # steps and commands (such as a pull) that the engine has done


ReplicaState = Literal["starting", "healthy", "stale", "dead", "restarting", "retired"]
"""State of one replica of a GeneratorClient.

starting: the first process starts. healthy: gets calls. stale: runs without the weights of the last
pull. dead: ended or killed. restarting: a new process starts. retired: not started again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorReturn:
    """A generator that died, was started again and became healthy."""

    name: str
    cause: str  # error text of the death
    noticed: float  # time of this error, seconds since 1970
    seconds: float  # from the error until healthy again


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorInfo:
    """State and limits; with several replicas, of the healthy one with the oldest weights."""

    policy_version: int  # -1 before the first pull
    max_model_len: int
    vocab_size: int
    logs: str  # file with the output and logs of the process
    last_pull: Transfer | None = None  # None: no pull has brought weights
    asleep: int = 0  # level of `sleep`; 0: awake
    # last info of each replica whose newest process is set up; empty for a single generator
    replicas: "tuple[GeneratorInfo, ...]" = ()
    state: ReplicaState = "healthy"  # otherwise the other fields are the last known
    restarts: int = 0  # over all replicas in what `info` returns
    max_adapters: int = 0  # for the requests of one engine step; 0: none can be loaded
    max_adapter_rank: int = 0
    tokenizer_path: str = ""  # directory of the tokenizer for prompts that are given as text; "": there is none


def num_loss_tokens(samples: Sequence[Sample]) -> float:
    """Positions with a target and a loss weight other than 0, the usual `grad_divisor`."""
    counts = [((sample.columns["loss_weights"] != 0) & (sample.targets != IGNORE_TARGET)).sum() for sample in samples]
    return float(sum(counts))
