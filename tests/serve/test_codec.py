"""The protobuf messages of the Tinker server: the server reads messages of the official SDK, and the SDK reads messages of the server."""

import re
from pathlib import Path

import numpy as np
import pytest
from serving import forward_backward_body

from controllers.tinker_server import codec, counts, requests, samples, tinker_pb2
from controllers.tinker_server.samples import read_batch
from rl_actors import ModelConfig, TrainerConfig
from rl_actors.clients.limits import TrainerLimits

PROTO = Path(codec.__file__).with_name("tinker.proto")
DATA = [([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, -0.5]})]


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    written = []
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    return bytes([*written, number])


def tensor_message(**fields):
    message = tinker_pb2.Tensor(dtype=1)
    for name, value in fields.items():
        if name == "csr":
            values, crow, col = value
            message.sparse_csr.values = np.asarray(values, "<f4").tobytes()
            message.sparse_csr.crow_indices = np.asarray(crow, "<i8").tobytes()
            message.sparse_csr.col_indices = np.asarray(col, "<i8").tobytes()
        elif name == "shape":
            message.shape.extend(value)
        else:
            setattr(message, name, value)
    return message


def test_a_request_with_tensors_is_read_and_loss_fn_config_v2_wins_over_loss_fn_config():
    message = tinker_pb2.ForwardBackwardRequest.FromString(
        forward_backward_body("m", 3, DATA, "ppo", config={"clip_low_threshold": 0.7, "loss_id": "x"})
    )
    message.loss_fn_config["clip_low_threshold"] = 0.1
    read = codec.parse_forward_backward(message.SerializeToString())
    assert (read.model_id, read.seq_id, read.loss_fn, read.forward_only) == ("m", 3, "ppo", False)
    assert codec.read_loss_config(read) == {"clip_low_threshold": 0.7, "loss_id": "x"}
    [datum] = codec.read_data(read)
    assert datum.tokens.tolist() == [1, 2, 3] and datum.is_sampled is None
    assert datum.inputs["target_tokens"].dtype == np.int64 and datum.inputs["weights"].tolist() == [0.0, 1.0, -0.5]


def test_a_sparse_tensor_is_read_as_a_dense_one():
    found = codec.read_tensor(tensor_message(csr=([5, 6, 7], [0, 1, 1, 3], [2, 0, 1]), shape=[3, 3]), "x")
    assert found.tolist() == [[0, 0, 5], [0, 0, 0], [6, 7, 0]]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"dense": b"12345"}, "multiple of 4"),
        ({"dense": b"1234", "dtype": 4}, "dtype 4"),
        ({"dense": b"1234", "dtype": 0}, "dtype 0"),
        ({"dense": b"12345678", "shape": [3]}, r"2 numbers, but its shape is \(3,\)"),
        ({"dense": b"1234", "shape": [-1]}, "shape"),
        ({"dense": b"", "shape": [1 << 62, 1 << 62]}, "shape"),
        ({"csr": ([1], [0, 1], [5]), "shape": [1, 3]}, "do not fit"),
        ({"csr": ([1], [0, 1], [-1]), "shape": [1, 3]}, "do not fit"),
        ({"csr": ([1], [0, 2], [0]), "shape": [1, 3]}, "do not fit"),
        ({"csr": ([1, 2], [0, 3, 2], [0, 1]), "shape": [2, 3]}, "do not fit"),
        ({"csr": ([], [], []), "shape": [0, 3]}, "do not fit"),
        ({"csr": ([1], [0, 1], [0]), "shape": [3]}, r"must be \[T, K\]"),
    ],
)
def test_invalid_tensors_are_refused(fields, error):
    with pytest.raises(ValueError, match=error):
        codec.read_tensor(tensor_message(**fields), "x")


def test_spans_say_which_targets_were_sampled_and_must_cover_all_targets():
    message = tinker_pb2.ForwardBackwardRequest.FromString(forward_backward_body("m", 1, DATA, "ppo"))
    message.data[0].loss_fn_input_spans.add().prompt_tokens.length = 1
    message.data[0].loss_fn_input_spans.add().sampled_tokens.length = 2
    [datum] = codec.read_data(message)
    assert datum.is_sampled.tolist() == [False, True, True]
    message.data[0].loss_fn_input_spans.pop()
    with pytest.raises(ValueError, match="datum 0: loss_fn_input_spans cover 1 of 3"):
        codec.read_data(message)


def test_images_are_refused_and_so_are_bytes_that_are_no_message():
    message = tinker_pb2.ForwardBackwardRequest()
    message.data.add().model_input.add().image.data = b"png"
    with pytest.raises(ValueError, match="datum 0: a chunk of model_input is image"):
        codec.read_data(message)
    with pytest.raises(ValueError, match="not a ForwardBackwardRequest"):
        codec.parse_forward_backward(b"\xff\xff\xff\xff")


def test_the_generated_code_has_the_messages_of_tinker_proto():
    field = re.compile(r"(repeated |optional |)(\w+|map<string, \w+>) (\w+) = (\d+);")
    for name, text in re.findall(r"^message (\w+) \{\n(.*?)^\}", PROTO.read_text(), flags=re.DOTALL | re.MULTILINE):
        message = tinker_pb2.DESCRIPTOR.message_types_by_name[name]
        written = {(label.strip(), kind, field, int(number)) for label, kind, field, number in field.findall(text)}
        assert written == {described(each) for each in message.fields}, name
    enums = re.findall(r"^  ([A-Z]\w+) = (\d);", PROTO.read_text(), flags=re.MULTILINE)
    values = [value for enum in tinker_pb2.DESCRIPTOR.enum_types_by_name.values() for value in enum.values]
    assert enums == [(value.name, str(value.number)) for value in values]
    assert len(re.findall("^message", PROTO.read_text(), flags=re.MULTILINE)) == len(
        tinker_pb2.DESCRIPTOR.message_types_by_name
    )


def described(field) -> tuple[str, str, str, int]:
    """(label, type, name, number) of a field, as a .proto writes them."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return "", f"map<string, {kind_of(field.message_type.fields_by_name['value'])}>", field.name, field.number
    oneof = field.containing_oneof
    is_optional = oneof is not None and oneof.name == f"_{field.name}"
    label = "repeated" if field.is_repeated else "optional" if is_optional else ""
    return label, kind_of(field), field.name, field.number


def kind_of(field) -> str:
    named = field.message_type or field.enum_type
    return named.name if named else SCALARS[field.type]


SCALARS = {1: "double", 3: "int64", 5: "int32", 8: "bool", 9: "string", 12: "bytes", 13: "uint32"}
"""FieldDescriptor.type -> its name."""


# These tests need the official SDK.


@pytest.fixture
def sdk():
    pytest.importorskip("tinker")
    from tinker.proto import request_conv, response_conv

    return request_conv, response_conv


def test_every_field_of_our_messages_is_also_in_the_messages_of_the_sdk(sdk):
    from tinker.proto import tinker_public_pb2

    # Our message Span stands for two messages of the SDK. Every other message has the same name in the SDK.
    ours = {"Span": ("PromptProvenanceSpan", "SampledProvenanceSpan")}
    for name, message in tinker_pb2.DESCRIPTOR.message_types_by_name.items():
        for theirs in ours.get(name, (name,)):
            there = {
                field.name: (field.number, field.type, field.is_repeated)
                for field in getattr(tinker_public_pb2, theirs).DESCRIPTOR.fields
            }
            here = {field.name: (field.number, field.type, field.is_repeated) for field in message.fields}
            assert here.items() <= there.items(), name


def test_a_request_of_the_sdk_is_read(sdk):
    import torch
    from tinker import types

    sparse = torch.zeros(3, 8)
    sparse[0, 3], sparse[2, 1] = 0.5, 2.0
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([4, 5, 6]),
        loss_fn_inputs={"target_tokens": sparse.long(), "weights": sparse},
    )
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(
            data=[datum], loss_fn="cross_entropy", loss_fn_config={"a": 1.5, "b": "text"}
        ),
        model_id="s:train:0",
        seq_id=4,
    )
    message = codec.parse_forward_backward(sdk[0].forward_backward_request_to_proto(request).SerializeToString())
    assert (message.model_id, message.seq_id) == ("s:train:0", 4)
    assert codec.read_loss_config(message) == {"a": 1.5, "b": "text"}
    [read] = codec.read_data(message)
    assert read.tokens.tolist() == [4, 5, 6] and np.array_equal(read.inputs["weights"], sparse.numpy())
    assert datum.loss_fn_inputs["weights"].sparse_crow_indices is not None


def ints(*values: int) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def floats(*values: float) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def test_the_sdk_reads_our_answers(sdk):
    rows = [np.float32([-1, -2, -3]), np.float32([[-1, -2]]), np.float32([[-3, -4], [-5, -6]]), np.float32([[-7]])]
    body = codec.write_forward_backward(rows, {"loss:sum": 2.5})
    output = sdk[1].deserialize_forward_backward_output(body)
    assert output.metrics == {"loss:sum": 2.5}
    for row, record in zip(rows, output.loss_fn_outputs, strict=True):
        assert np.array_equal(record["logprobs"].to_numpy(), row)

    topk = requests._topk(np.int32([[1, 2]]), np.float32([[-1, -np.inf]]))
    sequences = [
        tinker_pb2.SampledSequence(tokens=ints(3, 4), logprobs=floats(-0.5, -1.5), topk_sampled_logprobs=topk),
        tinker_pb2.SampledSequence(tokens=ints(5), logprobs=floats(-0.25), stop_reason=1),
    ]
    message = tinker_pb2.SampleResponse(
        sequences=sequences,
        prompt_logprobs=floats(np.nan, -2),
        topk_prompt_logprobs=topk,
        target_prompt_logprobs=tinker_pb2.Tensor(dtype=1, shape=[2, 2], dense=floats(-1, -2, -3, -4)),
    )
    body = message.SerializeToString()
    response = sdk[1].deserialize_sample_response(body)
    assert [each.stop_reason for each in response.sequences] == ["stop", "length"]
    assert list(response.sequences[0].tokens) == [3, 4] and list(response.sequences[1].logprobs) == [-0.25]
    assert response.prompt_logprobs == [None, -2.0]
    assert response.target_prompt_logprobs.to_numpy().tolist() == [[-1, -2], [-3, -4]]
    assert response.topk_prompt_logprobs_np.token_ids.tolist() == [[1, 0]]


def message_with_targets(*shapes: tuple[int, int]) -> tinker_pb2.ForwardBackwardRequest:
    """A request with one datum of one token for each shape; its targets are sparse, with one value."""
    message = tinker_pb2.ForwardBackwardRequest(model_id="m", loss_fn="cross_entropy")
    for shape in shapes:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.ones(shape[0], "<i4").tobytes()
        crow = [0] + [1] * shape[0]
        tensor = tensor_message(shape=shape, csr=([1.0], crow, [0]))
        tensor.dtype, tensor.sparse_csr.values = 2, np.asarray([1], "<i8").tobytes()
        datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor)
    return message


def test_a_small_request_for_many_cells_is_refused_before_anything_is_expanded(monkeypatch):
    monkeypatch.setattr(codec, "read_tensor", None)  # would be called to expand
    with pytest.raises(ValueError, match=f"have {4 << 24} cells; at most {1 << 24} are allowed"):
        codec.read_data(message_with_targets(*[(1, 1 << 24)] * 4))


LIMITS = TrainerLimits.of_config(TrainerConfig(model=ModelConfig(vocab_size=20_000), max_sequence_length=8192))


def test_the_targets_of_a_position_are_bounded_by_the_vocabulary():
    with pytest.raises(ValueError, match="datum 1 has 20001 targets for each position, but the vocabulary has 20000"):
        read_batch(message_with_targets((1, 2), (1, 20_001)), LIMITS)


def test_no_datum_is_padded_to_more_than_twice_its_targets():
    batch = read_batch(message_with_targets((1, 16384), (4096, 2), (1, 3), (1, 4), (1, 9000), (1, 1), (2, 2)), LIMITS)
    assert batch.widths == [16384, 2, 3, 4, 9000, 1, 2]
    assert batch.order == [[0, 4], [1, 6], [2, 3], [5]]
    padded = [[sample.columns["target_ids"].shape[1] for sample in group] for group in batch.groups]
    assert padded == [[16384, 16384], [2, 2], [4, 4], [1]]
    assert batch.num_positions == 4103 and batch.num_datums == 7


def test_a_datum_without_clip_bounds_has_those_of_loss_fn_config():
    inputs = {"target_tokens": [2, 3], "logprobs": [-1.0, -1.0], "advantages": [1.0, 0.0]}
    data = [([1, 2], inputs), ([1, 2], inputs | {"clip_low_threshold": [0.25, 0.5]})]
    body = forward_backward_body("m", 1, data, "ppo", config={"clip_high_threshold": 1.5})
    batch = samples.read_call(body, LIMITS).batch
    bounds = [[each.columns[name].tolist() for name in ("clip_low", "clip_high")] for each in batch.groups[0]]
    assert bounds == [[pytest.approx([0.8, 0.8]), [1.5, 1.5]], [[0.25, 0.5], [1.5, 1.5]]]
    LIMITS.check_samples(batch.groups[0], batch.loss)


def test_a_negative_size_does_not_hide_the_cells_of_other_tensors():
    message = message_with_targets((1, 1 << 24), (1, 1 << 24))
    message.data[1].loss_fn_inputs["weights"].shape.extend([-1, 1 << 25])
    with pytest.raises(ValueError, match=f"have {1 << 25} cells"):
        codec.read_data(message)


@pytest.mark.parametrize(
    "body",
    [
        b"\x1a\x00" * ((1 << 18) + 1),  # empty datums
        b"\x1a" + varint(2 << 19) + b"\x0a\x00" * (1 << 19),  # empty chunks of one datum
        b"\x10\x01" * (1 << 19),  # seq_id again and again
        b"\x2a\x00" * (1 << 19),  # empty entries of loss_fn_config
    ],
)
def test_fields_are_counted_before_the_request_is_parsed(body, monkeypatch):
    monkeypatch.setattr(codec, "parse_forward_backward", None)  # would be called to parse
    with pytest.raises(ValueError, match=f"more than {1 << 18} fields"):
        samples.read_call(body, LIMITS)


def test_a_shape_of_a_million_numbers_is_refused_before_the_request_is_parsed(monkeypatch):
    message = tinker_pb2.ForwardBackwardRequest(model_id="m")
    message.data.add().loss_fn_inputs["weights"].shape.extend([1] * 1_000_000)
    monkeypatch.setattr(codec, "parse_forward_backward", None)
    with pytest.raises(ValueError, match="a shape has 1000000 bytes"):
        samples.read_call(message.SerializeToString(), LIMITS)


def test_counted_fields_are_those_of_the_message():
    """A request with every kind of field, long enough to be counted, is counted without an error and then read."""
    data = [([1] * 50_000, {"target_tokens": [2] * 50_000, "weights": [1.0] * 50_000})] * 2
    body = forward_backward_body("m", 3, data, "ppo", config={"clip_low_threshold": 0.7, "loss_id": "x"})
    assert len(body) > counts.FEW_BYTES
    counts.require_few_fields(body)
    with pytest.raises(ValueError, match="a field ends after its message"):
        counts.require_few_fields(body[:-1])
