"""Dimensions of a model, from and to Hugging Face's config.json, of the kinds in ARCHITECTURES."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl_actors.field_types import PositiveFloat, PositiveInt, require_field_types
from rl_actors.json_files import read_object


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A kind of decoder."""

    hf_class: str
    has_qk_norm: bool
    required: tuple[tuple[str, object], ...] = ()  # required in config.json


ARCHITECTURES = {
    "qwen3": Architecture(hf_class="Qwen3ForCausalLM", has_qk_norm=True),
    "qwen3_moe": Architecture(hf_class="Qwen3MoeForCausalLM", has_qk_norm=True),
    "llama": Architecture(hf_class="LlamaForCausalLM", has_qk_norm=False),
    # no sliding window, the only supported value; without the entry transformers would use 4096
    "mistral": Architecture(hf_class="MistralForCausalLM", has_qk_norm=False, required=(("sliding_window", None),)),
}
"""By model_type in config.json."""

MOE_FIELDS = frozenset(
    ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    + ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
)
"""Only in the config.json of a mixture of experts."""

SUPPORTED_VALUES = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False}
"""Entries of config.json with one supported value. They may be missing."""


ORIGINAL_LENGTH = "original_max_position_embeddings"
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL_LENGTH)
"""Required with rope_type llama3."""


@dataclass(kw_only=True)
class ModelConfig:
    """Dimensions of a Qwen3 (dense or experts), a Llama or a Mistral, named as in config.json."""

    architecture: Literal["qwen3", "llama", "mistral"] = "qwen3"
    """Kind of decoder: config.json's model_type, without _moe."""
    vocab_size: PositiveInt = 151_936
    """Number of tokens in the vocabulary."""
    hidden_size: PositiveInt = 1024
    """Width of the hidden states between blocks."""
    intermediate_size: PositiveInt = 3072
    """Inner width of the MLP."""
    num_hidden_layers: PositiveInt = 28
    """Number of transformer blocks."""
    num_attention_heads: PositiveInt = 16
    """Number of query heads."""
    num_key_value_heads: PositiveInt = 8
    """Number of key and value heads. It must divide num_attention_heads."""
    head_dim: PositiveInt = 128
    """Width of one head."""
    max_position_embeddings: PositiveInt = 40_960
    """Longest sequence that the rotary embedding covers."""
    rope_theta: PositiveFloat = 1_000_000.0
    """Base of the rotary embedding."""
    rope_scaling: dict[str, float] = field(default_factory=dict)
    """Llama 3's scaling of the rotary embedding: factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings. Empty: none.
    """
    rms_norm_eps: PositiveFloat = 1e-6
    """Added to the mean square by every RMSNorm."""
    tie_word_embeddings: bool = True
    """True: the output projection is the embedding matrix."""
    num_experts: int = 0
    """Experts of a mixture-of-experts block. 0: no experts."""
    num_experts_per_tok: PositiveInt = 8
    """Experts that a token is routed to."""
    moe_intermediate_size: PositiveInt = 768
    """Inner width of one expert."""
    norm_topk_prob: bool = True
    """Scale the router's weights of a token's experts to sum to 1."""
    decoder_sparse_step: PositiveInt = 1
    """Distance between blocks with experts. 1: every block."""
    mlp_only_layers: tuple[int, ...] = ()
    """Blocks, from 0, that never have experts."""

    def require_same(self, path: str) -> None:
        """Raises ValueError listing the dimensions that differ from those in `path`."""
        here = asdict(self)
        found = asdict(ModelConfig.from_hf(path))
        differing = [f"{name}={there} instead of {here[name]}" for name, there in found.items() if there != here[name]]
        if differing:
            raise ValueError(f"{path} holds another model: its config.json has {'; '.join(differing)}")

    @classmethod
    def from_hf(cls, path: str | Path) -> "ModelConfig":
        """Read config.json of a directory. Raises ValueError if the model is not supported."""
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ValueError(f"{path} holds no config.json, so it is not a Hugging Face model directory")
        values = read_object(file)
        model_type = values.get("model_type")
        if model_type not in ARCHITECTURES:
            raise ValueError(f"{file} has model_type {model_type!r}; supported are {', '.join(ARCHITECTURES)}")
        for name, supported in SUPPORTED_VALUES.items():
            if values.get(name, supported) != supported:
                raise ValueError(f"{file} has {name}={values[name]!r}; supported is {supported!r}")
        for name, supported in ARCHITECTURES[model_type].required:
            if name not in values:
                raise ValueError(
                    f"{file} lacks {name}, so transformers uses its default; supported is only {name}={supported!r}"
                )
            if values[name] != supported:
                raise ValueError(f"{file} has {name}={values[name]!r}; supported is only {name}={supported!r}")
        values = _with_defaults(values) | _rope(file, values)
        values["architecture"] = model_type.removesuffix("_moe")
        names = set(cls.__dataclass_fields__)
        if model_type == "qwen3_moe":
            values = _with_defaults_of_experts(values)
        else:
            names -= MOE_FIELDS
        missing = [name for name in cls.__dataclass_fields__ if name in names and name not in values]
        if missing:
            raise ValueError(f"{file} lacks {', '.join(missing)}")
        return cls(**{name: values[name] for name in names})

    def to_hf(self) -> dict[str, object]:
        """config.json for transformers and vLLM."""
        model_type = self.model_type
        content: dict[str, object] = {
            "architectures": [ARCHITECTURES[model_type].hf_class],
            "model_type": model_type,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "torch_dtype": "float32",
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": None,
            **dict(ARCHITECTURES[model_type].required),
        }
        for name in self.__dataclass_fields__.keys() - {"architecture", "rope_scaling"}:
            if self.num_experts or name not in MOE_FIELDS:
                value = getattr(self, name)
                content[name] = list(value) if isinstance(value, tuple) else value
        if self.rope_scaling:
            # transformers and vLLM take only an integer
            length = {ORIGINAL_LENGTH: int(self.rope_scaling[ORIGINAL_LENGTH])}
            content["rope_scaling"] = {"rope_type": "llama3", **self.rope_scaling, **length}
        return content

    @property
    def model_type(self) -> str:
        return f"{self.architecture}_moe" if self.num_experts else self.architecture

    @property
    def has_qk_norm(self) -> bool:
        return ARCHITECTURES[self.model_type].has_qk_norm

    def save(self, directory: str | Path) -> None:
        """Write config.json, all that a generator needs but the weights."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "config.json").write_text(json.dumps(self.to_hf(), indent=2) + "\n")

    def has_experts(self, layer: int) -> bool:
        """True if block `layer`, from 0, has experts, by the rule of transformers' Qwen3Moe."""
        is_sparse = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        return is_sparse and layer not in self.mlp_only_layers

    def validate(self) -> None:
        """Raises ValueError if no model can have these dimensions."""
        require_field_types(self, "model.")
        if self.model_type not in ARCHITECTURES:
            raise ValueError(
                f"model.num_experts={self.num_experts} with model.architecture={self.architecture!r}; only qwen3 has experts"
            )
        if self.rope_scaling and set(self.rope_scaling) != set(LLAMA3_SCALING):
            raise ValueError(
                f"model.rope_scaling has {', '.join(self.rope_scaling)}; it must have {', '.join(LLAMA3_SCALING)}"
            )
        for name, value in self.rope_scaling.items():
            if not 0 < value < math.inf or (name == ORIGINAL_LENGTH and value % 1):
                must = "a positive, whole number" if name == ORIGINAL_LENGTH else "positive and finite"
                raise ValueError(f"model.rope_scaling[{name!r}]={value}; it must be {must}")
        if self.num_attention_heads % self.num_key_value_heads:
            heads = f"model.num_attention_heads={self.num_attention_heads}"
            raise ValueError(f"{heads} is not divisible by model.num_key_value_heads={self.num_key_value_heads}")
        if self.head_dim % 2:
            raise ValueError(
                f"model.head_dim={self.head_dim}; it must be even: the rotary embedding rotates pairs of dimensions"
            )
        routed = self.num_experts_per_tok
        if self.num_experts and self.num_experts < routed:
            raise ValueError(
                f"model.num_experts={self.num_experts}; it must be 0 or at least model.num_experts_per_tok={routed}"
            )


def _rope(file: Path, values: dict[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling from a config.json."""
    # rope_parameters since transformers 5, rope_scaling before, with rope_type or type
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return {"rope_theta": theta, "rope_scaling": {}}
    if rope_type != "llama3":
        raise ValueError(f"{file} has rope_type={rope_type!r}; supported are 'default' and 'llama3'")
    missing = [name for name in LLAMA3_SCALING if name not in rope]
    if missing:
        raise ValueError(f"{file} has rope_type='llama3' without {', '.join(missing)}")
    return {"rope_theta": theta, "rope_scaling": {name: float(rope[name]) for name in LLAMA3_SCALING}}


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Missing entries get transformers' defaults."""
    completed = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, **values}
    if values["model_type"] == "mistral":
        completed.setdefault("num_key_value_heads", 8)
    heads = completed.get("num_attention_heads")
    width = completed.get("hidden_size")
    if values["model_type"] in ("llama", "mistral") and heads and width:
        completed["num_key_value_heads"] = completed.get("num_key_value_heads") or heads
        completed["head_dim"] = completed.get("head_dim") or width // heads
    return completed


def _with_defaults_of_experts(values: dict[str, Any]) -> dict[str, Any]:
    """Missing entries get the defaults of transformers' Qwen3Moe."""
    completed = {
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
        "num_experts": values.get("num_local_experts", 128),
        **values,
    }
    completed["mlp_only_layers"] = tuple(completed["mlp_only_layers"] or ())
    if "hidden_size" in completed and "num_attention_heads" in completed:
        completed.setdefault("head_dim", completed["hidden_size"] // completed["num_attention_heads"])
    return completed
