"""Values that a caller and the actors send to each other: frozen dataclasses of CPU tensors and scalars.

The module imports neither torch.distributed nor Monarch nor vLLM.

In shapes, T is the number of positions of a sample, C the number of completion tokens and K the number of target ids at
one position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rl_actors.metrics import Partials
from rl_actors.parts import HostMove

IGNORE_TARGET = -100
"""Target id of a position without a target. Such a position is padding, or the caller has masked it. The logprob of the
position is 0, and the trainer sets all columns to 0 there. One of these columns is loss_weights, so every loss, mean
and maximum leaves the position out."""

TOP_K_COLUMNS = {"target_ids": torch.int64, "target_weights": torch.float32}
"""Columns of shape [T, K] with their dtypes. K is the same in all samples of a call. Every other column is [T] float32."""

MAX_NAMES_REPORTED = 10
"""Largest number of parameter names that an error message or a result lists."""

FIRST_TENANT = ""
"""Name of the tenant that a trainer has from the start. A tenant is one of several training runs that share a trainer."""


def column_dtype(name: str) -> torch.dtype:
    """The dtype of a column of this name."""
    return TOP_K_COLUMNS.get(name, torch.float32)


def require_convertible(what: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError naming dtype, layout and device unless the tensor can become a dense CPU tensor of this dtype.

    A bool is no number, a complex number no real one, and a float no token id. Sparse, nested, quantized and meta
    tensors do not hold their values as an array.
    """
    is_dense = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)
    loses_fraction = tensor.is_floating_point() and not dtype.is_floating_point and tensor.numel() > 0
    if not is_dense or tensor.dtype == torch.bool or tensor.is_complex() or loses_fraction:
        raise ValueError(
            f"{what} has dtype {tensor.dtype}, layout {tensor.layout} and device {tensor.device}; "
            f"it must be a dense tensor of {str(dtype).removeprefix('torch.')} numbers"
        )


def _tensor(what: str, values: object) -> Tensor:
    # torch would turn the bools of a list that also holds numbers into numbers.
    if isinstance(values, list | tuple) and bool in set(map(type, values)):
        raise ValueError(f"{what} holds a bool; it must hold numbers")
    return torch.as_tensor(values)


def _cast(what: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    require_convertible(what, tensor, dtype)
    return tensor.to("cpu", dtype)


class CollectiveTimeoutError(TimeoutError):
    """A rank of a trainer has waited too long for another rank in a collective.

    Later collectives of the trainer fail, too.
    """


class NonFiniteError(ValueError):
    """Weights or logprobs are NaN or infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training sequence. Position i reads `tokens[i]` and predicts `targets[i]`. Entry i of every column belongs to `targets[i]`.

    >>> Sample.from_tokens([5, 6], [7, 8], advantages=0.5).targets
    tensor([6, 7, 8])
    """

    tokens: Tensor  # [T] int64
    targets: Tensor  # [T] int64
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # each [T] float32, except TOP_K_COLUMNS
    temperature: float = 1.0  # logprobs are computed from logits / temperature

    @classmethod
    def from_tokens(
        cls,
        prompt: Sequence[int],
        completion: Sequence[int],
        *,
        temperature: float = 1.0,
        **columns: float | Sequence[float] | Sequence[Sequence[float]] | Tensor,
    ) -> "Sample":
        """Make one Sample of a prompt and its completion. The targets are the tokens shifted by one. No other code
        shifts tokens.

        A column is one number for all completion tokens, or a sequence of C numbers. A column in TOP_K_COLUMNS has the
        shape [C, K]. In the sample, every column is 0 at positions whose target belongs to the prompt. If
        `loss_weights` is not given, it is 1 for every completion token.

        from_tokens([5, 6], [7, 8], advantages=2.0) -> tokens [5, 6, 7], targets [6, 7, 8], advantages [0, 2, 2], loss_weights [0, 1, 1]

        Raises ValueError if the prompt or the completion is empty, if the shape of a column is wrong, or if a value is
        no number, or no token id.
        """
        if len(prompt) == 0 or len(completion) == 0:
            raise ValueError(
                f"prompt has {len(prompt)} tokens and completion has {len(completion)}; both need at least 1"
            )
        ids = {"prompt": prompt, "completion": completion}
        tokens = torch.cat([_cast(name, _tensor(name, values), torch.int64) for name, values in ids.items()])
        num_positions, num_completion = len(tokens) - 1, len(completion)
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
        # The targets are a copy, so that masking a target does not change a token.
        return cls(tokens=tokens[:-1], targets=tokens[1:].clone(), columns=full, temperature=temperature)

    def __len__(self) -> int:
        return self.tokens.numel()

    def __reduce__(self):
        # A call carries thousands of tensors, and numpy arrays are pickled ten times as fast as tensors.
        columns = {name: column.detach().numpy() for name, column in self.columns.items()}
        return _sample_from_numpy, (self.tokens.numpy(), self.targets.numpy(), columns, self.temperature)


def _sample_from_numpy(
    tokens: np.ndarray, targets: np.ndarray, columns: Mapping[str, np.ndarray], temperature: float
) -> Sample:
    return Sample(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        columns={name: torch.from_numpy(column) for name, column in columns.items()},
        temperature=temperature,
    )


class SampleList(list[Sample]):
    """List of samples. If all samples have the same columns, the list is pickled as one array of all tokens, one array
    of all targets, and one array for each column.

    Pickling a thousand small arrays would take longer than a step of a small model.
    """

    def __reduce__(self):
        names = set(self[0].columns) if self else set()
        if not self or any(set(sample.columns) != names for sample in self):
            return SampleList, (list(self),)
        tokens = _joined([sample.tokens for sample in self])
        targets = _joined([sample.targets for sample in self])
        columns: dict[str, np.ndarray] = {}
        for name in sorted(names):
            columns[name] = _joined([sample.columns[name] for sample in self])
        lengths, temperatures = [len(sample) for sample in self], [sample.temperature for sample in self]
        return _samples_from_arrays, (lengths, tokens, targets, columns, temperatures)


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
        samples.append(
            Sample(
                tokens=tokens_of[index],
                targets=targets_of[index],
                columns={name: pieces[index] for name, pieces in columns_of.items()},
                temperature=temperature,
            )
        )
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimParams:
    """Hyperparameters of one optimizer step.

    OptimizerConfig.groups may scale learning_rate and weight_decay for some parameters.
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    # Largest norm of the gradient, after the division by grad_divisor. None: no clipping.
    grad_clip_norm: float | None = 1.0
    # The step divides the gradient of the summed loss by this number. With num_loss_tokens(samples) the step uses the
    # gradient of the mean loss per token.
    grad_divisor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimResult:
    """Result of one optimizer step."""

    policy_version: int  # after the step
    grad_norm: float  # after the division by grad_divisor, before clipping
    skipped: bool = False  # True: the gradient was not finite, so the step only cleared the gradient
    # Names of parameters whose gradient is not finite, at most MAX_NAMES_REPORTED.
    nonfinite_parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """Results of one forward or forward_backward call. Lists have the order of the samples.

    Names of metrics have the form `name:reduction`. The reduction is sum, mean, min or max.
    """

    # Each [T] float32: log p(targets[i] | tokens[:i+1]) at the sample's temperature. A value model gives an empty list.
    logprobs: list[Tensor]
    metrics: dict[str, float]
    policy_version: int
    # Each [T] float32: V(tokens[:i+1]), the value of the state before targets[i]. Only a value model has values.
    values: list[Tensor] | None = None
    # Each [T] float32: entropy of the distribution over the vocabulary. None if neither the call nor the loss needs it.
    entropy: list[Tensor] | None = None
    # Each [T, K] float32: logprobs of the ids in the column target_ids. None if the samples lack that column.
    target_logprobs: list[Tensor] | None = None
    # The metrics in a form that can be merged over several calls; see rl_actors.metrics.
    partials: Partials = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutput:
    """The part of a ForwardBackwardOutput that one rank reports. This class is in types.py so that a client need not import the engine.

    A rank reports metrics only if it is in the last pipeline stage and has tensor-parallel rank 0. Of these ranks, only
    those with context-parallel rank 0 report samples. So each sample is reported once.
    """

    rank: int
    indices: list[int]  # index of each reported sample in the call's list of samples
    lengths: list[int]  # T of each reported sample
    # "logprobs" (in a value model "values"): [sum of lengths] float32. If the rank computed them, also "entropy" [sum
    # of lengths] and "target_logprobs" [sum of lengths, K]. The dict is empty if the rank reports no sample.
    values: dict[str, Tensor]
    metrics: Partials  # the client merges them over ranks; see rl_actors.metrics
    policy_version: int

    @property
    def logprobs(self) -> Tensor:
        """[sum of lengths] float32. Empty for a value model, and on a rank that reports no sample."""
        return self.values.get("logprobs", torch.empty(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of one generate call."""

    max_tokens: int = 128  # largest number of tokens of a completion
    n: int = 1  # completions per prompt
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps the whole vocabulary
    # A completion ends with the first stop token, and includes it. The model's end tokens are stop tokens, too.
    stop_token_ids: tuple[int, ...] = ()
    # Completion i of prompt p is sampled with hashed_seed(seed, p, i) of rl_actors/seeds.py. So calls with different
    # seeds share no seed of a completion. p is the prompt's index in the call, or the number in `indices`.
    seed: int | None = None
    ignore_stop: bool = False  # True: the model's end tokens (EOS) end no completion; stop_token_ids still do
    top_logprobs: int = 0  # number of likeliest tokens that `Completion.top` has for each sampled token
    # Number of likeliest tokens that `Completion.prompt_top` has for each token of the prompt after the first.
    prompt_top_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """The K likeliest tokens at each of P positions, the likeliest first."""

    token_ids: Tensor  # [P, K] int64
    logprobs: Tensor  # [P, K] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled completion."""

    tokens: list[int]  # C ids
    # C logprobs under the distribution that vLLM sampled from, after temperature, top_p and top_k. A greedy completion
    # (temperature 0) has the logprobs at temperature 1.
    logprobs: list[float]
    policy_versions: list[int]  # C numbers: the version of the weights that produced each token
    finish_reason: str  # "stop": at an end token or a stop token; "length": at max_tokens or max_model_len
    top: TopLogprobs | None = None  # at the positions of the C tokens, under the distribution of `logprobs`
    prompt_top: TopLogprobs | None = None  # at the positions of the prompt's tokens after the first, at temperature 1
    text: str | None = None  # of the tokens, without special tokens; None if the prompt was given as token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Record of one push of a trainer, or of one pull of a generator."""

    policy_version: int
    # A push: where the bytes are ("slots", "files" or "memory").
    # A pull: how the bytes came ("shared_memory", "cuda_ipc", "tcp", "point_to_point", "files" or "memory").
    path: str
    reason: str = ""  # why a pull took this path
    num_bytes: int  # of the version, over all ranks; 0 for a pull of a version that the generator had already
    # A pull does not count its waits for the version and for running requests. With the path "memory" it also does not
    # count the seconds in which it fetches the bytes from the actor that holds them.
    seconds: float
    # Seconds of each phase. A push has the phases collect and write. A pull has the phases read and load. With the
    # paths tcp and point_to_point the bytes come in the phase read. With shared_memory, cuda_ipc and files a pull reads
    # the bytes while it loads, so `load` includes the time of reading.
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def gb_per_second(self) -> float:
        return self.num_bytes / 1e9 / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Record of device memory that a generator released in `sleep`, or allocated again in `wake`."""

    num_bytes: int = 0  # over all ranks and replicas; 0 on a CPU, or if the call had nothing to do
    seconds: float = 0.0  # of the slowest replica


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerInfo:
    """State and limits of a trainer. Ranks differ only in `rank`, `pid`, `device`, `logs` and the values of memory, moves, pushes and times."""

    policy_version: int
    steps_skipped: int  # number of one tenant's optim_steps whose gradient was not finite; see TenantClient.info
    state: str  # "idle", "open", "broken" or "inconsistent" (some weights may have changed); see engine/call_order.py
    num_parameters: int
    vocab_size: int
    max_sequence_length: int  # for this limit and the next two, see TrainerConfig
    tokens_per_row: int
    max_call_bytes: int
    layout: dict[str, int]  # data_parallel_shard, tensor_parallel, …, expert_parallel -> degree
    device: str
    device_name: str  # name of the GPU; "CPU" on a machine without one
    dtype: str  # of the forward and backward pass
    head: str  # "logprobs", or "values" for a value model
    rank: int
    world_size: int
    pid: int
    optimizer: str | None  # name of the optimizer; None: the trainer only infers
    optimizer_fields: tuple[str, ...]  # the names among beta1, beta2, eps and weight_decay that the optimizer has
    memory_bytes: int  # allocated memory of the GPU; on a CPU, resident memory of the process
    peak_memory_bytes: int  # largest memory_bytes since the process started
    logs: str  # file with the output and the logs of the rank's process
    last_push: Transfer | None = None  # None: this rank has pushed nothing
    on_host: Mapping[str, int] = field(default_factory=dict)  # bytes of each offloaded part (weights, …); see `offload`
    offloaded: HostMove = HostMove()  # sum of this rank's moves to the host since the trainer was built
    onloaded: HostMove = HostMove()  # sum of this rank's moves back to the device
    # Seconds that this rank computes for one token in one module, such as a transformer block, without waits for other
    # ranks. The number is the mean over the measured modules and over the forward passes that led to the last
    # optim_step. None: the rank measured nothing; see engine/own_time.py.
    own_seconds_per_token: float | None = None
    lora_rank: int = 0  # 0: there are no adapters
    tenants: tuple[str, ...] = ()  # names of the tenants that TrainerClient.new_tenant has added


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign of life of a generator."""

    is_idle: bool  # whether the generator's engine waits for requests
    num_done: int  # how many steps and commands (such as a pull) the engine has done


ReplicaState = Literal["starting", "healthy", "stale", "dead", "restarting", "retired"]
"""State of one of the generators that a GeneratorClient uses.

starting: the generator's first process starts. healthy: the client sends calls to the generator. stale: the generator
runs, but does not have the weights of the last pull. dead: the generator's process has ended or was killed. restarting:
a new process starts in its place. retired: the client does not start the generator again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorReturn:
    """Record of a generator that died, was started again and became healthy."""

    name: str
    cause: str  # text of the error of the death
    noticed: float  # when the client got this error, in seconds since 1970
    seconds: float  # from this error until the generator was healthy again


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorInfo:
    """State and limits of a generator.

    A client may use several generators, its replicas. Then `info` returns the info of the healthy replica with the
    oldest weights. The field `replicas` of this info has the last info of every replica whose newest process
    has been set up.
    """

    policy_version: int  # -1 before the first pull
    max_model_len: int
    vocab_size: int
    logs: str  # file with the output and the logs of the process
    last_pull: Transfer | None = None  # None: no pull has brought weights
    asleep: int = 0  # level of the last `sleep`; 0: the generator is awake
    replicas: tuple["GeneratorInfo", ...] = ()  # empty for a single generator
    state: ReplicaState = "healthy"  # in any other state the other fields have the last known values
    restarts: int = 0  # number of restarts; the info that `info` returns has the sum over the replicas
    max_adapters: int = 0  # number of adapters that the requests of one engine step may use; 0: none can be loaded
    max_adapter_rank: int = 0
    tokenizer_path: str = ""  # directory of the tokenizer for prompts that are given as text; "": there is none


def num_loss_tokens(samples: Sequence[Sample]) -> float:
    """Number of positions that have a target and a loss weight other than 0.

    Most training loops pass this number as `grad_divisor`.
    """
    count = 0
    for sample in samples:
        count += int(((sample.columns["loss_weights"] != 0) & (sample.targets != IGNORE_TARGET)).sum())
    return float(count)
