"""Reads and decompresses bodies of requests, whose size is limited before and after."""

import asyncio
import gc
import json
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controllers.tinker_server.beside import SMALL_BYTES, beside
from controllers.tinker_server.config import ServeConfig

MAX_WINDOW = 1 << 27
"""Largest window of a zstd frame in bytes, which the decompressor holds in memory."""
PIECE = 1 << 20
SMALL_JSON_BYTES = 256 << 10
"""Largest JSON body of a call other than asample."""
MAX_MARKS = 200_000
IDLE_SECONDS = 30.0
"""A body of which no byte comes for this long is given up."""


class LimitedBodies:
    """Middleware that limits each body (413), its pauses (408), and an owner's bodies under way (503).

    Small bodies always have room, so that a busy client's heartbeats are answered.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self.app = app
        self.config = config
        self.under_way: Counter[str] = Counter()  # bytes by owner

    def _limit(self, path: str) -> tuple[str, int]:
        """(name of the limit, the limit) for a path."""
        route = path.rpartition("/")[2]
        if route in ("forward_backward", "telemetry"):
            return "max_body_bytes", self.config.max_body_bytes
        if route == "asample":
            return "max_json_bytes", min(self.config.max_json_bytes, self.config.max_body_bytes)
        return "the limit of this call", SMALL_JSON_BYTES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        num_bytes = 0
        is_whole = False
        owner = scope.get("state", {}).get("owner", "")
        name, limit = self._limit(scope["path"])
        most = max(self.config.max_bytes_in_flight, limit)

        async def limited() -> Message:
            nonlocal num_bytes, is_whole
            if is_whole:  # what comes now is the end of the connection, perhaps far off
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), IDLE_SECONDS)
            except TimeoutError:
                detail = f"no byte of the body came for {IDLE_SECONDS:g} seconds"
                raise HTTPException(408, detail, headers={"Connection": "close"}) from None
            is_whole = not message.get("more_body", False)
            size = len(message.get("body", b""))
            num_bytes += size
            self.under_way[owner] += size
            if num_bytes > limit:
                raise HTTPException(413, f"the body is larger than {name}={limit}")
            if num_bytes > SMALL_BYTES and self.under_way[owner] > most:
                detail = (
                    f"your bodies under way have more than {most} bytes (max_bytes_in_flight); send the request again"
                )
                raise HTTPException(503, detail, headers={"Retry-After": "1"})
            return message

        try:
            await self.app(scope, limited, send)
        finally:
            self.under_way[owner] -= num_bytes
            if not self.under_way[owner]:
                del self.under_way[owner]


class JsonRequest(Request):
    """Decodes JSON beside the event loop. Refuses NaN, infinity, and very many texts or lists."""

    async def json(self) -> Any:
        body = await self.body()
        return await beside(len(body), _decoded, body)


def _decoded(body: bytes) -> Any:
    count = sum(map(body.count, (b'"', b"[", b"{")))
    if count > MAX_MARKS:
        raise HTTPException(400, f"the body has {count} quotes and opening brackets; at most {MAX_MARKS} are allowed")
    # the collector would look at all objects again and again, with the GIL held
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return json.loads(body, parse_constant=_finite, parse_float=_finite)
    finally:
        if was_enabled:
            gc.enable()


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise HTTPException(400, f"the body has {text[:40]}, which is no finite number")
    return number


class JsonRoute(APIRoute):
    """A route of JsonRequests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            given = JsonRequest(request.scope, request.receive)
            if not self.path.endswith("/asample") or len(await given.body()) < SMALL_BYTES:
                return await handle(given)
            async with request.app.state.reading:  # one large request at a time, with room for others between
                return await handle(given)

        return handle_json


async def decompressed(request: Request, body: bytes) -> bytes:
    """Raises HTTPException: 413 if too large, 415 for another encoding, 400 for an error of zstd."""
    limit = request.app.state.server.config.max_body_bytes
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise HTTPException(415, f"content-encoding {encoding!r} is not supported; use identity or zstd")
    return await beside(limit, _decompressed, body, limit)  # a small body may become large


def _decompressed(body: bytes, limit: int) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise HTTPException(
            415, "content-encoding 'zstd' needs the package zstandard, which the server does not have"
        ) from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    try:
        # only counts: the second pass decompresses the whole frame at once
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
