"""The JSON bodies of requests to the Tinker server, as version 0.38 of the Tinker SDK sends them.

Each class lists the fields of a body, or of an object inside a body. The server refuses a request with any other field, and the error names
this field.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_TTL = 10 * 365 * 24 * 3600  # ten years, in seconds
MAX_INT64 = (1 << 63) - 1


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ClientConfig(Body):
    sdk_version: str


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: str = "create_session"


class OfSession(Body):
    session_id: str
    type: str = ""


class FinishSession(Body):
    reason: dict[str, Any]
    detail: str | None = None


class Lora(Body):
    rank: int = Field(ge=0, le=4096)
    seed: int | None = Field(default=None, ge=0, lt=1 << 62)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    session_id: str
    model_seq_id: int = Field(ge=0, le=MAX_INT64)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora | None = None
    optimizer_config: dict[str, Any] | None = None
    type: str = "create_model"


class OfModel(Body):
    model_id: str
    type: str = ""


class AdamParams(Body):
    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    model_id: str
    seq_id: int | None = Field(default=None, le=MAX_INT64)
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    type: str = "optim_step"


class RetrieveFuture(Body):
    request_id: str
    allow_metadata_only: bool = False


class SaveWeights(Body):
    model_id: str
    path: str | None = None
    seq_id: int | None = Field(default=None, le=MAX_INT64)
    ttl_seconds: int | None = Field(default=None, ge=1, le=MAX_TTL)
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: str = "save_weights"


class SaveWeightsForSampler(Body):
    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = Field(default=None, ge=0, le=MAX_INT64)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    seq_id: int | None = Field(default=None, le=MAX_INT64)
    ttl_seconds: int | None = Field(default=None, ge=1, le=MAX_TTL)
    user_metadata: dict[str, str] | None = None
    type: str = "save_weights_for_sampler"


class SaveWeightsExternal(Body):
    model_id: str
    path: str
    seq_id: int | None = Field(default=None, le=MAX_INT64)
    ttl_seconds: int | None = Field(default=None, ge=1, le=MAX_TTL)
    age_encryption_recipients: list[str] | None = None
    type: str = "save_weights_external"


class LoadWeights(Body):
    model_id: str | None = None
    seq_id: int | None = Field(default=None, le=MAX_INT64)
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, le=MAX_INT64)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None
    type: str = "load_weights"


class CreateSamplingSession(Body):
    session_id: str
    sampling_session_seq_id: int = Field(ge=0, le=MAX_INT64)
    base_model: str | None = None
    model_path: str | None = None
    type: str = "create_sampling_session"


class Chunk(Body):
    type: str = "encoded_text"
    tokens: list[int] | None = None
    data: str | None = None
    format: str | None = None
    location: str | None = None
    expected_tokens: int | None = None
    dmel: Any = None


class Prompt(Body):
    chunks: list[Chunk]


class SamplingParams(Body):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class TensorData(Body):
    data: list[int] | list[float]
    dtype: Literal["float32", "int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Sample(Body):
    num_samples: int = Field(default=1, ge=1)
    prompt: Prompt
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = Field(default=None, ge=0, le=MAX_INT64)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0)
    topk_sample_logprobs: int = Field(default=0, ge=0)
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = Field(default=0, ge=0)
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: str = "sample"


class CopyWeights(Body):
    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, le=MAX_INT64)
    destination_project_id: str | None = None
    ttl_seconds: int | None = Field(default=None, ge=1, le=MAX_TTL)
    weights_access_token: str | None = None


class WeightsInfo(Body):
    tinker_path: str


class SetTtl(Body):
    ttl_seconds: int | None = Field(default=None, ge=1, le=MAX_TTL)
