"""Limits that a client checks before it sends a call: the config's until the actor has started, or else those of its info."""

import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch

from rl_actors.config import GeneratorConfig, OptimizerConfig, TrainerConfig
from rl_actors.losses import Loss
from rl_actors.model_config import ModelConfig
from rl_actors.types import GeneratorInfo, Sample, SamplingParams, TrainerInfo
from rl_actors.validation import (
    require_optimizer,
    supported_hyperparameters,
    validate_prompts,
    validate_samples,
    validate_sampling_params,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    @classmethod
    def of_info(cls, info: TrainerInfo | GeneratorInfo) -> Self:
        return cls(**{field.name: getattr(info, field.name) for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLimits(_Limits):
    vocab_size: int
    max_sequence_length: int  # largest number of positions of a sample
    max_call_bytes: int  # largest total size of the samples of one call
    head: str  # "logprobs", or "values" for a value model
    optimizer: str | None  # its name; None: the trainer has none and only infers
    optimizer_fields: tuple[str, ...]  # those of beta1, beta2, eps and weight_decay that the optimizer has
    lora_rank: int  # 0: the trainer has no adapters

    def check_samples(self, samples: Sequence[Sample], loss: Loss | None) -> None:
        """Raises ValueError or TypeError for samples that the ranks would refuse."""
        validate_samples(
            samples,
            loss,
            vocab_size=self.vocab_size,
            max_sequence_length=self.max_sequence_length,
            max_call_bytes=self.max_call_bytes,
            head=self.head,
        )

    def check_training(self, call: str, samples: Sequence[Sample], loss: Loss | None) -> None:
        """As `check_samples`; also raises ValueError if the trainer has no optimizer."""
        require_optimizer(call, self.optimizer)
        self.check_samples(samples, loss)

    def check_state(self, call: str, optimizer: bool) -> None:
        """Raises ValueError if the call needs the state of an optimizer that the trainer lacks."""
        if optimizer:
            require_optimizer(f"{call}(optimizer=True)", self.optimizer)

    @classmethod
    def of_config(cls, config: TrainerConfig) -> "TrainerLimits":
        return cls(
            vocab_size=config.model.vocab_size,
            max_sequence_length=config.max_sequence_length,
            max_call_bytes=config.max_call_bytes,
            head=config.head,
            optimizer=None if config.optimizer is None else config.optimizer.name,
            optimizer_fields=() if config.optimizer is None else _optimizer_fields(config.optimizer),
            lora_rank=config.lora.rank,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorLimits(_Limits):
    max_model_len: int  # largest number of tokens of a prompt and its completion together
    vocab_size: int
    max_adapters: int  # number of adapters that the requests in one step of vLLM may use; 0: no adapter can be loaded
    max_adapter_rank: int
    tokenizer_path: str = ""

    def check_prompts(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        """Raises ValueError or TypeError for a call that the generator would refuse."""
        validate_prompts(prompts, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        validate_sampling_params(params, vocab_size=self.vocab_size)
        # the default is exempt: it may be beyond the limit of a small model, where completions end early
        if params.max_tokens > max(self.max_model_len, SamplingParams().max_tokens):
            raise ValueError(
                f"max_tokens={params.max_tokens} exceeds max_model_len={self.max_model_len}, the limit of a prompt with its "
                f"completion; give at most {self.max_model_len}"
            )

    @classmethod
    def of_config(cls, config: GeneratorConfig) -> "GeneratorLimits":
        model = ModelConfig.from_hf(config.hf_path) if config.hf_path else config.model
        return cls(
            max_model_len=config.max_model_len,
            vocab_size=model.vocab_size,
            max_adapters=config.max_adapters,
            max_adapter_rank=config.max_adapter_rank,
            tokenizer_path=config.tokenizer_path or config.hf_path,
        )


def _optimizer_fields(config: OptimizerConfig) -> tuple[str, ...]:
    make = pkgutil.resolve_name(config.name) if ":" in config.name else getattr(torch.optim, config.name)
    optimizer = make([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.0, **config.arguments)
    return supported_hyperparameters(optimizer.param_groups[0])
