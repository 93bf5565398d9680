"""Checks of a call's arguments, by the client before it sends it, again by ranks and generator.

T positions of a sample, K ids of a position in target_ids and weights in target_weights. "Raises
ValueError" below includes TypeError for a wrong type.
"""

import math
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rl_actors import layouts
from rl_actors.field_types import require_field_types
from rl_actors.losses import Loss, columns_of, name_of, output_of
from rl_actors.seeds import MAX_SEED
from rl_actors.types import IGNORE_TARGET, TOP_K_COLUMNS, OptimParams, Sample, SamplingParams, column_dtype

if TYPE_CHECKING:
    from rl_actors.config import GeneratorConfig, OptimizerConfig, TrainerConfig


def validate_samples(
    samples: Sequence[Sample],
    loss: Loss | None,
    *,
    vocab_size: int,
    max_sequence_length: int,
    max_call_bytes: int,
    head: str = "logprobs",
) -> None:
    """Raises ValueError if a trainer cannot take the samples or the loss.

    loss: None: no loss, and any columns. head: what the model computes, "logprobs" or "values".
    """
    if loss is not None and output_of(loss) != head:
        raise ValueError(f"{name_of(loss)} reads {output_of(loss)}, but head={head!r}: the model computes {head}")
    if is_dataclass(loss):
        require_field_types(loss, f"{type(loss).__name__}.")
    if not isinstance(samples, Sequence) or len(samples) == 0:
        raise ValueError(f"samples is {samples!r}; give a list of at least 1 Sample")
    required, optional = columns_of(loss) if loss is not None else (frozenset(), None)
    num_bytes = 0
    checked_names = None
    for index, sample in enumerate(samples):
        _validate_shapes(f"sample {index}", sample, max_sequence_length)
        # only when they change, which is rare
        if sample.columns.keys() != checked_names:
            checked_names = sample.columns.keys()
            _validate_names(f"sample {index}", set(checked_names), loss, required, optional)
        num_bytes += len(sample) * 16 + sum(c.numel() * c.element_size() for c in sample.columns.values())
    if num_bytes > max_call_bytes:
        raise ValueError(f"the samples hold {num_bytes} bytes but max_call_bytes={max_call_bytes}; split the call")
    _validate_shared(samples, optional or frozenset())
    _validate_values(samples, vocab_size)


def _validate_names(
    where: str, names: set[str], loss: Loss | None, required: frozenset[str], optional: frozenset[str] | None
) -> None:
    """optional: other columns that the loss reads. None: any are allowed."""
    missing = required - names
    if missing:
        raise ValueError(f"{where} has no column {min(missing)!r}, which {name_of(loss)} reads")
    if optional is None:
        return
    unknown = names - required - optional
    if unknown:
        reads = ", ".join(sorted(required | optional))
        raise ValueError(f"{where} has the column {min(unknown)!r}, but {name_of(loss)} reads {reads}")


def _validate_shared(samples: Sequence[Sample], optional: frozenset[str]) -> None:
    """Raises ValueError unless all samples have the same of these columns, and the same K."""
    first = samples[0].columns
    shared = optional | set(TOP_K_COLUMNS)
    for index, sample in enumerate(samples):
        if sample.columns.keys() == first.keys() and first.keys().isdisjoint(TOP_K_COLUMNS):
            continue
        differing = [name for name in shared if (name in first) != (name in sample.columns)]
        if differing:
            name = min(differing)
            has, lacks = (0, index) if name in first else (index, 0)
            raise ValueError(
                f"sample {has} has the column {name!r}, but sample {lacks} lacks it; all samples of a call must have it, or none"
            )
        _validate_top_k(index, sample, first, needs_weights="target_weights" in optional)


def _validate_top_k(index: int, sample: Sample, first: Mapping[str, Tensor], *, needs_weights: bool) -> None:
    """target_ids and target_weights must have the first sample's K, and be there together."""
    sizes = {name: sample.columns[name].shape[1] for name in TOP_K_COLUMNS if name in sample.columns}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"sample {index}: the second dimensions are {sizes}; target_ids and target_weights must have the same shape"
        )
    if "target_weights" in sizes and "target_ids" not in sizes:
        raise ValueError(f"sample {index} has the column 'target_weights' but no column 'target_ids'")
    if needs_weights and "target_ids" in sizes and "target_weights" not in sizes:
        raise ValueError(f"sample {index} has the column 'target_ids' but no column 'target_weights'")
    for name, size in sizes.items():
        if name in first and size != first[name].shape[1]:
            expected = first[name].shape[1]
            raise ValueError(
                f"sample {index}: column {name!r} has K={size} but sample 0 has K={expected}; all samples of a call must have the same K (second dimension)"
            )


def _validate_shapes(where: str, sample: Sample, max_sequence_length: int) -> None:
    if not isinstance(sample, Sample):
        raise TypeError(f"{where} is a {type(sample).__name__}; it must be a Sample")
    for name, ids in (("tokens", sample.tokens), ("targets", sample.targets)):
        if not isinstance(ids, Tensor):
            raise TypeError(f"{where}: {name} is a {type(ids).__name__}; it must be a Tensor, [T] int64")
        _require_dense(f"{where}: {name}", ids)
        if ids.ndim != 1 or ids.dtype != torch.int64:
            raise ValueError(
                f"{where}: {name} has shape {tuple(ids.shape)} and dtype {ids.dtype}; it must be [T] int64"
            )
    length = sample.tokens.numel()  # len of a tensor takes ten times as long
    if length == 0:
        raise ValueError(f"{where} has 0 positions; it must have at least 1")
    if length > max_sequence_length:
        raise ValueError(f"{where} has {length} positions but max_sequence_length={max_sequence_length}")
    if sample.targets.numel() != length:
        raise ValueError(f"{where}: targets has {sample.targets.numel()} positions but tokens has {length}")
    _TEMPERATURE.require(f"{where}: temperature", sample.temperature)
    if not isinstance(sample.columns, Mapping):
        raise TypeError(f"{where}: columns is a {type(sample.columns).__name__}; it must map names to tensors")
    for name, column in sample.columns.items():
        _validate_column(f"{where}: column {name!r}", name, column, length)


def _validate_column(where: str, name: str, column: Tensor, length: int) -> None:
    if not isinstance(column, Tensor):
        shape = "[T, K]" if name in TOP_K_COLUMNS else "[T]"
        dtype = str(column_dtype(name)).removeprefix("torch.")
        raise TypeError(f"{where} is a {type(column).__name__}; it must be a Tensor, {shape} {dtype}")
    _require_dense(where, column)
    has_k = name in TOP_K_COLUMNS
    fits = column.ndim == (2 if has_k else 1) and column.shape[0] == length and column.numel() > 0
    if column.dtype != column_dtype(name) or not fits:
        dtype = str(column_dtype(name)).removeprefix("torch.")
        raise ValueError(
            f"{where} has shape {tuple(column.shape)} and dtype {column.dtype}; "
            f"it must be [{length}{', K' if has_k else ''}] {dtype}"
        )


def _require_dense(where: str, tensor: Tensor) -> None:
    # nested and quantized tensors have another layout, or a dtype that is refused
    if tensor.layout != torch.strided or not tensor.is_cpu:
        raise ValueError(
            f"{where} has layout {tensor.layout} and device {tensor.device}; it must be a dense tensor on the CPU"
        )


def _validate_values(samples: Sequence[Sample], vocab_size: int) -> None:
    """Raises ValueError for ids outside the vocabulary, but IGNORE_TARGET in targets, and columns
    that are not finite.
    """
    limit = f"ids are 0 to {vocab_size - 1} (vocab_size={vocab_size})"

    def is_unknown(ids: np.ndarray) -> np.ndarray:
        return (ids < 0) | (ids >= vocab_size)

    def is_no_target(ids: np.ndarray) -> np.ndarray:
        return is_unknown(ids) & (ids != IGNORE_TARGET)

    tokens = {index: sample.tokens for index, sample in enumerate(samples)}
    _refuse_values(is_unknown, tokens, f"tokens[{{place}}]={{value}}, but {limit}")
    targets = {index: sample.targets for index, sample in enumerate(samples)}
    _refuse_values(is_no_target, targets, f"targets[{{place}}]={{value}}, but {limit} or {IGNORE_TARGET}")
    columns: dict[str, dict[int, Tensor]] = {}
    for index, sample in enumerate(samples):
        for name, column in sample.columns.items():
            columns.setdefault(name, {})[index] = column
    for name in sorted(columns):
        text = f"column {name!r} holds {{value}} at position {{place}}; it must be finite"
        _refuse_values(lambda values: ~np.isfinite(values), columns[name], text)
    target_ids = columns.get("target_ids", {})
    _refuse_values(is_unknown, target_ids, f"target_ids[{{place}}] holds {{value}}, but {limit}")


def _refuse_values(is_bad: Callable[[np.ndarray], np.ndarray], tensors: Mapping[int, Tensor], text: str) -> None:
    """Raises ValueError for the first bad value. tensors: by the index of the sample.

    All tensors at once, which is faster. By numpy: torch would wake a thread for every core, which
    can take longer than a training step.
    """
    if not tensors or not is_bad(torch.cat(list(tensors.values())).detach().numpy()).any():
        return
    for index, tensor in tensors.items():
        places = np.argwhere(is_bad(tensor.detach().numpy()))
        if len(places):
            value = tensor[tuple(places[0])].item()
            raise ValueError(f"sample {index}: " + text.format(place=places[0][0], value=value))


def require_optimizer(call: str, optimizer: object | None) -> None:
    if optimizer is None:
        raise ValueError(f"{call} is not possible with optimizer=None: this trainer only infers")


def require_tenant(name: str, seed: int, lora_rank: int) -> None:
    """lora_rank: of the trainer. 0: it has no adapters."""
    if not isinstance(name, str) or not _is_integer(seed):
        raise TypeError(f"new_tenant({name!r}, seed={seed!r}); name must be a str, seed an integer")
    if not name:
        raise ValueError(
            "new_tenant('') is not possible: '' is the name of the tenant that every trainer has from the start"
        )
    if not lora_rank:
        raise ValueError(
            f"new_tenant({name!r}) is not possible with lora.rank=0: a new tenant trains adapters, and this trainer has none"
        )


def validate_optimizer_arguments(config: "OptimizerConfig") -> None:
    """Raises ValueError unless the constructor makes a torch.optim.Optimizer from these arguments."""
    if config.name in ("AdamW", "Adam") and not config.arguments:
        # nothing to check; a process's first optimizer takes 1 s, for torch imports its compiler
        return
    make = pkgutil.resolve_name(config.name) if ":" in config.name else getattr(torch.optim, config.name)
    try:
        made = make([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.0, **config.arguments)
    except Exception as error:
        raise ValueError(f"optimizer.arguments={config.arguments} does not fit {config.name}: {error}") from None
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer.name={config.name!r} makes a {type(made).__name__}, which is not a torch.optim.Optimizer"
        )


def require_gpus(config: "TrainerConfig", name: str = "") -> None:
    """Raises ValueError if the ranks take GPUs that this program does not see, if it sees any. name:
    of the model in a run, such as "critic".
    """
    gpus = config.gpus()
    count = torch.cuda.device_count()
    if torch.cuda.is_available() and gpus.stop > count:
        layout = layouts.described(layouts.all_degrees(config))
        field = f"{name}.gpu" if name else "gpu"
        begin = f" from {field}={gpus.start} on" if gpus.start else ""
        needed = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}{begin}"
        raise ValueError(f"{layout} takes {needed}, but this program sees {count}, numbered from 0")


def require_gpu(config: "GeneratorConfig", num_hosts: int = 1) -> None:
    """The same of a generator. num_hosts: those of the replicas, with as many GPUs each as this one."""
    count = torch.cuda.device_count()
    if not torch.cuda.is_available():
        return
    if config.gpu is not None and config.gpu >= count:
        raise ValueError(
            f"generator.gpu={config.gpu}, but this program sees {count} GPUs, numbered from 0. Choose a lower generator.gpu. "
            "If the trainer uses that GPU too, also lower generator.gpu_memory_utilization"
        )
    gpus = config.gpus(num_hosts)
    if gpus.stop > count:
        of_hosts = f" of each of {num_hosts} hosts," if num_hosts > 1 else ""
        raise ValueError(
            f"generator.replicas={config.replicas} with generator.tensor_parallel={config.tensor_parallel} takes {len(gpus)} GPUs{of_hosts} from "
            f"generator.gpu={gpus.start} on, but this program sees {count}"
        )


HYPERPARAMETERS = {"beta1": "betas", "beta2": "betas", "eps": "eps", "weight_decay": "weight_decay"}
"""Fields of OptimParams that an optimizer may lack -> keys of torch's parameter groups."""


@dataclass(frozen=True, slots=True)
class _Limit:
    has_type: Callable[[object], bool]
    is_in_range: Callable[[Any], bool]  # of a value of that type
    words: str  # for error texts

    def require(self, name: str, value: object) -> None:
        """Raises TypeError or ValueError."""
        if not self.has_type(value):
            raise TypeError(f"{name}={value!r}; it must be {self.words}")
        if not self.is_in_range(value):
            raise ValueError(f"{name}={value!r}; it must be {self.words}")


# a bool in the place of a number is a mistake
def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_AT_LEAST_ZERO = _Limit(_is_number, lambda x: 0 <= x < math.inf, "a finite number of at least 0")
_DECAY = _Limit(_is_number, lambda x: 0 <= x < 1, "a number in [0, 1)")
_POSITIVE = _Limit(_is_number, lambda x: 0 < x < math.inf, "a positive, finite number")
# Logits are divided by it: lower it overflows, higher all tokens are equally likely.
_TEMPERATURE = _Limit(_is_number, lambda x: 1e-6 <= x <= 1e6, "a positive, finite number from 1e-06 to 1e+06")
_POSITIVE_OR_NONE = _Limit(
    lambda x: x is None or _is_number(x), lambda x: x is None or 0 < x < math.inf, "a positive, finite number, or None"
)
OPTIM_LIMITS = {
    "learning_rate": _AT_LEAST_ZERO,
    "beta1": _DECAY,
    "beta2": _DECAY,
    "eps": _POSITIVE,
    "weight_decay": _AT_LEAST_ZERO,
    "grad_divisor": _POSITIVE,
    "grad_clip_norm": _POSITIVE_OR_NONE,
}

_COUNT = _Limit(_is_integer, lambda x: x >= 1, "an integer of at least 1")
_INDEX = _Limit(_is_integer, lambda x: x >= 0, "an integer of at least 0")
MAX_TOP_LOGPROBS = 20
"""vLLM's limit."""
_TOP = _Limit(_is_integer, lambda x: 0 <= x <= MAX_TOP_LOGPROBS, f"an integer, 0 to {MAX_TOP_LOGPROBS}")
SAMPLING_LIMITS = {
    "max_tokens": _COUNT,
    "n": _COUNT,
    # between 0 and 0.01 vLLM would sample at 0.01, and only warn
    "temperature": _Limit(_is_number, lambda x: x == 0 or 0.01 <= x <= 2, "a number: 0 (greedy) or in [0.01, 2]"),
    "top_p": _Limit(_is_number, lambda x: 0 < x <= 1, "a number in (0, 1]"),
    "top_k": _INDEX,
    "seed": _Limit(
        lambda x: x is None or _is_integer(x),
        lambda x: x is None or 0 <= x <= MAX_SEED,
        "an integer in [0, 2**62), or None",
    ),
    "ignore_stop": _Limit(lambda x: isinstance(x, bool), lambda _: True, "True or False"),
    "top_logprobs": _TOP,
    "prompt_top_logprobs": _TOP,
}

_TIMEOUT = _Limit(_is_number, lambda x: x >= 0, "a number of seconds, at least 0")


def supported_hyperparameters(param_group: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of HYPERPARAMETERS in this parameter group. Adafactor's eps, a pair, does not count."""
    has_betas = len(param_group.get("betas", ())) == 2
    supported = []
    for name, key in HYPERPARAMETERS.items():
        is_supported = has_betas if key == "betas" else isinstance(param_group.get(key), float | int)
        if is_supported:
            supported.append(name)
    return tuple(supported)


def validate_optim_params(
    params: OptimParams, optimizer: str | None = None, supported: Collection[str] = tuple(HYPERPARAMETERS)
) -> None:
    """Raises ValueError for a field out of range, or not at its default if the optimizer lacks it.

    optimizer: its name, for error texts. supported: its fields of HYPERPARAMETERS.
    """
    if not isinstance(params, OptimParams):
        raise TypeError(f"params is a {type(params).__name__}; it must be OptimParams")
    for name, limit in OPTIM_LIMITS.items():
        limit.require(name, getattr(params, name))
    defaults = OptimParams(learning_rate=0.0)
    for name in HYPERPARAMETERS:
        value = getattr(params, name)
        default = getattr(defaults, name)
        if name not in supported and value != default:
            raise ValueError(
                f"{name}={value}, but {optimizer} has no {HYPERPARAMETERS[name]}; leave {name} at {default}"
            )


def validate_prompts(prompts: Sequence[Sequence[int]], *, max_model_len: int, vocab_size: int) -> None:
    """Raises ValueError if the generator cannot take a prompt, which must leave room for one token."""
    _validate_ids("prompt", prompts, max_model_len - 1, max_model_len, vocab_size)


def validate_sequences(sequences: Sequence[Sequence[int]], *, max_model_len: int, vocab_size: int) -> None:
    """Raises ValueError if the generator cannot compute the logprobs of a sequence."""
    _validate_ids("sequence", sequences, max_model_len, max_model_len, vocab_size)


def _validate_ids(what: str, lists: Sequence[Sequence[int]], longest: int, max_model_len: int, vocab_size: int) -> None:
    if isinstance(lists, str) or not isinstance(lists, Sequence) or len(lists) == 0:
        raise ValueError(f"{what}s is {lists!r}; give a list of at least 1 {what}")
    for index, ids in enumerate(lists):
        if not isinstance(ids, Sequence) or not _are_integers(ids):
            raise TypeError(f"{what} {index} is {ids!r}; it must be a list of token ids")
        if not 0 < len(ids) <= longest:
            raise ValueError(
                f"{what} {index} has {len(ids)} tokens; it must have 1 to {longest} (max_model_len={max_model_len})"
            )
        if min(ids) < 0 or max(ids) >= vocab_size:
            outside = next(token for token in ids if not 0 <= token < vocab_size)
            raise ValueError(f"{what} {index} holds the id {outside}, but ids are 0 to {vocab_size - 1}")


def _are_integers(ids: Iterable[object]) -> bool:
    # each type once: a prompt has thousands of tokens, of few types
    return all(issubclass(kind, int) and kind is not bool for kind in set(map(type, ids)))


def validate_sampling_params(params: SamplingParams, *, vocab_size: int | None = None) -> None:
    """Raises ValueError for a parameter out of range. vocab_size: None: not known yet."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params is a {type(params).__name__}; it must be SamplingParams")
    for name, limit in SAMPLING_LIMITS.items():
        limit.require(name, getattr(params, name))
    end = math.inf if vocab_size is None else vocab_size
    stops = _Limit(
        lambda ids: isinstance(ids, tuple | list | Set) and _are_integers(ids),
        lambda ids: all(0 <= token < end for token in ids),
        f"a tuple of ids, 0 to {end - 1}" if vocab_size is not None else "a tuple of ids",
    )
    stops.require("stop_token_ids", params.stop_token_ids)
    for name in ("top_logprobs", "prompt_top_logprobs"):
        if getattr(params, name) > end:
            raise ValueError(f"{name}={getattr(params, name)}; the vocabulary has {end} tokens")


def validate_pull(version: int, timeout: float) -> None:
    _INDEX.require("version", version)
    _TIMEOUT.require("timeout", timeout)


def require_seed(name: str, value: int) -> None:
    # numpy, seeded by vLLM with a sum of two, takes seeds below 2**32
    if not 0 <= value < 1 << 31:
        raise ValueError(f"{name}={value}; it must be at least 0 and below 2**31")


def require_config(call: str, config: object, expected: type) -> None:
    if not isinstance(config, expected):
        raise TypeError(f"config is a {type(config).__name__}; {call} takes a {expected.__name__}")
