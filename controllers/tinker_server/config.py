"""Config of a server for programs that use the `tinker` SDK: the base model that the server serves, its actors, and its limits."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rl_actors import GeneratorConfig, TrainerConfig
from rl_actors.field_types import require_field_types
from rl_actors.model_config import ModelConfig


@dataclass(kw_only=True)
class ServeConfig:
    """Config of a server of one base model, which clients train and sample.

    A run trains LoRA adapters or all weights. A sampler generates with a saved version of a run's weights, or with the base model. If the
    adapters of several runs have the same rank and the same layers, these runs share a trainer. All samplers share one generator.
    """

    name: str
    """Name by which clients ask for the base model."""
    hf_path: str = ""
    """Hugging Face directory of the base model, with its tokenizer. Empty: `write_base` writes the directory."""
    write_base: Callable[[Path], None] | None = None
    """Function that writes the base model, with its tokenizer, into a directory. It is needed only if hf_path is empty."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Config of every trainer. The server sets the fields `model` and `hf_path` when the server starts, and `lora` when a trainer starts."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """Config of the generator. The server sets the field `model` when the server starts."""
    lora_alpha: float = 32.0
    """Alpha of the adapters of every run: an adapter's output is scaled by alpha / rank. The protocol has no field for alpha."""
    max_trainers: int = 2
    """Largest number of trainers in memory at the same time. A run that is in no trainer is kept on disk until it is used again."""
    max_tenants: int = 16
    """Largest number of runs with adapters in one trainer."""
    keep_parked_hours: float = 7 * 24.0
    """Hours after its last request for which the state on disk of a run is kept whose client is gone. Checkpoints stay."""
    max_parked_bytes: int = 64 << 30
    """Largest size of the states of all runs on disk. Above it the least recently used ones whose clients are gone are deleted."""
    samplers_kept: int = 8
    """Each run keeps the weights of this many samplers without a name, the newest ones. The weights of older samplers without a name are
    deleted. The exception is the newest weights that were saved for `inflight` samplers: all `inflight` samplers of the run use these weights."""
    hold_seconds: float = 30.0
    """If a client asks for an answer that is not ready, the server waits at most this many seconds for the answer, and then replies that
    the client must ask again. The SDK gives up after 45 seconds without a reply."""
    max_body_bytes: int = 32 << 20
    """Largest size of a request's body in bytes. The limit holds for the body as it was sent, and for the decompressed body.
    The SDK sends the datums of a call in requests of at most 5 MB."""
    max_json_bytes: int = 8 << 20
    """Largest size of a request for samples, which is JSON. Python's objects take up to twenty times its bytes."""
    max_bytes_in_flight: int = 256 << 20
    """Largest size of an owner's bodies that are being received, and of an owner's data that waits for a trainer or the generator. Further
    requests get a 503 or a 429, and the SDK sends them again later."""
    max_answer_bytes: int = 128 << 20
    """Largest size of an answer. A request for samples whose answer could be larger is refused."""
    max_samples: int = 1024
    """Largest num_samples of one request."""
    max_waiting: int = 20_000
    """If this many requests of any kind have no answer yet, a new request for samples gets a 429. The SDK then sends the request again later."""

    def for_base(self, directory: Path) -> None:
        """Set hf_path to the directory of the base model, and read the model of trainer and generator from this directory."""
        self.hf_path = str(directory)
        self.trainer.hf_path = self.hf_path
        self.trainer.model = ModelConfig.from_hf(self.hf_path)
        self.generator.model = ModelConfig.from_hf(self.hf_path)

    def validate(self) -> None:
        """Raises ValueError naming the value and the limit if the server cannot start from this config."""
        require_field_types(self)
        if ":" in self.name or not self.name:
            raise ValueError(
                f"name={self.name!r}; it must not be empty, and must not have ':', because the SDK cuts a name there"
            )
        for name in (
            "max_trainers",
            "max_tenants",
            "keep_parked_hours",
            "max_parked_bytes",
            "samplers_kept",
            "hold_seconds",
            "max_body_bytes",
            "max_json_bytes",
            "max_bytes_in_flight",
            "max_answer_bytes",
            "max_samples",
            "max_waiting",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}; it must be positive")
        if self.hold_seconds > 40:
            raise ValueError(
                f"hold_seconds={self.hold_seconds}; it must be at most 40, because the SDK gives up after 45 seconds"
            )
        self.trainer.validate()
        self.generator.validate()


def tokenizer_id(directory: str) -> str:
    """The absolute path of the base model's directory, from which the SDK loads the tokenizer.

    The SDK cuts a path with exactly two slashes at the second slash. So such a path gets a third slash: /a/b becomes /a/./b.

    Raises ValueError if the path has ':'.
    """
    path = Path(directory).absolute()
    if ":" in str(path):
        raise ValueError(f"the base model is in {path}, but the SDK cuts the path of a tokenizer at ':'")
    return str(path) if str(path).count("/") != 2 else f"{path.parent}/./{path.name}"
