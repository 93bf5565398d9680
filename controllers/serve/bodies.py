"""Reads the whole body of a request and decompresses it. max_body_bytes limits both the compressed and the decompressed
size."""

from fastapi import HTTPException, Request

MAX_WINDOW = 1 << 27
"""Largest window of a zstd frame, in bytes. The decompressor needs as much memory."""
PIECE = 1 << 20


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
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    try:
        # The first pass only counts bytes, because the second pass decompresses the whole frame at once.
        num_bytes = 0
        with decompressor.stream_reader(body) as reader:
            while piece := reader.read(PIECE):
                num_bytes += len(piece)
                if num_bytes > limit:
                    raise HTTPException(413, f"the decompressed body is larger than max_body_bytes={limit}")
        frame = decompressor.decompressobj()
        found = frame.decompress(body)
    except zstandard.ZstdError as error:
        raise HTTPException(400, f"the body is not zstd: {error}") from None
    if not frame.eof:
        raise HTTPException(400, f"the zstd body ends before its frame does, after {len(body)} bytes")
    if frame.unused_data:
        raise HTTPException(400, f"{len(frame.unused_data)} bytes follow the frame of the zstd body")
    return found
