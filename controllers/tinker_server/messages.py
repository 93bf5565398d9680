"""The JSON bodies of requests to the Tinker server, as version 0.38 of the Tinker SDK sends them.

Lists and names have limits: a few MiB could become objects or answers of many times that.
"""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_TTL = 10 * 365 * 24 * 3600  # seconds, ten years
MAX_INT64 = (1 << 63) - 1
MAX_FIELDS = 64
"""Most fields of an object that is not free-form: pydantic makes an error for each unknown one."""
MAX_NAME = 512
MAX_METADATA_BYTES = 64 << 10
MAX_DEPTH = 32
MAX_STOPS = 256
MAX_STOP_CHARACTERS = 1024

Number = Annotated[int, Field(ge=0, le=MAX_INT64)]
Seconds = Annotated[int, Field(ge=1, le=MAX_TTL)]
Name = Annotated[str, Field(max_length=MAX_NAME)]
"""An id, path or name, which replies, errors and logs repeat."""
Text = Annotated[str, Field(max_length=MAX_METADATA_BYTES)]
Integers = Annotated[list[int], Field(fail_fast=True)]
Floats = Annotated[list[float], Field(fail_fast=True)]
Names = Annotated[list[Name], Field(fail_fast=True, max_length=64)]
StopText = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _require_few_fields(cls, values: Any) -> Any:
        if isinstance(values, dict):
            if len(values) > MAX_FIELDS:
                raise ValueError(f"the object has {len(values)} fields; at most {MAX_FIELDS} are allowed")
            for name in ("user_metadata", "reason", "optimizer_config", "optimizer_params"):
                if name in values:
                    _require_small(name, values[name])
        return values


def _require_small(name: str, value: Any) -> None:
    """Raises ValueError for a free-form object that no answer could repeat."""
    try:
        size = len(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name} has a lone surrogate, which is no text") from None
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"{name} has {size} bytes as JSON; at most {MAX_METADATA_BYTES} are allowed")
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [each for group in level for each in _children(group)]
    if level:
        raise ValueError(f"{name} is nested more than {MAX_DEPTH} deep")


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


class Request(Body):
    type: Name = ""  # its name, which the SDK sends


class ClientConfig(Body):
    sdk_version: Name


class CreateSession(Request):
    tags: Names = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: Name = ""
    project_id: Name | None = None
    display_name: Name | None = None


class OfSession(Request):
    session_id: Name


class FinishSession(Body):
    reason: dict[str, Any]
    detail: Text | None = None


class Lora(Body):
    rank: int = Field(ge=0, le=4096)
    seed: int | None = Field(default=None, ge=0, lt=1 << 62)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Request):
    session_id: Name
    model_seq_id: Number
    base_model: Name
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora | None = None
    optimizer_config: dict[str, Any] | None = None


class OfModel(Request):
    model_id: Name
    seq_id: int | None = Field(default=None, le=MAX_INT64)  # the place among the requests to the run


class AdamParams(Body):
    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(OfModel):
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class RetrieveFuture(Body):
    request_id: Name
    allow_metadata_only: bool = False


class SaveWeights(OfModel):
    path: Name | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSampler(OfModel):
    path: Name | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Seconds | None = None
    user_metadata: dict[str, str] | None = None


class SaveWeightsExternal(OfModel):
    path: Name
    ttl_seconds: Seconds | None = None
    age_encryption_recipients: Annotated[list[Text], Field(max_length=64)] | None = None


class LoadWeights(Request):
    model_id: Name | None = None
    seq_id: int | None = Field(default=None, le=MAX_INT64)
    session_id: Name | None = None
    model_seq_id: Number | None = None
    base_model: Name | None = None
    user_metadata: dict[str, Any] | None = None
    path: Name
    optimizer: bool
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: Text | None = None


class CreateSamplingSession(Request):
    session_id: Name
    sampling_session_seq_id: Number
    base_model: Name | None = None
    model_path: Name | None = None


class Chunk(Body):
    type: Name = "encoded_text"
    tokens: Integers | None = None
    data: str | None = None
    format: Name | None = None
    location: Name | None = None
    expected_tokens: int | None = None
    dmel: Any = None


class Prompt(Body):
    chunks: Annotated[list[Chunk], Field(fail_fast=True, max_length=4096)]


class SampleOptions(Body):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: (
        StopText
        | Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOPS)]
        | Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOPS)]
        | None
    ) = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class TensorData(Body):
    data: Integers | Floats
    dtype: Literal["float32", "int64"]
    shape: Annotated[list[int], Field(max_length=8)] | None = None
    sparse_crow_indices: Integers | None = None
    sparse_col_indices: Integers | None = None


class SampleRequest(Request):
    num_samples: int = Field(default=1, ge=1)
    prompt: Prompt
    sampling_params: SampleOptions
    base_model: Name | None = None
    model_path: Name | None = None
    sampling_session_id: Name | None = None
    seq_id: Number | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0)
    topk_sample_logprobs: int = Field(default=0, ge=0)
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = Field(default=0, ge=0)
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None

    @property
    def num_bytes(self) -> int:
        """About the size of the body: eight bytes per number and character."""
        sizes = [len(chunk.tokens or ()) for chunk in self.prompt.chunks]
        if self.target_prompt_logprobs is not None:
            sizes.append(len(self.target_prompt_logprobs.data))
        sizes += [len(each) if isinstance(each, str) else 1 for each in self.sampling_params.stop or ()]
        return 8 * sum(sizes)


class CopyWeights(Body):
    source_path: Name
    session_id: Name | None = None
    model_seq_id: Number | None = None
    destination_project_id: Name | None = None
    ttl_seconds: Seconds | None = None
    weights_access_token: Text | None = None


class WeightsInfo(Body):
    tinker_path: Name


class SetTtl(Body):
    ttl_seconds: Seconds | None = None
