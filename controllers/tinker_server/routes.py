"""Tinker's protocol as a FastAPI application.

Requests for work get the id of a future at once, and retrieve_future the answer, or 408 after
hold_seconds, and the SDK asks again. It repeats no request that gets 400, 413, 415 or 422.
"""

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.requests import ClientDisconnect

from controllers.observe import report
from controllers.observe.run_folder import to_plain
from controllers.tinker_server import checkpoints, messages, runs, samplers, sessions, status
from controllers.tinker_server.access import Counts
from controllers.tinker_server.bodies import JsonRoute, LimitedBodies
from controllers.tinker_server.caller import Calling
from controllers.tinker_server.downloads import Downloads
from controllers.tinker_server.futures import MAX_ERROR_LENGTH, Json, NotFoundError, UserError
from controllers.tinker_server.messages import MAX_NAME
from controllers.tinker_server.server import Server

INLINE_BYTES = 1 << 20
"""Of a larger answer, a retrieve_future with allow_metadata_only gets only the size."""
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
"""The status page's Content-Security-Policy: nothing is loaded from another host."""
MAX_ERRORS = 16  # of a body, that an answer names

routes = APIRouter(route_class=JsonRoute)
pages = APIRouter()


def make_app(server: Server) -> FastAPI:
    """The application, after `server.begin` on the same event loop."""
    app = FastAPI(title="rl-actors", docs_url=None, redoc_url=None)
    app.state.server = server
    app.state.counts = Counts()  # for /metrics
    app.state.downloads = Downloads()
    app.state.reading = asyncio.Lock()
    app.add_middleware(LimitedBodies, config=server.config)
    app.include_router(pages)
    app.include_router(checkpoints.pages)
    for section in (sessions, runs, checkpoints, samplers):
        app.include_router(section.routes, prefix="/api/v1")
    app.include_router(routes, prefix="/api/v1")  # last, because it has a route for every path
    app.add_exception_handler(NotFoundError, _answer(404))
    for refused in (UserError, ValueError, TypeError, ClientDisconnect):  # ClientDisconnect: no failure of the server
        app.add_exception_handler(refused, _answer(400))
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    return app


def _answer(code: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)[:MAX_ERROR_LENGTH]}, status_code=code)

    return answer


async def _answer_invalid(request: Request, error: Exception) -> Response:
    """The first errors of a body, without values, which may be as large as the body."""
    assert isinstance(error, RequestValidationError)
    detail = []
    for each in error.errors()[:MAX_ERRORS]:
        location = [str(part)[:MAX_NAME] for part in each["loc"]]
        detail.append({"type": each["type"], "loc": location, "msg": str(each["msg"])[:MAX_ERROR_LENGTH]})
    return JSONResponse({"detail": detail}, status_code=422)


@pages.get("/healthz")
@routes.get("/healthz")
async def healthz() -> Json:
    return {"status": "ok"}


@pages.get("/metrics")
async def metrics(request: Request, caller: Calling) -> Response:
    return PlainTextResponse(status.prometheus(caller.server, request.app.state.counts))


@pages.get("/")
async def page() -> Response:
    return HTMLResponse(
        report.page("serve.html.j2", title="Tinker server"), headers={"Content-Security-Policy": PAGE_POLICY}
    )


@pages.get("/status.json")
async def page_data(caller: Calling) -> Json:
    return to_plain(status.page_data(caller.server, caller.owner))  # JSON has neither NaN nor infinity


@routes.post("/retrieve_future")
async def retrieve_future(body: messages.RetrieveFuture, caller: Calling) -> Response:
    futures = caller.server.futures
    try:
        promise = await futures.wait(body.request_id, caller.server.config.hold_seconds, owner=caller.owner)
    except KeyError:
        detail = f"there is no request {body.request_id}: its answer was dropped, or the server was restarted"
        raise HTTPException(410, detail) from None
    answer = promise.answer
    if answer is None:
        not_ready = {"type": "try_again", "request_id": promise.request_id, "queue_state": "active"}
        return JSONResponse(not_ready, status_code=408)
    if body.allow_metadata_only and answer.num_bytes > INLINE_BYTES:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": answer.num_bytes})
    promise.fetched = futures.now()  # kept for keep_fetched more seconds: the client may not have received it
    if answer.error is not None:
        return JSONResponse({"error": answer.error, "category": answer.category})
    if answer.proto is not None:
        return Response(answer.proto, media_type="application/x-protobuf")
    return JSONResponse(to_plain(answer.json))


@routes.api_route("/{rest:path}", methods=["GET", "POST", "PUT", "DELETE", "PATCH"], include_in_schema=False)
async def unsupported(rest: str) -> None:
    """404 for every other request."""
    raise HTTPException(404, f"/api/v1/{rest} is not supported by this server")
