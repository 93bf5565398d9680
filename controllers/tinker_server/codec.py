"""The protobuf messages of Tinker's protocol, as version 0.38 of the SDK sends and reads them. Uses
neither HTTP nor actors.

MESSAGES is our own description, with the SDK's field numbers. Arrays are raw little-endian bytes.

T positions of a datum (one training sequence), N tokens of a prompt, P of a prompt or completion, K
targets of a position, in TopK the likeliest tokens of a position.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from controllers.tinker_server.messages import MAX_NAME

PACKAGE = "rl_actors_serve"
ENUMS = {
    "StopReason": ("STOP", "LENGTH"),
    "DType": ("UNSPECIFIED", "FLOAT32", "INT64", "INT32", "BFLOAT16"),
}
MESSAGES: dict[str, tuple[str, ...]] = {
    # number [repeated | optional | map] type name [in ONEOF]; maps have string keys and values of
    # `type`
    "SparseCsr": ("1 bytes values", "2 bytes crow_indices", "3 bytes col_indices"),
    "Tensor": (
        "1 bytes dense in encoding",
        "2 SparseCsr sparse_csr in encoding",
        "3 DType dtype",
        "4 repeated int64 shape",
    ),
    "EncodedTextChunk": ("1 bytes tokens",),
    "ImageChunk": ("1 bytes data", "2 string format"),
    "DmelChunk": ("1 bytes dmel",),
    "Chunk": (
        "1 EncodedTextChunk encoded_text in chunk",
        "2 ImageChunk image in chunk",
        "3 DmelChunk dmel in chunk",
    ),
    "Span": ("1 string sequence_id", "2 int64 offset", "3 int64 length"),
    "ProvenanceSpan": ("1 Span prompt_tokens in span", "2 Span sampled_tokens in span"),
    "Datum": (
        "1 repeated Chunk model_input",
        "2 map Tensor loss_fn_inputs",
        "3 repeated ProvenanceSpan model_input_spans",
        "4 repeated ProvenanceSpan loss_fn_input_spans",
    ),
    "LossConfigValue": ("1 double number in value", "2 string text in value"),
    "ForwardBackwardRequest": (
        "1 string model_id",
        "2 int32 seq_id",
        "3 repeated Datum data",
        "4 string loss_fn",
        "5 map double loss_fn_config",
        "6 bool forward_only",
        "7 map LossConfigValue loss_fn_config_v2",
    ),
    "BatchedTensor": ("1 bytes data", "2 bytes offsets", "3 DType dtype", "4 repeated int64 trailing_shape"),
    "ArrayRecord": ("1 string type_tag", "2 map BatchedTensor fields", "3 int64 num_datums"),
    "ForwardBackwardOutput": (
        "1 string loss_fn_output_type",
        "2 repeated ArrayRecord loss_fn_outputs",
        "3 map double metrics",
    ),
    "TopkLogprobs": ("1 bytes token_ids", "2 bytes logprobs", "3 uint32 k", "4 uint32 length"),
    "PromptAltTokens": ("1 Tensor tokens", "2 Tensor logprobs"),
    "SampledSequence": (
        "1 StopReason stop_reason",
        "2 bytes tokens",
        "3 optional bytes logprobs",
        "4 optional TopkLogprobs topk_sampled_logprobs",
    ),
    "SampleResponse": (
        "1 repeated SampledSequence sequences",
        "2 optional bytes prompt_logprobs",
        "3 optional TopkLogprobs topk_prompt_logprobs",
        "4 int32 prompt_cache_hit_tokens",
        "5 optional Tensor target_prompt_logprobs",
        "6 optional PromptAltTokens prompt_alt_tokens",
    ),
}

DTYPES: dict[int, np.dtype] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
"""Enum DType -> numpy dtype. The SDK never sends bfloat16."""
MAX_CELLS = 1 << 24
"""Most cells of all tensors of a request. Sparse tensors are made dense, so a few bytes could
otherwise take all memory.
"""
NO_LOGPROB = -99999.0
"""Logprob of a cell of TopK without a token, the SDK's constant."""

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bytes": _FIELD.TYPE_BYTES,
    "string": _FIELD.TYPE_STRING,
    "bool": _FIELD.TYPE_BOOL,
    "double": _FIELD.TYPE_DOUBLE,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "uint32": _FIELD.TYPE_UINT32,
}


def _make_classes() -> dict[str, Any]:
    """Message classes by name, in a descriptor pool of their own, so that they do not conflict with
    the SDK's.
    """
    file = descriptor_pb2.FileDescriptorProto(name="rl_actors_serve.proto", package=PACKAGE, syntax="proto3")
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=f"{name}_{value}", number=number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        # protobuf wants the oneofs of `optional` fields after the others
        for line in sorted(fields, key=lambda line: line.split()[1] == "optional"):
            _add_field(message, line.split())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {}
    for name in MESSAGES:
        found[name] = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
    return found


def _add_field(message: descriptor_pb2.DescriptorProto, words: list[str]) -> None:
    number = int(words[0])
    rest = words[1:]
    label = rest.pop(0) if rest[0] in ("repeated", "optional", "map") else ""
    kind = rest[0]
    name = rest[1]
    oneof = rest[3] if len(rest) == 4 else ""
    field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
    if label == "map":
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=_FIELD.TYPE_STRING, label=_FIELD.LABEL_OPTIONAL)
        _set_type(entry.field.add(name="value", number=2, label=_FIELD.LABEL_OPTIONAL), kind)
        field.type = _FIELD.TYPE_MESSAGE
        field.label = _FIELD.LABEL_REPEATED
        field.type_name = f".{PACKAGE}.{message.name}.{entry.name}"
        return
    _set_type(field, kind)
    if label == "repeated":
        field.label = _FIELD.LABEL_REPEATED
    if label == "optional":
        field.proto3_optional = True
        oneof = f"_{name}"
    if oneof:
        names = [each.name for each in message.oneof_decl]
        if oneof not in names:
            message.oneof_decl.add(name=oneof)
            names.append(oneof)
        field.oneof_index = names.index(oneof)


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = _FIELD.TYPE_ENUM if kind in ENUMS else _FIELD.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{kind}"


CLASSES = _make_classes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One training sequence as a client sent it."""

    tokens: np.ndarray  # [T] int64
    inputs: Mapping[str, np.ndarray]  # each [T] or [T, K], dense; float32, int64 or int32
    # [T] bool: the target is a sampled token, by loss_fn_input_spans; None without spans
    is_sampled: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardCall:
    """A forward or forward_backward request."""

    model_id: str
    seq_id: int  # 0 if the client sent none
    loss_fn: str
    config: Mapping[str, float | str]
    forward_only: bool
    message: Any = field(repr=False)

    def data(self) -> list[Datum]:
        """The datums. Raises ValueError naming the index of a datum that cannot be read, or, before
        any expansion, for more than MAX_CELLS cells.
        """
        num_cells = sum(
            math.prod(max(size, 0) for size in tensor.shape)
            for datum in self.message.data
            for tensor in datum.loss_fn_inputs.values()
        )
        if num_cells > MAX_CELLS:
            raise ValueError(f"the tensors of the request have {num_cells} cells; at most {MAX_CELLS} are allowed")
        found = []
        for index, datum in enumerate(self.message.data):
            try:
                found.append(_read_datum(datum))
            except ValueError as error:
                raise ValueError(f"datum {index}: {error}") from None
        return found


def read_forward_backward(body: bytes) -> ForwardBackwardCall:
    """Raises ValueError if the body is not a ForwardBackwardRequest."""
    message = CLASSES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ValueError(f"the body is not a ForwardBackwardRequest: {error}") from None
    for name in ("model_id", "loss_fn"):
        if len(getattr(message, name)) > MAX_NAME:  # replies, errors and logs repeat it
            raise ValueError(f"{name} has {len(getattr(message, name))} characters; it must have at most {MAX_NAME}")
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():  # overrides loss_fn_config
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return ForwardBackwardCall(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss_fn=message.loss_fn,
        config=config,
        forward_only=message.forward_only,
        message=message,
    )


def _read_datum(message: Any) -> Datum:
    pieces = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ValueError(f"a chunk of model_input is {kind or 'empty'}; only encoded text is supported")
        pieces.append(_numbers(chunk.encoded_text.tokens, DTYPES[3], "model_input"))
    tokens = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
    inputs = {name: read_tensor(tensor, f"loss_fn_inputs[{name!r}]") for name, tensor in message.loss_fn_inputs.items()}
    is_sampled = _read_spans(message.loss_fn_input_spans, len(tokens)) if message.loss_fn_input_spans else None
    return Datum(tokens=tokens.astype(np.int64), inputs=inputs, is_sampled=is_sampled)


def _read_spans(spans: Sequence[Any], num_positions: int) -> np.ndarray:
    """[T] bool: sampled tokens. The spans cover all positions in order."""
    is_sampled = np.zeros(num_positions, bool)
    begin = 0
    for span in spans:
        kind = span.WhichOneof("span")
        if kind is None:
            raise ValueError("a span of loss_fn_input_spans has neither prompt_tokens nor sampled_tokens")
        length = getattr(span, kind).length
        if not 0 <= length <= num_positions - begin:
            raise ValueError(
                f"a span of loss_fn_input_spans has length {length}; it must be 0 to {num_positions - begin}, "
                "the number of positions that remain"
            )
        is_sampled[begin : begin + length] = kind == "sampled_tokens"
        begin += length
    if begin != num_positions:
        raise ValueError(f"loss_fn_input_spans cover {begin} of {num_positions} positions")
    return is_sampled


def read_tensor(message: Any, name: str) -> np.ndarray:
    """A Tensor as a dense array. Raises ValueError if bytes, dtype and shape do not agree."""
    if message.dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {message.dtype}; it must be 1 (float32), 2 (int64) or 3 (int32)")
    dtype = DTYPES[message.dtype]
    shape = tuple(message.shape)
    if message.WhichOneof("encoding") == "sparse_csr":
        csr = message.sparse_csr
        values = _numbers(csr.values, dtype, name)
        crow = _numbers(csr.crow_indices, DTYPES[2], f"{name}: crow_indices")
        return dense_of_csr(values, crow, _numbers(csr.col_indices, DTYPES[2], f"{name}: col_indices"), shape, name)
    values = _numbers(message.dense, dtype, name)
    return shaped(values, shape or (len(values),), name)


def shaped(values: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Raises ValueError if the shape has a different number of elements."""
    if any(size < 0 for size in shape) or int(np.prod(shape, dtype=object)) != values.size:
        raise ValueError(f"{name} holds {values.size} numbers, but its shape is {shape}")
    return values.reshape(shape)


def dense_of_csr(
    values: np.ndarray, crow: np.ndarray, col: np.ndarray, shape: tuple[int, ...], name: str
) -> np.ndarray:
    """The dense matrix of CSR. Raises ValueError for a shape that is no matrix or above MAX_CELLS,
    or indices that do not fit it.
    """
    if len(shape) != 2 or any(size < 0 for size in shape) or shape[0] * shape[1] > MAX_CELLS:
        raise ValueError(f"{name} is sparse with shape {shape}; it must be [T, K] with at most {MAX_CELLS} elements")
    dense = np.zeros(shape, values.dtype)
    dense[rows_of_csr(len(values), crow, col, shape, name), col] = values
    return dense


def rows_of_csr(num_values: int, crow: np.ndarray, col: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
    """[num_values]: the row of each CSR value. Raises ValueError if the indices do not fit the
    shape.
    """
    num_rows, num_columns = shape
    steps = np.diff(crow)
    fits = len(crow) == num_rows + 1 and crow[0] == 0 and crow[-1] == num_values == len(col) and (steps >= 0).all()
    if not fits or (len(col) and not (col.min() >= 0 and col.max() < num_columns)):
        raise ValueError(f"{name}: the indices of its sparse rows do not fit shape {shape} and {num_values} values")
    return np.repeat(np.arange(num_rows), steps)


def _numbers(data: bytes, dtype: np.dtype, name: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ValueError(f"{name} has {len(data)} bytes, which is not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def write_forward_backward(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput as bytes. logprobs: [T] or [T, K] per datum.

    Consecutive datums of the same K, or of none, share an ArrayRecord.
    """
    message = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for rows in _runs_of_one_shape(logprobs):
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(rows))
        offsets = np.cumsum([0, *(row.size * 4 for row in rows)], dtype="<i8")
        tensor = record.fields["logprobs"]
        tensor.data = b"".join(np.ascontiguousarray(row, "<f4").tobytes() for row in rows)
        tensor.offsets = offsets.tobytes()
        tensor.dtype = 1
        tensor.trailing_shape.extend(rows[0].shape[1:])
    for name, value in metrics.items():
        message.metrics[name] = value
    return message.SerializeToString()


def _runs_of_one_shape(rows: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Groups of consecutive arrays with the same shape after the first dimension."""
    run: list[np.ndarray] = []
    for row in rows:
        if run and row.shape[1:] != run[0].shape[1:]:
            yield run
            run = []
        run.append(row)
    if run:
        yield run


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The likeliest tokens at each position. A cell without a token has id 0 and NO_LOGPROB."""

    token_ids: np.ndarray  # [P, K] int32
    logprobs: np.ndarray  # [P, K] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    tokens: Sequence[int]
    logprobs: Sequence[float]
    is_stopped: bool  # by a stop token or stop string; False: at the limit of tokens
    topk: TopK | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """A float32 matrix [N - 1, K], dense or in CSR."""

    values: np.ndarray  # [number of cells]: all, or the listed ones of CSR
    shape: tuple[int, int]
    sparse: tuple[np.ndarray, np.ndarray] | None = (
        None  # CSR row pointers and column indices, int64; None: the matrix is dense
    )


def write_sample(
    sequences: Sequence[SampledSequence],
    *,
    prompt_logprobs: np.ndarray | None = None,
    topk_prompt: TopK | None = None,
    target_prompt: Cells | None = None,
) -> bytes:
    """A SampleResponse as bytes. prompt_logprobs: [N] float32, NaN without a logprob."""
    message = CLASSES["SampleResponse"]()
    for sequence in sequences:
        written = message.sequences.add(stop_reason=0 if sequence.is_stopped else 1)
        written.tokens = np.asarray(sequence.tokens, "<i4").tobytes()
        written.logprobs = np.asarray(sequence.logprobs, "<f4").tobytes()
        if sequence.topk is not None:
            _write_topk(written.topk_sampled_logprobs, sequence.topk)
    if prompt_logprobs is not None:
        message.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    if topk_prompt is not None:
        _write_topk(message.topk_prompt_logprobs, topk_prompt)
    if target_prompt is not None:
        _write_cells(message.target_prompt_logprobs, target_prompt)
    return message.SerializeToString()


def _write_cells(message: Any, cells: Cells) -> None:
    message.dtype = 1
    message.shape.extend(cells.shape)
    values = np.ascontiguousarray(cells.values, "<f4").tobytes()
    if cells.sparse is None:
        message.dense = values
        return
    row_pointers, columns = (each.astype("<i8").tobytes() for each in cells.sparse)
    message.sparse_csr.values = values
    message.sparse_csr.crow_indices = row_pointers
    message.sparse_csr.col_indices = columns


def _write_topk(message: Any, topk: TopK) -> None:
    message.length, message.k = topk.token_ids.shape
    message.token_ids = np.ascontiguousarray(topk.token_ids, "<i4").tobytes()
    message.logprobs = np.ascontiguousarray(topk.logprobs, "<f4").tobytes()
