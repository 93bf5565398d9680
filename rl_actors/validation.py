"""Refuse bad input before any rank does work: pure checks that the client and every rank run alike."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rl_actors import layouts
from rl_actors.losses import Loss, columns_of, name_of
from rl_actors.types import IGNORE_TARGET, TOP_K_COLUMNS, OptimParams, Sample, SamplingParams, column_dtype

if TYPE_CHECKING:
    from rl_actors.config import GeneratorConfig, TrainerConfig


def validate_samples(
    samples: Sequence[Sample], loss: Loss | None, *, vocab_size: int, max_sequence_length: int, max_call_bytes: int
) -> None:
    """Raises ValueError (TypeError for a wrong type) naming the sample, the value and the limit."""
    if not isinstance(samples, Sequence) or len(samples) == 0:
        raise ValueError(f"samples is {samples!r}; give a list of at least 1 Sample")
    required, optional = columns_of(loss) if loss is not None else (frozenset(), None)
    num_bytes, seen = 0, None
    for index, sample in enumerate(samples):
        _validate_shapes(f"sample {index}", sample, max_sequence_length)
        if sample.columns.keys() != seen:  # of a thousand samples most have the columns of the one before
            seen = sample.columns.keys()
            names = set(seen)
            if missing := required - names:
                raise ValueError(f"sample {index} has no column {min(missing)!r}, which {name_of(loss)} reads")
            if optional is not None and (unknown := names - required - optional):
                reads = ", ".join(sorted(required | optional))
                raise ValueError(f"sample {index} has the column {min(unknown)!r}, but {name_of(loss)} reads {reads}")
        num_bytes += len(sample) * 16 + sum(c.numel() * c.element_size() for c in sample.columns.values())
    if num_bytes > max_call_bytes:
        raise ValueError(f"the samples hold {num_bytes} bytes but max_call_bytes={max_call_bytes}; split the call")
    _validate_alike(samples, optional or frozenset())
    _validate_values(samples, vocab_size)


def _validate_alike(samples: Sequence[Sample], optional: frozenset[str]) -> None:
    """What all samples of a call must share: which optional columns there are, and K."""
    first, shared = samples[0].columns, optional | set(TOP_K_COLUMNS)
    for index, sample in enumerate(samples):
        if sample.columns.keys() == first.keys() and first.keys().isdisjoint(TOP_K_COLUMNS):
            continue
        if odd := {name for name in shared if (name in first) != (name in sample.columns)}:
            name = min(odd)
            has, lacks = (0, index) if name in first else (index, 0)
            raise ValueError(
                f"sample {has} has the column {name!r} and sample {lacks} has not; all of a call have it or none"
            )
        sizes = {name: sample.columns[name].shape[1] for name in TOP_K_COLUMNS if name in sample.columns}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"sample {index}: K differs: {sizes}; target_ids and target_weights must have the same shape"
            )
        if "target_weights" in sizes and "target_ids" not in sizes:
            raise ValueError(f"sample {index} has the column 'target_weights' but no column 'target_ids'")
        if "target_weights" in optional and "target_ids" in sizes and "target_weights" not in sizes:
            raise ValueError(f"sample {index} has the column 'target_ids' but no column 'target_weights'")
        for name, size in sizes.items():
            if name in first and size != first[name].shape[1]:
                expected = first[name].shape[1]
                raise ValueError(
                    f"sample {index}: column {name!r} has K={size} but sample 0 has K={expected}; K is one a call"
                )


def _validate_shapes(where: str, sample: Sample, max_sequence_length: int) -> None:
    if not isinstance(sample, Sample):
        raise TypeError(f"{where} is a {type(sample).__name__}; it must be a Sample")
    for name, ids in (("tokens", sample.tokens), ("targets", sample.targets)):
        if not isinstance(ids, Tensor):
            raise TypeError(f"{where}: {name} is a {type(ids).__name__}; it must be a Tensor, [T] int64")
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
    if not (isinstance(sample.temperature, float | int) and 0 < sample.temperature < math.inf):
        raise ValueError(f"{where}: temperature={sample.temperature}; it must be positive and finite")
    if not isinstance(sample.columns, Mapping):
        raise TypeError(f"{where}: columns is a {type(sample.columns).__name__}; it must map names to tensors")
    for name, column in sample.columns.items():
        if not isinstance(column, Tensor):
            raise TypeError(f"{where}: column {name!r} is a {type(column).__name__}; it must be a Tensor, [T] float32")
        fits = column.ndim == (2 if name in TOP_K_COLUMNS else 1) and column.shape[0] == length and column.numel() > 0
        if column.dtype != column_dtype(name) or not fits:
            given = f"shape {tuple(column.shape)} and dtype {column.dtype}"
            expected = (
                f"[{length}{', K' if name in TOP_K_COLUMNS else ''}] {str(column_dtype(name)).removeprefix('torch.')}"
            )
            raise ValueError(f"{where}: column {name!r} has {given}; it must be {expected}")


def _validate_values(samples: Sequence[Sample], vocab_size: int) -> None:
    """Look at all samples at once, and for the culprit only when there is one.

    In numpy: over as many positions torch wakes a thread for every core of the host, which can take longer than a step.
    """

    def culprit(is_bad: Callable[[np.ndarray], np.ndarray], tensors: list[Tensor]) -> tuple[int, int, float] | None:
        if not is_bad(torch.cat(tensors).detach().numpy()).any():
            return None
        bad = (is_bad(tensor.detach().numpy()) for tensor in tensors)
        index, where = next((i, np.argwhere(of_tensor)[0]) for i, of_tensor in enumerate(bad) if of_tensor.any())
        return index, int(where[0]), tensors[index][tuple(where)].item()

    outside = lambda x: (x < 0) | (x >= vocab_size)  # noqa: E731
    if found := culprit(outside, [sample.tokens for sample in samples]):
        index, position, value = found
        raise ValueError(
            f"sample {index}: tokens[{position}]={value}, but ids are 0 to {vocab_size - 1} (vocab_size={vocab_size})"
        )
    bad_target = lambda x: outside(x) & (x != IGNORE_TARGET)  # noqa: E731
    if found := culprit(bad_target, [sample.targets for sample in samples]):
        index, position, value = found
        raise ValueError(
            f"sample {index}: targets[{position}]={value}, but ids are 0 to {vocab_size - 1} (vocab_size={vocab_size}) or {IGNORE_TARGET}"
        )
    for name in sorted({name for sample in samples for name in sample.columns}):
        holders = [i for i, sample in enumerate(samples) if name in sample.columns]
        if found := culprit(lambda x: ~np.isfinite(x), [samples[i].columns[name] for i in holders]):
            index, position, value = found
            raise ValueError(
                f"sample {holders[index]}: column {name!r} holds {value} at position {position}; it must be finite"
            )
    holders = [i for i, sample in enumerate(samples) if "target_ids" in sample.columns]
    if holders and (found := culprit(outside, [samples[i].columns["target_ids"] for i in holders])):
        index, position, value = found
        raise ValueError(
            f"sample {holders[index]}: target_ids[{position}] holds {value}, but ids are 0 to {vocab_size - 1} (vocab_size={vocab_size})"
        )


def require_optimizer(call: str, optimizer: Any) -> None:
    """Raises ValueError when the trainer has no optimizer: for calls that train, and that read or write an optimizer's state."""
    if optimizer is None:
        raise ValueError(f"{call} is not possible with optimizer=None: this trainer only infers")


def require_gpus(config: "TrainerConfig") -> None:
    """Raises ValueError for a layout of more processes than this program sees GPUs, on a machine with GPUs."""
    taken, count = config.num_processes(), torch.cuda.device_count()
    if torch.cuda.is_available() and taken > count:
        layout = layouts.described(layouts.all_degrees(config))
        raise ValueError(f"{layout} takes {taken} GPUs, but this program sees {count}")


def require_gpu(config: "GeneratorConfig") -> None:
    """Raises ValueError for a generator's GPU that this program does not see, on a machine with GPUs."""
    count = torch.cuda.device_count()
    if torch.cuda.is_available() and config.gpu is not None and config.gpu >= count:
        raise ValueError(
            f"generator.gpu={config.gpu}, but this program sees {count} GPUs, from 0 on; one that the trainer has, too, "
            "wants a smaller generator.gpu_memory_utilization"
        )


HYPERPARAMETERS = {"beta1": "betas", "beta2": "betas", "eps": "eps", "weight_decay": "weight_decay"}
"""Fields of OptimParams that an optimizer may lack -> what torch calls them."""


def supported_hyperparameters(param_group: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of HYPERPARAMETERS that an optimizer with this parameter group has; a pair of eps, as Adafactor's, is none."""
    has_betas = len(param_group.get("betas", ())) == 2
    supported = []
    for name, key in HYPERPARAMETERS.items():
        if has_betas if key == "betas" else isinstance(param_group.get(key), float | int):
            supported.append(name)
    return tuple(supported)


def validate_optim_params(
    params: OptimParams, optimizer: str | None = None, supported: Collection[str] = tuple(HYPERPARAMETERS)
) -> None:
    """Raises ValueError naming the field, its value and the limit. supported: those of HYPERPARAMETERS that the optimizer has."""
    if not isinstance(params, OptimParams):
        raise TypeError(f"params is a {type(params).__name__}; it must be OptimParams")
    limits: dict[str, tuple[Callable[[float], bool], str]] = {
        "learning_rate": (lambda x: x >= 0, "a number of at least 0, finite"),
        "beta1": (lambda x: 0 <= x < 1, "a number in [0, 1)"),
        "beta2": (lambda x: 0 <= x < 1, "a number in [0, 1)"),
        "eps": (lambda x: x > 0, "a number, positive and finite"),
        "weight_decay": (lambda x: x >= 0, "a number of at least 0, finite"),
        "grad_divisor": (lambda x: x > 0, "a number, positive and finite"),
        "grad_clip_norm": (lambda x: x > 0, "a number, positive and finite, or None"),
    }
    for name, (holds, limit) in limits.items():
        value = getattr(params, name)
        if value is None and name == "grad_clip_norm":
            continue
        if not (isinstance(value, float | int) and math.isfinite(value) and holds(value)):
            raise ValueError(f"{name}={value}; it must be {limit}")
    defaults = OptimParams(learning_rate=0.0)
    for name in HYPERPARAMETERS:
        value, default = getattr(params, name), getattr(defaults, name)
        if name not in supported and value != default:
            raise ValueError(f"{name}={value}, but {optimizer} has no {HYPERPARAMETERS[name]}; leave it at {default}")


def validate_prompts(prompts: Any, params: SamplingParams, *, max_model_len: int, vocab_size: int) -> None:
    """Raises ValueError naming the prompt or the parameter, its value and the limit."""
    if not isinstance(prompts, Sequence) or len(prompts) == 0:
        raise ValueError(f"prompts is {prompts!r}; give a list of at least 1 prompt")
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, Sequence) or not all(isinstance(token, int) for token in prompt):
            raise TypeError(f"prompt {index} is {prompt!r}; it must be a list of token ids")
        if not 0 < len(prompt) < max_model_len:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; it must have 1 to {max_model_len - 1} (max_model_len={max_model_len})"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            outside = next(token for token in prompt if not 0 <= token < vocab_size)
            raise ValueError(f"prompt {index} holds the id {outside}, but ids are 0 to {vocab_size - 1}")
    limits: dict[str, tuple[Callable[[Any], bool], str]] = {
        "max_tokens": (lambda x: isinstance(x, int) and x >= 1, "an integer of at least 1"),
        "n": (lambda x: isinstance(x, int) and x >= 1, "an integer of at least 1"),
        # vLLM would silently sample at 0.01 what is colder.
        "temperature": (lambda x: x == 0 or 0.01 <= x <= 2, "0 (greedy) or in [0.01, 2]"),
        "top_p": (lambda x: 0 < x <= 1, "in (0, 1]"),
        "top_k": (lambda x: isinstance(x, int) and x >= 0, "an integer of at least 0"),
        "seed": (lambda x: x is None or (isinstance(x, int) and 0 <= x < 1 << 62), "None or in [0, 2**62)"),
        "stop_token_ids": (lambda x: all(0 <= token < vocab_size for token in x), f"ids of 0 to {vocab_size - 1}"),
    }
    for name, (holds, limit) in limits.items():
        if not holds(getattr(params, name)):
            raise ValueError(f"{name}={getattr(params, name)}; it must be {limit}")
