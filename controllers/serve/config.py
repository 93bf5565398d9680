"""Config of a Tinker server: the model that it serves, its actors, and its limits."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rl_actors import GeneratorConfig, TrainerConfig
from rl_actors.model_config import ModelConfig


@dataclass(kw_only=True)
class ServeConfig:
    """A server of one base model. Runs whose adapters have the same shape share a trainer, and all samplers share one generator."""

    name: str
    """Name of the base model for clients."""
    hf_path: str = ""
    """Hugging Face directory of the base model, with its tokenizer. Empty: `write_base` writes one."""
    write_base: Callable[[Path], None] | None = None
    """Writes the directory of the base model, if hf_path is empty."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Config of every trainer. The server sets the model and hf_path when it starts, and `lora` when it starts a trainer."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """Config of the generator. The model is set when the server starts."""
    lora_alpha: float = 32.0
    """Scale of the adapters of every run. The protocol has no field for it."""
    max_trainers: int = 2
    """Largest number of trainers in memory at the same time. A run that is in no trainer is kept on disk until it is used again."""
    max_tenants: int = 16
    """Largest number of runs with adapters in one trainer."""
    samplers_kept: int = 8
    """Number of unnamed samplers of a run that keep their weights. The weights of older ones are deleted if no `inflight` sampler uses them."""
    hold_seconds: float = 30.0
    """If a client asks for an answer that is not ready, the server replies after at most this many seconds. The SDK gives up after 45 seconds."""
    max_body_bytes: int = 64 << 20
    """Largest size of a request's body in bytes. The limit holds for the body as it was sent, and for the decompressed body."""
    max_samples: int = 1024
    """Largest num_samples of one request."""
    max_waiting: int = 20_000
    """If this many requests are unanswered, a new request for samples gets a 429, and the SDK sends it again later."""

    def for_base(self, directory: Path) -> None:
        """Set the model of trainer and generator from the directory of the base model."""
        self.hf_path = str(directory)
        self.trainer.hf_path = self.hf_path
        self.trainer.model = ModelConfig.from_hf(self.hf_path)
        self.generator.model = ModelConfig.from_hf(self.hf_path)

    def validate(self) -> None:
        """Raises ValueError naming the value and the limit if the server cannot start from this config."""
        if ":" in self.name or not self.name:
            raise ValueError(
                f"name={self.name!r}; it must not be empty, and must not have ':', at which the SDK cuts a name"
            )
        for name in (
            "max_trainers",
            "max_tenants",
            "samplers_kept",
            "hold_seconds",
            "max_body_bytes",
            "max_samples",
            "max_waiting",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}; it must be positive")
        if self.hold_seconds > 40:
            raise ValueError(
                f"hold_seconds={self.hold_seconds}; it must be at most 40, because the SDK gives up after 45"
            )
        self.trainer.validate()
        self.generator.validate()


def tokenizer_id(directory: str) -> str:
    """The absolute path of the directory. A path with exactly two slashes gets a third slash: /a/b becomes /a/./b. The reason is that the SDK cuts
    a name with exactly two slashes at the second slash.

    Raises ValueError if the path has ':'.
    """
    path = Path(directory).absolute()
    if ":" in str(path):
        raise ValueError(f"the base model is in {path}, but the SDK cuts the path of a tokenizer at ':'")
    return str(path) if str(path).count("/") != 2 else f"{path.parent}/./{path.name}"
