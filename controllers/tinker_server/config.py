"""Config of the Tinker server: the base model that it serves, its actors, and its limits."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

from rl_actors import GeneratorConfig, TrainerConfig
from rl_actors.field_types import require_field_types
from rl_actors.model_config import ModelConfig


@dataclass(kw_only=True)
class ServeConfig:
    """Runs with adapters of the same rank and layers share a trainer; all samplers share a generator."""

    name: str
    """Name by which clients ask for the base model."""
    hf_path: str = ""
    """Hugging Face directory of the base model, with tokenizer. Empty: `write_base` writes it."""
    write_base: Callable[[Path], None] | None = None
    """Writes the base model, with tokenizer, into a directory, if hf_path is empty."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Of every trainer. The server sets `model` and `hf_path` at its start, `lora` at a trainer's."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """The server sets `model` at its start."""
    lora_alpha: float = 32.0
    """An adapter's output is scaled by alpha / rank. The protocol has no field for alpha."""
    max_trainers: int = 2
    """Most trainers in memory. Other runs are on disk until they are used again."""
    max_tenants: int = 16
    """Most runs with adapters in one trainer."""
    keep_parked_hours: float = 7 * 24.0
    """Hours after the last request until the parked state of a run without client is deleted."""
    max_parked_bytes: int = 64 << 30
    """Most bytes of the states on disk; the least recently used of gone clients are deleted."""
    samplers_kept: int = 8
    """Unnamed sampler weights that each run keeps, beside those of its `inflight` samplers."""
    hold_seconds: float = 30.0
    """Longest wait for an answer, then the client asks again. The SDK gives up after 45 seconds."""
    max_body_bytes: int = 32 << 20
    """Largest body of a request, compressed or not. The SDK sends the datums of a call in 5 MB."""
    max_json_bytes: int = 8 << 20
    """Largest JSON request for samples. Python's objects take up to twenty times its bytes."""
    max_bytes_in_flight: int = 256 << 20
    """Of an owner's bodies under way, and of its data that waits. Above: 503 or 429, sent again."""
    max_answer_bytes: int = 128 << 20
    """Largest answer. Requests for samples that could exceed it are refused."""
    max_samples: int = 1024
    """Largest num_samples of one request."""
    max_waiting: int = 20_000
    """Above so many unanswered requests those for samples get a 429, and the SDK sends again."""

    def for_base(self, directory: Path) -> None:
        """Set hf_path, and read the model of trainer and generator from there."""
        self.hf_path = str(directory)
        self.trainer.hf_path = self.hf_path
        self.trainer.model = ModelConfig.from_hf(self.hf_path)
        self.generator.model = ModelConfig.from_hf(self.hf_path)

    def validate(self) -> None:
        """Raises ValueError naming the value and the limit."""
        require_field_types(self)
        if ":" in self.name or not self.name:
            raise ValueError(
                f"name={self.name!r}; it must not be empty, and must not have ':', because the SDK cuts a name there"
            )
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and value <= 0:
                raise ValueError(f"{item.name}={value}; it must be positive")
        if self.hold_seconds > 40:
            raise ValueError(
                f"hold_seconds={self.hold_seconds}; it must be at most 40, because the SDK gives up after 45 seconds"
            )
        self.trainer.validate()
        self.generator.validate()


def tokenizer_id(directory: str) -> str:
    """The path from which the SDK loads the tokenizer. Raises ValueError if it has ':'."""
    path = Path(directory).absolute()
    if ":" in str(path):
        raise ValueError(f"the base model is in {path}, but the SDK cuts the path of a tokenizer at ':'")
    # the SDK cuts a path with exactly two slashes at the second, so /a/b becomes /a/./b
    return str(path) if str(path).count("/") != 2 else f"{path.parent}/./{path.name}"
