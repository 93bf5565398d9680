"""The dimensions of a Qwen3, and how Hugging Face's config.json says them."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(kw_only=True)
class ModelConfig:
    """A Qwen3, dense or mixture of experts, in the terms of its Hugging Face config.json."""

    vocab_size: int = 151_936
    """Rows of the embedding."""
    hidden_size: int = 1024
    """Width of the residual stream."""
    intermediate_size: int = 3072
    """Width of the MLP."""
    num_hidden_layers: int = 28
    """Transformer blocks."""
    num_attention_heads: int = 16
    """Query heads."""
    num_key_value_heads: int = 8
    """Key and value heads; divides num_attention_heads."""
    head_dim: int = 128
    """Width of one head."""
    max_position_embeddings: int = 40_960
    """Longest sequence the rotary embedding covers."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary embedding."""
    tie_word_embeddings: bool = True
    """Whether the output projection is the embedding matrix."""
    num_experts: int = 0
    """Experts of a mixture-of-experts block; 0: every block has one MLP."""
    num_experts_per_tok: int = 8
    """Experts that a token is routed to."""
    moe_intermediate_size: int = 768
    """Width of one expert."""
    norm_topk_prob: bool = True
    """Whether the weights of a token's experts are scaled to sum to 1."""
    decoder_sparse_step: int = 1
    """Every how many-th block has experts."""
    mlp_only_layers: tuple[int, ...] = ()
    """Blocks that have one MLP all the same, counted from 0."""

    def require_same(self, path: str) -> None:
        """Raises ValueError listing every dimension in which a Hugging Face directory's config.json differs."""
        found = ModelConfig.from_hf(path)
        differing = [
            f"{name}={getattr(self, name)} but {getattr(found, name)} there"
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(found, name)
        ]
        if differing:
            raise ValueError(f"{path} holds another model: {'; '.join(differing)}")

    @classmethod
    def from_hf(cls, path: str | Path) -> "ModelConfig":
        """Read config.json of a Hugging Face directory. Raises ValueError naming the entry when it is not a supported Qwen3."""
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ValueError(f"{path} holds no config.json, so it is not a Hugging Face model directory")
        try:
            values = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{file} is not a JSON object")
        if values.get("model_type") not in HF_MODEL_TYPES:
            raise ValueError(f"{file} has model_type {values.get('model_type')!r}; supported is {HF_MODEL_TYPES}")
        # transformers 5 moved the rotary embedding into rope_parameters.
        rope = values.get("rope_parameters") or {}
        values.setdefault("rope_theta", rope.get("rope_theta", 10_000.0))
        values["rope_type"] = rope.get("rope_type", "default")
        fixed = {
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "hidden_act": "silu",
            "rope_scaling": None,
            "rope_type": "default",
            "use_sliding_window": False,
        }
        for name, value in fixed.items():
            if values.get(name, value) != value:
                raise ValueError(f"{file} has {name}={values[name]!r}; supported is {value!r}")
        if values["model_type"] == "qwen3_moe":
            experts = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": ()}
            values = {**experts, "num_experts": values.get("num_local_experts", 128), **values}
            values["mlp_only_layers"] = tuple(values["mlp_only_layers"] or ())
            values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
        else:
            values = {name: value for name, value in values.items() if name not in MOE_FIELDS}
        values.setdefault("tie_word_embeddings", False)
        missing = [
            name
            for name in cls.__dataclass_fields__
            if name not in values and (name not in MOE_FIELDS or values["model_type"] == "qwen3_moe")
        ]
        if missing:
            raise ValueError(f"{file} lacks {', '.join(missing)}")
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})

    def to_hf(self) -> dict:
        """The content of config.json for transformers and vLLM."""
        kind = ("Qwen3MoeForCausalLM", "qwen3_moe") if self.num_experts else ("Qwen3ForCausalLM", "qwen3")
        names = [name for name in self.__dataclass_fields__ if self.num_experts or name not in MOE_FIELDS]
        return {
            "architectures": [kind[0]],
            "model_type": kind[1],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.02,
            "torch_dtype": "float32",
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": None,
            **{name: list(value) if isinstance(value := getattr(self, name), tuple) else value for name in names},
        }

    def save(self, directory: str | Path) -> None:
        """Write config.json, which is all that a generator needs besides weights."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "config.json").write_text(json.dumps(self.to_hf(), indent=2) + "\n")

    def has_experts(self, layer: int) -> bool:
        """Whether block `layer`, counted from 0, routes to experts: the rule of transformers' Qwen3Moe."""
        sparse = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        return sparse and layer not in self.mlp_only_layers

    def validate(self) -> None:
        """Raises ValueError naming the value and the limit for dimensions that make no model."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, int | float) and name != "num_experts" and not isinstance(value, bool) and value <= 0:
                raise ValueError(f"model.{name}={value}; it must be positive")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"model.num_attention_heads={self.num_attention_heads} is not divisible by model.num_key_value_heads={self.num_key_value_heads}"
            )
        if self.num_experts < 0 or (self.num_experts and self.num_experts_per_tok > self.num_experts):
            raise ValueError(
                f"model.num_experts={self.num_experts}; it must be 0 or at least model.num_experts_per_tok={self.num_experts_per_tok}"
            )


MOE_FIELDS = frozenset(
    {
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
    }
)
HF_MODEL_TYPES = ("qwen3", "qwen3_moe")
