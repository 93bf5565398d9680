"""Counts the fields of a protobuf message before it is parsed, because a parsed field takes many
times the bytes of an empty one.
"""

from controllers.tinker_server.codec import MESSAGES

MAX_FIELDS = 1 << 18
"""Most fields of a request, with nested messages. A datum with four inputs has about 30."""
MAX_PACKED_BYTES = 64
"""Largest packed list of numbers, which is only a tensor's shape."""
FEW_BYTES = 2 * MAX_FIELDS
"""Fewer bytes cannot have too many fields, of at least two bytes each."""


def _nested_fields() -> dict[str, dict[int, str]]:
    """{message: {field number: the message in it}}; "map X" for entries of a map of X, and
    "packed".
    """
    found: dict[str, dict[int, str]] = {}
    for name, lines in MESSAGES.items():
        found[name] = {}
        for line in lines:
            number, *words = line.split()
            is_repeated = words[0] == "repeated"
            is_map = words[0] == "map"
            kind = words[1] if words[0] in ("repeated", "optional", "map") else words[0]
            if is_map:
                found[name][int(number)] = f"map {kind}"
                found[f"map {kind}"] = {2: kind} if kind in MESSAGES else {}
            elif kind in MESSAGES:
                found[name][int(number)] = kind
            elif is_repeated and kind == "int64":
                found[name][int(number)] = "packed"
    return found


NESTED = _nested_fields()


def require_few_fields(body: bytes, message: str) -> None:
    """Raises ValueError if `body` has more than MAX_FIELDS fields or is not a message."""
    if len(body) < FEW_BYTES:
        return
    num_fields = 0
    pending = [(0, len(body), message)]
    while pending:
        at, end, name = pending.pop()
        nested = NESTED[name]
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
                kind = nested.get(tag >> 3)
                if kind == "packed":
                    if length > MAX_PACKED_BYTES:
                        raise ValueError(f"a shape has {length} bytes; at most {MAX_PACKED_BYTES} are allowed")
                elif kind is not None:
                    pending.append((at, min(at + length, end), kind))
                at += length
            else:
                raise ValueError(f"the body is not a {message}: wire type {wire_type}")
        if at > end:
            raise ValueError(f"the body is not a {message}: a field ends after its message")


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
