"""Reads and writes the messages of tinker.proto. Uses neither HTTP nor actors.

T positions of a datum (one training sequence), K targets of a position.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from controllers.tinker_server import tinker_pb2
from controllers.tinker_server.messages import MAX_NAME

DTYPES: dict[int, np.dtype] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
"""Enum DType -> numpy dtype. The SDK never sends bfloat16."""
MAX_CELLS = 1 << 24
"""Most cells of all tensors of a request: a few bytes of a sparse one could take all memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One training sequence as a client sent it."""

    tokens: np.ndarray  # [T] int64
    inputs: Mapping[str, np.ndarray]  # each [T] or [T, K], dense; float32, int64 or int32
    # [T] bool: the target is a sampled token, by loss_fn_input_spans; None without spans
    is_sampled: np.ndarray | None = None


def parse_forward_backward(body: bytes) -> Any:
    """Raises ValueError if the body is not a ForwardBackwardRequest."""
    try:
        message = tinker_pb2.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise ValueError(f"the body is not a ForwardBackwardRequest: {error}") from None
    for name in ("model_id", "loss_fn"):
        if len(getattr(message, name)) > MAX_NAME:  # replies, errors and logs repeat it
            raise ValueError(f"{name} has {len(getattr(message, name))} characters; it must have at most {MAX_NAME}")
    return message


def read_loss_config(message: Any) -> dict[str, float | str]:
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():  # overrides loss_fn_config
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return config


def read_data(message: Any) -> list[Datum]:
    """Raises ValueError naming a wrong datum's index, or, before any expansion, for too many cells."""
    num_cells = sum(
        math.prod(max(size, 0) for size in tensor.shape)
        for datum in message.data
        for tensor in datum.loss_fn_inputs.values()
    )
    if num_cells > MAX_CELLS:
        raise ValueError(f"the tensors of the request have {num_cells} cells; at most {MAX_CELLS} are allowed")
    data = []
    for index, datum in enumerate(message.data):
        try:
            data.append(_read_datum(datum))
        except ValueError as error:
            raise ValueError(f"datum {index}: {error}") from None
    return data


def _read_datum(message: Any) -> Datum:
    pieces = [np.zeros(0, np.int64)]
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ValueError(f"a chunk of model_input is {kind or 'empty'}; only encoded text is supported")
        pieces.append(_numbers(chunk.encoded_text.tokens, DTYPES[3], "model_input"))
    tokens = np.concatenate(pieces)
    inputs = {name: read_tensor(tensor, f"loss_fn_inputs[{name!r}]") for name, tensor in message.loss_fn_inputs.items()}
    is_sampled = _read_spans(message.loss_fn_input_spans, len(tokens)) if message.loss_fn_input_spans else None
    return Datum(tokens=tokens, inputs=inputs, is_sampled=is_sampled)


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
    if message.WhichOneof("encoding") != "sparse_csr":
        values = _numbers(message.dense, dtype, name)
        return shaped(values, shape or (len(values),), name)
    csr = message.sparse_csr
    if len(shape) != 2 or min(shape) < 0:
        raise ValueError(f"{name} is sparse with shape {shape}; it must be [T, K]")
    values = _numbers(csr.values, dtype, name)
    crow = _numbers(csr.crow_indices, DTYPES[2], f"{name}: crow_indices")
    col = _numbers(csr.col_indices, DTYPES[2], f"{name}: col_indices")
    rows = rows_of_csr(len(values), crow, col, shape, name)
    dense = np.zeros(shape, dtype)
    dense[rows, col] = values
    return dense


def shaped(values: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Raises ValueError if the shape has a different number of elements."""
    if any(size < 0 for size in shape) or math.prod(shape) != values.size:
        raise ValueError(f"{name} holds {values.size} numbers, but its shape is {shape}")
    return values.reshape(shape)


def rows_of_csr(num_values: int, crow: np.ndarray, col: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
    """[num_values]: the row of each CSR value. Raises ValueError for indices outside the shape."""
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


def write_forward_backward(logprobs: Iterable[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput. logprobs: [T] or [T, K] per datum; neighbours of one K share a record."""
    message = tinker_pb2.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for trailing_shape, group in groupby(logprobs, key=lambda row: row.shape[1:]):
        rows = list(group)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(rows))
        tensor = record.fields["logprobs"]
        tensor.data = b"".join(np.asarray(row, "<f4").tobytes() for row in rows)
        tensor.offsets = np.cumsum([0, *(row.size * 4 for row in rows)], dtype="<i8").tobytes()
        tensor.dtype = 1
        tensor.trailing_shape.extend(trailing_shape)
    return message.SerializeToString()
