"""Reads the whole body of a request and decompresses it. A limit holds for the compressed and for the decompressed size."""

from fastapi import HTTPException, Request


async def read_body(request: Request) -> bytes:
    """The body. Raises HTTPException 413 if it is too large and 415 for an encoding that is not known."""
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
        raise HTTPException(415, f"content-encoding {encoding!r}; known are identity and zstd")
    return _decompressed(bytes(body), limit)


def _decompressed(body: bytes, limit: int) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise HTTPException(
            415, "content-encoding 'zstd' needs the package zstandard, which is not installed"
        ) from None
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            found = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise HTTPException(400, f"the body is not zstd: {error}") from None
    if len(found) > limit:
        raise HTTPException(413, f"the decompressed body is larger than max_body_bytes={limit}")
    return found
