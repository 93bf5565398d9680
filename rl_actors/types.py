"""What travels between a caller and the actors: frozen values of CPU tensors and scalars. No torch.distributed, no Monarch, no vLLM.

T positions of one sample, C completion tokens, K targets of one position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

IGNORE_TARGET = -100
"""A target that is padding: its logprob is 0 and it is left out of every loss, mean and maximum."""


TOP_K_COLUMNS = {"target_ids": torch.int64, "target_weights": torch.float32}
"""The columns of shape [T, K], the same K in all samples of a call; every other column is [T] float32."""

MAX_NAMES_REPORTED = 10
"""Names of parameters that an error message or a result lists at most."""


def column_dtype(name: str) -> torch.dtype:
    return TOP_K_COLUMNS.get(name, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training sequence. Position i reads `tokens[i]` and predicts `targets[i]`; every column holds at i what belongs to `targets[i]`.

    >>> Sample.from_tokens([5, 6], [7, 8], advantages=0.5).targets
    tensor([6, 7, 8])
    """

    tokens: Tensor  # [T] int64
    targets: Tensor  # [T] int64
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # each [T] float32, but for TOP_K_COLUMNS
    temperature: float = 1.0  # logits are divided by it before logprobs

    @classmethod
    def from_tokens(
        cls,
        prompt: Sequence[int],
        completion: Sequence[int],
        *,
        temperature: float = 1.0,
        **columns: float | Sequence[float] | Sequence[Sequence[float]] | Tensor,
    ) -> "Sample":
        """Shift a prompt and its completion into one Sample: the only shift in the project.

        A column is one number for every completion token, or a sequence of C numbers, [C, K] for TOP_K_COLUMNS; prompt positions get 0.
        `loss_weights` is 1 on the completion unless given.
        from_tokens([5, 6], [7, 8], advantages=2.0) -> tokens [5, 6, 7], targets [6, 7, 8], advantages [0, 2, 2], loss_weights [0, 1, 1]

        Raises ValueError when prompt or completion is empty or a column's length is not C.
        """
        if len(prompt) == 0 or len(completion) == 0:
            raise ValueError(
                f"prompt has {len(prompt)} tokens and completion has {len(completion)}; both need at least 1"
            )
        tokens = torch.as_tensor([*prompt, *completion], dtype=torch.int64)
        num_positions, num_completion = len(tokens) - 1, len(completion)
        full: dict[str, Tensor] = {}
        for name, values in {"loss_weights": 1.0, **columns}.items():
            values = torch.as_tensor(values, dtype=column_dtype(name))
            fits = values.ndim == 2 if name in TOP_K_COLUMNS else values.ndim < 2
            if not fits or (values.ndim and len(values) != num_completion):
                raise ValueError(
                    f"column {name!r} has shape {tuple(values.shape)}, but the completion has {num_completion} tokens"
                )
            full[name] = torch.zeros(num_positions, *values.shape[1:], dtype=values.dtype)
            full[name][-num_completion:] = values
        # a copy, so that masking a target does not change a token
        return cls(tokens=tokens[:-1], targets=tokens[1:].clone(), columns=full, temperature=temperature)

    def __len__(self) -> int:
        return self.tokens.numel()

    def __reduce__(self):
        # numpy arrays pickle an order of magnitude faster than tensors, and a call carries thousands.
        columns = {name: column.detach().numpy() for name, column in self.columns.items()}
        return _sample_from_numpy, (self.tokens.numpy(), self.targets.numpy(), columns, self.temperature)


def _sample_from_numpy(tokens, targets, columns, temperature) -> Sample:
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    return Sample(
        tokens=torch.from_numpy(tokens), targets=torch.from_numpy(targets), columns=tensors, temperature=temperature
    )


class SampleList(list[Sample]):
    """Samples that travel as one array a column: a thousand small arrays take longer to pickle than a small model to train on."""

    def __reduce__(self):
        names = set(self[0].columns) if self else set()
        if not self or any(set(sample.columns) != names for sample in self):
            return SampleList, (list(self),)
        join = lambda tensors: torch.cat(tensors).detach().numpy()  # noqa: E731
        columns = {name: join([sample.columns[name] for sample in self]) for name in sorted(names)}
        ids = (join([sample.tokens for sample in self]), join([sample.targets for sample in self]))
        return _samples_from_arrays, ([len(s) for s in self], *ids, columns, [s.temperature for s in self])


def _samples_from_arrays(lengths, tokens, targets, columns, temperatures) -> SampleList:
    split = lambda array: torch.from_numpy(array).split(lengths)  # noqa: E731
    names = list(columns)
    rows = zip(split(tokens), split(targets), temperatures, *(split(columns[name]) for name in names), strict=True)
    return SampleList(
        Sample(tokens=t, targets=y, temperature=temperature, columns=dict(zip(names, values, strict=True)))
        for t, y, temperature, *values in rows
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimParams:
    """What one optimizer step uses. `learning_rate` and `weight_decay` are base values that a parameter group may multiply."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float | None = 1.0  # of the divided gradient; None does not clip
    grad_divisor: float = 1.0  # losses are sums: num_loss_tokens(samples) makes the gradient a mean over tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimResult:
    policy_version: int  # after the step
    grad_norm: float  # after grad_divisor, before clipping
    skipped: bool = False  # the gradient was not finite: nothing was stepped, the gradients are cleared
    nonfinite_parameters: tuple[str, ...] = ()  # of this gradient, at most 10 names


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """In the order of the samples. Metrics are named `name:reduction` with reduction sum, mean, min or max."""

    logprobs: list[Tensor]  # each [T] float32: log p(targets[i] | tokens[:i+1]) at the sample's temperature
    metrics: dict[str, float]
    policy_version: int
    entropy: list[Tensor] | None = (
        None  # each [T] float32, of the whole distribution; when asked for or read by the loss
    )
    target_logprobs: list[Tensor] | None = None  # each [T, K] float32, of the column target_ids when samples have it
    partials: dict[str, Any] = field(
        default_factory=dict, repr=False
    )  # metrics that merge over calls: rl_actors.metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutput:
    """What one rank adds to a ForwardBackwardOutput. It is defined here so that a client can read it without the engine and its models.

    Of the replicas of a data-parallel rank, and of the stages of a pipeline, one adds something, so that each sample is there once;
    of the ranks that share its rows one adds samples, and each its own metrics.
    """

    rank: int
    indices: list[int]  # of the samples this rank ran
    lengths: list[int]
    logprobs: Tensor  # [sum of lengths] float32
    extras: dict[str, Tensor]  # "entropy" [sum of lengths], "target_logprobs" [sum of lengths, K], where there are any
    metrics: dict[str, Any]  # that merge over ranks: rl_actors.metrics
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    max_tokens: int = 128
    n: int = 1  # completions per prompt
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps the whole vocabulary
    stop_token_ids: tuple[int, ...] = ()  # the stop token is the last token of the completion
    seed: int | None = None  # completion i of prompt p draws from seed + p * n + i
    ignore_stop: bool = False  # generate max_tokens whatever is drawn (for measurements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    tokens: list[int]  # C ids
    logprobs: list[
        float
    ]  # C: log probability under the distribution sampled from (temperature, top_p, top_k); greedy: at temperature 1
    policy_versions: list[int]  # C: the version of the weights that produced each token
    finish_reason: str  # "stop" or "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerInfo:
    """What a trainer says about itself; the same on every rank but for `rank`, `pid` and memory."""

    policy_version: int
    steps_skipped: int  # optim_steps whose gradient was not finite, since the trainer was built
    state: str  # "idle", "open" or "broken"
    num_parameters: int
    vocab_size: int
    max_sequence_length: int
    tokens_per_row: int
    max_call_bytes: int
    layout: dict[str, int]  # data_parallel_shard, tensor_parallel, …, expert_parallel -> degree
    device: str
    device_name: str  # the GPU's; "CPU" where there is none
    dtype: str
    rank: int
    world_size: int
    pid: int
    optimizer: str | None  # its name; None: the trainer only infers
    optimizer_fields: tuple[str, ...]  # of beta1, beta2, eps and weight_decay those that it has
    memory_bytes: int  # resident memory of the process, or allocated memory of the GPU
    peak_memory_bytes: int  # the most that it was since the process started
    logs: str  # file with the output and the logs of the rank's process


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorInfo:
    """What a generator says about itself."""

    policy_version: int  # -1 before the first pull
    max_model_len: int
    vocab_size: int
    logs: str  # file with the output and the logs of the process


def num_loss_tokens(samples: Sequence[Sample]) -> float:
    """The number of positions with a non-zero loss weight: the usual `grad_divisor`."""
    return float(sum(int((sample.columns["loss_weights"] != 0).sum()) for sample in samples))
