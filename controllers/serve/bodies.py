"""Reads the whole body of a request and decompresses it. max_body_bytes limits both the compressed and the decompressed
size."""

from fastapi import HTTPException, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_WINDOW = 1 << 27
"""Largest window of a zstd frame, in bytes. The limit exists because the decompressor holds a whole window in memory."""
PIECE = 1 << 20


class LimitedBodies:
    """Middleware that limits the body of every request, before it is decompressed, to `limit` bytes. A larger body is answered with 413."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.limit:
                raise HTTPException(413, f"the body is larger than max_body_bytes={self.limit}")
            return message

        await self.app(scope, limited, send)


async def read_body(request: Request) -> bytes:
    """The decompressed body.

    Raises HTTPException 413 if the body is too large, 415 if this server does not support its content-encoding, and 400 if
    the zstd decoder reports an error.
    """
    limit = request.app.state.server.config.max_body_bytes
    body = await request.body()
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise HTTPException(415, f"content-encoding {encoding!r} is not supported; use identity or zstd")
    return _decompressed(body, limit)


def _decompressed(body: bytes, limit: int) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise HTTPException(
            415, "content-encoding 'zstd' needs the package zstandard, which the server does not have"
        ) from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    try:
        # The second pass decompresses the whole frame at once. So the first pass only counts the bytes, and refuses a frame that would be
        # larger than the limit.
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
