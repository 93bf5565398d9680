"""Reads the whole body of a request and decompresses it. max_body_bytes limits both the compressed and the decompressed
size."""

from fastapi import HTTPException, Request


async def read_body(request: Request) -> bytes:
    """The decompressed body.

    Raises HTTPException 413 if the body is too large, 415 if this server does not support its content-encoding, and 400 if
    the zstd decoder reports an error.
    """
    limit = request.app.state.server.config.max_body_bytes
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise HTTPException(413, f"the body is larger than max_body_bytes={limit}")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return bytes(body)
    if encoding != "zstd":
        raise HTTPException(415, f"content-encoding {encoding!r} is not supported; use identity or zstd")
    return _decompressed(bytes(body), limit)


def _decompressed(body: bytes, limit: int) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise HTTPException(
            415, "content-encoding 'zstd' needs the package zstandard, which the server does not have"
        ) from None
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            found = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise HTTPException(400, f"the body is not zstd: {error}") from None
    if len(found) > limit:
        raise HTTPException(413, f"the decompressed body is larger than max_body_bytes={limit}")
    return found
