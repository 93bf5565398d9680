"""Counts the fields of a protobuf message, which take many times their bytes once parsed."""

from google.protobuf.descriptor import FieldDescriptor

from controllers.tinker_server import tinker_pb2

MAX_FIELDS = 1 << 18
"""Most fields of a request, with nested messages. A datum with four inputs has about 30."""
MAX_PACKED_BYTES = 64
"""Largest packed list of numbers, which is only a tensor's shape."""
FEW_BYTES = 2 * MAX_FIELDS
"""Fewer bytes cannot have too many fields, of at least two bytes each."""


def require_few_fields(body: bytes) -> None:
    """Raises ValueError if `body` has more than MAX_FIELDS fields or is no ForwardBackwardRequest."""
    if len(body) < FEW_BYTES:
        return
    num_fields = 0
    pending = [(0, len(body), tinker_pb2.ForwardBackwardRequest.DESCRIPTOR)]
    while pending:
        at, end, descriptor = pending.pop()
        while at < end:
            num_fields += 1
            if num_fields > MAX_FIELDS:
                raise ValueError(f"the request has more than {MAX_FIELDS} fields; send its datums in several requests")
            tag, at = _varint(body, at, end)
            wire_type = tag & 7
            if wire_type == 0:
                _, at = _varint(body, at, end)
            elif wire_type == 1:
                at += 8
            elif wire_type == 5:
                at += 4
            elif wire_type == 2:
                length, at = _varint(body, at, end)
                field = descriptor.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    pending.append((at, min(at + length, end), field.message_type))
                elif field is not None and field.type == FieldDescriptor.TYPE_INT64 and length > MAX_PACKED_BYTES:
                    raise ValueError(f"a shape has {length} bytes; at most {MAX_PACKED_BYTES} are allowed")
                at += length
            else:
                raise ValueError(f"the body is not a ForwardBackwardRequest: wire type {wire_type}")
        if at > end:
            raise ValueError("the body is not a ForwardBackwardRequest: a field ends after its message")


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """(number, place after it)."""
    value = shift = 0
    while at < end and shift < 70:
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("the body is not a protobuf message: a number does not end")
