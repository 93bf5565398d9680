"""The protobuf messages of the Tinker server: the server reads messages of the official SDK, and the SDK reads messages of the server."""

import numpy as np
import pytest
from serving import forward_backward_body

from controllers.tinker_server import codec, counts, samples
from controllers.tinker_server.samples import read_batch
from rl_actors import ModelConfig, TrainerConfig
from rl_actors.clients.limits import TrainerLimits

DATA = [([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, -0.5]})]


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    written = []
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    return bytes([*written, number])


def tensor_message(**fields):
    message = codec.CLASSES["Tensor"](dtype=1)
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
    message = codec.CLASSES["ForwardBackwardRequest"].FromString(
        forward_backward_body("m", 3, DATA, "ppo", config={"clip_low_threshold": 0.7, "loss_id": "x"})
    )
    message.loss_fn_config["clip_low_threshold"] = 0.1
    call = codec.read_forward_backward(message.SerializeToString())
    assert (call.model_id, call.seq_id, call.loss_fn, call.forward_only) == ("m", 3, "ppo", False)
    assert call.config == {"clip_low_threshold": 0.7, "loss_id": "x"}
    [datum] = call.data()
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
        ({"csr": ([1], [0, 1], [0]), "shape": [1, 1 << 60]}, "at most"),
    ],
)
def test_invalid_tensors_are_refused(fields, error):
    with pytest.raises(ValueError, match=error):
        codec.read_tensor(tensor_message(**fields), "x")


def test_spans_say_which_targets_were_sampled_and_must_cover_all_targets():
    message = codec.CLASSES["ForwardBackwardRequest"].FromString(forward_backward_body("m", 1, DATA, "ppo"))
    message.data[0].loss_fn_input_spans.add().prompt_tokens.length = 1
    message.data[0].loss_fn_input_spans.add().sampled_tokens.length = 2
    [datum] = codec.read_forward_backward(message.SerializeToString()).data()
    assert datum.is_sampled.tolist() == [False, True, True]
    message.data[0].loss_fn_input_spans.pop()
    with pytest.raises(ValueError, match="datum 0: loss_fn_input_spans cover 1 of 3"):
        codec.read_forward_backward(message.SerializeToString()).data()


def test_images_are_refused_and_so_are_bytes_that_are_no_message():
    message = codec.CLASSES["ForwardBackwardRequest"]()
    message.data.add().model_input.add().image.data = b"png"
    with pytest.raises(ValueError, match="datum 0: a chunk of model_input is image"):
        codec.read_forward_backward(message.SerializeToString()).data()
    with pytest.raises(ValueError, match="not a ForwardBackwardRequest"):
        codec.read_forward_backward(b"\xff\xff\xff\xff")


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
    for name, cls in codec.CLASSES.items():
        for theirs in ours.get(name, (name,)):
            there = {
                field.name: (field.number, field.type, field.is_repeated)
                for field in getattr(tinker_public_pb2, theirs).DESCRIPTOR.fields
            }
            here = {field.name: (field.number, field.type, field.is_repeated) for field in cls.DESCRIPTOR.fields}
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
    call = codec.read_forward_backward(sdk[0].forward_backward_request_to_proto(request).SerializeToString())
    assert (call.model_id, call.seq_id, dict(call.config)) == ("s:train:0", 4, {"a": 1.5, "b": "text"})
    [read] = call.data()
    assert read.tokens.tolist() == [4, 5, 6] and np.array_equal(read.inputs["weights"], sparse.numpy())
    assert datum.loss_fn_inputs["weights"].sparse_crow_indices is not None


def test_the_sdk_reads_our_answers(sdk):
    rows = [np.float32([-1, -2, -3]), np.float32([[-1, -2]]), np.float32([[-3, -4], [-5, -6]]), np.float32([[-7]])]
    body = codec.write_forward_backward(rows, {"loss:sum": 2.5})
    output = sdk[1].deserialize_forward_backward_output(body)
    assert output.metrics == {"loss:sum": 2.5}
    for row, record in zip(rows, output.loss_fn_outputs, strict=True):
        assert np.array_equal(record["logprobs"].to_numpy(), row)

    topk = codec.TopK(token_ids=np.int32([[1, 2]]), logprobs=np.float32([[-1, -2]]))
    sequences = [
        codec.SampledSequence(tokens=[3, 4], logprobs=[-0.5, -1.5], is_stopped=True, topk=topk),
        codec.SampledSequence(tokens=[5], logprobs=[-0.25], is_stopped=False),
    ]
    body = codec.write_sample(
        sequences,
        prompt_logprobs=np.float32([np.nan, -2]),
        topk_prompt=topk,
        target_prompt=codec.Cells(values=np.float32([-1, -2, -3, -4]), shape=(2, 2)),
    )
    response = sdk[1].deserialize_sample_response(body)
    assert [each.stop_reason for each in response.sequences] == ["stop", "length"]
    assert list(response.sequences[0].tokens) == [3, 4] and list(response.sequences[1].logprobs) == [-0.25]
    assert response.prompt_logprobs == [None, -2.0]
    assert response.target_prompt_logprobs.to_numpy().tolist() == [[-1, -2], [-3, -4]]
    assert response.topk_prompt_logprobs_np.token_ids.tolist() == [[1, 2]]


def call_with_targets(*shapes: tuple[int, int]) -> codec.ForwardBackwardCall:
    """A request with one datum of one token for each shape; its targets are sparse, with one value."""
    message = codec.CLASSES["ForwardBackwardRequest"](model_id="m", loss_fn="cross_entropy")
    for shape in shapes:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.ones(shape[0], "<i4").tobytes()
        crow = [0] + [1] * shape[0]
        tensor = tensor_message(shape=shape, csr=([1.0], crow, [0]))
        tensor.dtype, tensor.sparse_csr.values = 2, np.asarray([1], "<i8").tobytes()
        datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor)
    return codec.read_forward_backward(message.SerializeToString())


def test_a_small_request_for_many_cells_is_refused_before_anything_is_expanded(monkeypatch):
    monkeypatch.setattr(codec, "dense_of_csr", None)  # would be called to expand
    with pytest.raises(ValueError, match=f"have {4 << 24} cells; at most {1 << 24} are allowed"):
        call_with_targets(*[(1, 1 << 24)] * 4).data()


LIMITS = TrainerLimits.of_config(TrainerConfig(model=ModelConfig(vocab_size=20_000), max_sequence_length=8192))


def test_the_targets_of_a_position_are_bounded_by_the_vocabulary():
    with pytest.raises(ValueError, match="datum 1 has 20001 targets for each position, but the vocabulary has 20000"):
        read_batch(call_with_targets((1, 2), (1, 20_001)), LIMITS)


def test_no_datum_is_padded_to_more_than_twice_its_targets():
    batch = read_batch(call_with_targets((1, 16384), (4096, 2), (1, 3), (1, 4), (1, 9000), (1, 1), (2, 2)), LIMITS)
    assert batch.widths == [16384, 2, 3, 4, 9000, 1, 2]
    assert batch.order == [[0, 4], [1, 6], [2, 3], [5]]
    padded = [[sample.columns["target_ids"].shape[1] for sample in group] for group in batch.groups]
    assert padded == [[16384, 16384], [2, 2], [4, 4], [1]]
    assert batch.num_positions == 4103 and batch.num_datums == 7


def test_a_negative_size_does_not_hide_the_cells_of_other_tensors():
    call = call_with_targets((1, 1 << 24), (1, 1 << 24))
    call.message.data[1].loss_fn_inputs["weights"].shape.extend([-1, 1 << 25])
    with pytest.raises(ValueError, match=f"have {1 << 25} cells"):
        call.data()


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
    monkeypatch.setattr(samples, "read_forward_backward", None)  # would be called to parse
    with pytest.raises(ValueError, match=f"more than {1 << 18} fields"):
        samples.read_call(body, LIMITS)


def test_a_shape_of_a_million_numbers_is_refused_before_the_request_is_parsed(monkeypatch):
    message = codec.CLASSES["ForwardBackwardRequest"](model_id="m")
    message.data.add().loss_fn_inputs["weights"].shape.extend([1] * 1_000_000)
    monkeypatch.setattr(samples, "read_forward_backward", None)
    with pytest.raises(ValueError, match="a shape has 1000000 bytes"):
        samples.read_call(message.SerializeToString(), LIMITS)


def test_counted_fields_are_those_of_the_message():
    """A request with every kind of field, long enough to be counted, is counted without an error and then read."""
    data = [([1] * 50_000, {"target_tokens": [2] * 50_000, "weights": [1.0] * 50_000})] * 2
    body = forward_backward_body("m", 3, data, "ppo", config={"clip_low_threshold": 0.7, "loss_id": "x"})
    assert len(body) > counts.FEW_BYTES
    counts.require_few_fields(body, "ForwardBackwardRequest")
    with pytest.raises(ValueError, match="a field ends after its message"):
        counts.require_few_fields(body[:-1], "ForwardBackwardRequest")
