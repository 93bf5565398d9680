"""The routes of Tinker's protocol as a FastAPI application. Most call a method of the Server.

Requests for work get the id of a future at once, and retrieve_future the answer or error, or 408
after hold_seconds, and the SDK asks again. It does not repeat a request that gets 400, 413, 415 or
422.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse
from starlette.requests import ClientDisconnect

from controllers.observe import report
from controllers.observe.run_folder import to_plain
from controllers.tinker_server import listings, messages, status
from controllers.tinker_server.access import Counts
from controllers.tinker_server.beside import SMALL_BYTES, beside
from controllers.tinker_server.bodies import JsonRoute, LimitedBodies, decompressed
from controllers.tinker_server.downloads import VALID_SECONDS, Downloads
from controllers.tinker_server.futures import MAX_ERROR_LENGTH, NotFoundError, Promise, UserError
from controllers.tinker_server.messages import MAX_NAME
from controllers.tinker_server.samples import read_call
from controllers.tinker_server.server import Server

PROTOBUF = "application/x-protobuf"
INLINE_BYTES = 1 << 20
"""Largest answer to a retrieve_future with allow_metadata_only. Above it only the size is sent, and
the client asks again without.
"""
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
"""The status page's Content-Security-Policy: nothing is loaded from another host."""
MAX_ERRORS = 16
"""Most errors of a body that an answer names."""
ANYONE = "anyone"
"""The owner of everything on a server without API keys."""


# coroutines, because FastAPI calls plain functions in a thread, which would take longer than the
# rest of a request
async def server_of(request: Request) -> Server:
    return request.app.state.server


async def owner_of(request: Request) -> str:
    return getattr(request.state, "owner", ANYONE)


Serving = Annotated[Server, Depends(server_of)]
Owner = Annotated[str, Depends(owner_of)]
router = APIRouter(prefix="/api/v1", route_class=JsonRoute)
pages = APIRouter()


def make_app(server: Server, counts: Counts | None = None) -> FastAPI:
    """The application, after `server.begin` on the same event loop. counts: for /metrics."""
    app = FastAPI(title="rl-actors", docs_url=None, redoc_url=None)
    app.state.server = server
    app.state.counts = counts or Counts()
    app.state.downloads = Downloads()
    app.state.reading = asyncio.Lock()
    app.add_middleware(LimitedBodies, config=server.config)
    app.include_router(pages)
    app.include_router(router)
    app.add_exception_handler(NotFoundError, _answer(404))
    app.add_exception_handler(UserError, _answer(400))
    app.add_exception_handler(ValueError, _answer(400))
    app.add_exception_handler(TypeError, _answer(400))
    app.add_exception_handler(ClientDisconnect, _answer(400))  # no failure of the server
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


# for people and for monitoring


@pages.get("/healthz")
async def is_healthy() -> dict[str, Any]:
    return {"status": "ok"}


@pages.get("/metrics")
async def metrics(request: Request, server: Serving) -> Response:
    return PlainTextResponse(status.prometheus(server, request.app.state.counts))


@pages.get("/")
async def page() -> Response:
    return HTMLResponse(
        report.page("serve.html.j2", title="Tinker server"), headers={"Content-Security-Policy": PAGE_POLICY}
    )


@pages.get("/status.json")
async def page_data(server: Serving, owner: Owner) -> dict[str, Any]:
    return to_plain(status.page_data(server, owner))  # JSON has neither NaN nor infinity


# the client and its session


@router.post("/client/config")
async def client_config(body: messages.ClientConfig) -> dict[str, Any]:
    return {
        "pjwt_auth_enabled": False,
        "parallel_fwdbwd_chunks": True,
        "proto_compress_fwdbwd": False,
        "sample_use_retrieve_futures": False,
        "custom_loss_server_side": False,
        "sample_join_sampling_session": False,
    }


@router.post("/client/dynamic_config")
async def client_dynamic_config(body: messages.ClientConfig) -> dict[str, Any]:
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": False}


@router.post("/create_session")
async def create_session(body: messages.CreateSession, server: Serving, owner: Owner) -> dict[str, Any]:
    return server.create_session(owner, body)


@router.post("/session_heartbeat")
async def session_heartbeat(body: messages.OfSession, server: Serving, owner: Owner) -> dict[str, Any]:
    return server.heartbeat(owner, body.session_id)


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish_session(session_id: str, body: messages.FinishSession, server: Serving, owner: Owner) -> None:
    server.finish_session(owner, session_id, body)


@router.post("/telemetry")
async def telemetry(request: Request) -> dict[str, Any]:
    """Discard the SDK's telemetry."""
    await request.body()
    return {"status": "accepted"}


@router.get("/healthz")
async def healthz() -> dict[str, Any]:
    return {"status": "ok"}


@router.get("/get_server_capabilities")
async def get_server_capabilities(server: Serving) -> dict[str, Any]:
    model = {
        "model_name": server.config.name,
        "max_context_length": server.config.generator.max_model_len,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [model]}


# training


@router.post("/create_model")
async def create_model(body: messages.CreateModel, server: Serving, owner: Owner) -> dict[str, Any]:
    return server.create_model(owner, body).reply()


@router.post("/get_info")
async def get_info(body: messages.OfModel, server: Serving, owner: Owner) -> dict[str, Any]:
    return server.info(owner, body.model_id)


@router.post("/forward_backward", response_model=None)
async def forward_backward(request: Request, server: Serving, owner: Owner) -> dict[str, Any] | Response:
    """The body is read whole before the request is accepted, so that a run's calls keep their
    order.
    """
    raw = await request.body()
    is_small = len(raw) < SMALL_BYTES and "content-encoding" not in request.headers
    # one large request at a time: each may take many times its bytes before the limit of waiting
    # data applies
    async with contextlib.nullcontext() if is_small else request.app.state.reading:
        body = await decompressed(request, raw)
        call = await beside(len(body), read_call, body, server.training_limits)
        return _too_much(server, owner, call.num_bytes) or server.forward_backward(owner, call).reply()


def _too_much(server: Server, owner: str, num_bytes: int) -> Response | None:
    """Refuse a request if too much data of its owner waits already."""
    waiting = server.futures.waiting_bytes[owner]
    most = server.config.max_bytes_in_flight
    if not waiting or waiting + num_bytes <= most:
        return None
    detail = f"data of {waiting} bytes already waits for its calls; at most max_bytes_in_flight={most} may wait"
    return JSONResponse({"detail": detail}, status_code=429, headers={"Retry-After": "1"})


@router.post("/optim_step")
async def optim_step(body: messages.OptimStep, server: Serving, owner: Owner) -> dict[str, Any]:
    return server.optim_step(owner, body).reply()


@router.post("/save_weights")
async def save_weights(body: messages.SaveWeights, server: Serving, owner: Owner) -> dict[str, Any]:
    return server.save_weights(owner, body).reply()


@router.post("/load_weights")
async def load_weights(body: messages.LoadWeights, server: Serving, owner: Owner) -> dict[str, Any]:
    return server.load_weights(owner, body).reply()


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    body: messages.SaveWeightsForSampler, server: Serving, owner: Owner
) -> dict[str, Any]:
    return server.save_weights_for_sampler(owner, body).reply()


@router.post("/save_weights_external")
async def save_weights_external(body: messages.SaveWeightsExternal, server: Serving, owner: Owner) -> dict[str, Any]:
    return server.save_weights_external(owner, body).reply()


# sampling


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: messages.CreateSamplingSession, server: Serving, owner: Owner
) -> dict[str, Any]:
    return server.create_sampling_session(owner, body)


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, server: Serving, owner: Owner) -> dict[str, Any]:
    sampler = server.sampler(owner, sampler_id)
    return {"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": sampler.model_path}


@router.post("/asample", response_model=None)
async def asample(body: messages.SampleRequest, server: Serving, owner: Owner) -> dict[str, Any] | Response:
    if server.futures.num_waiting >= server.config.max_waiting:
        detail = f"{server.config.max_waiting} requests (max_waiting) already wait for their answers"
        return JSONResponse({"detail": detail}, status_code=429, headers={"Retry-After": "1"})
    return _too_much(server, owner, body.num_bytes) or server.sample(owner, body).reply()


# answers


@router.post("/retrieve_future")
async def retrieve_future(body: messages.RetrieveFuture, server: Serving, owner: Owner) -> Response:
    try:
        promise = await server.futures.wait(body.request_id, server.config.hold_seconds, owner=owner)
    except KeyError:
        detail = f"there is no request {body.request_id}: its answer was dropped, or the server was restarted"
        return JSONResponse({"detail": detail}, status_code=410)
    return _reply(promise, server, allow_metadata_only=body.allow_metadata_only)


def _reply(promise: Promise, server: Server, *, allow_metadata_only: bool) -> Response:
    answer = promise.answer
    if answer is None:
        not_ready = {"type": "try_again", "request_id": promise.request_id, "queue_state": "active"}
        return JSONResponse(not_ready, status_code=408)
    if answer.error is not None:
        server.futures.fetched(promise)
        return JSONResponse({"error": answer.error, "category": answer.category})
    if allow_metadata_only and answer.num_bytes > INLINE_BYTES:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": answer.num_bytes})
    server.futures.fetched(promise)
    if answer.proto is not None:
        return Response(answer.proto, media_type=PROTOBUF)
    return JSONResponse(to_plain(answer.json))


# lists, checkpoints


@router.get("/training_runs")
async def training_runs(server: Serving, owner: Owner, limit: int = 20, offset: int = 0) -> dict[str, Any]:
    return listings.runs(server.store, owner, limit, offset)


@router.get("/training_runs/{run_id}")
async def training_run(run_id: str, server: Serving, owner: Owner) -> dict[str, Any]:
    return listings.run(server.store, listings.require_run(server.store, owner, run_id))


@router.get("/training_runs/{run_id}/checkpoints")
async def checkpoints_of_run(run_id: str, server: Serving, owner: Owner) -> dict[str, Any]:
    listings.require_run(server.store, owner, run_id)
    return {"checkpoints": [listings.checkpoint(each) for each in server.store.checkpoints(run_id=run_id)]}


@router.get("/training_runs/{run_id}/checkpoints/{segment}/{name}/external_weights_urls")
async def external_weights_urls(
    run_id: str, segment: str, name: str, request: Request, server: Serving, owner: Owner
) -> dict[str, Any]:
    checkpoint = server.own_checkpoint(owner, run_id, segment, name)
    if checkpoint.kind != "external":
        raise NotFoundError(f"{checkpoint.path} was not saved by save_weights_external")
    now = time.time()
    urls = request.app.state.downloads.urls(checkpoint, str(request.base_url), now)
    return {"urls": urls, "expires": listings.as_time(now + VALID_SECONDS)}


@pages.get("/download/{expires}/{signature}/{run_id}/{segment}/{name}/{file}")
async def download(
    expires: int, signature: str, run_id: str, segment: str, name: str, file: str, request: Request, server: Serving
) -> Response:
    path = f"tinker://{run_id}/{segment}/{name}"
    request.app.state.downloads.require(path, file, expires, signature)
    checkpoint = server.store.checkpoint(path)
    if checkpoint is None:
        raise NotFoundError(f"{path} was deleted")
    return FileResponse(Path(checkpoint.directory) / file)


@router.delete("/training_runs/{run_id}/checkpoints/{segment}/{name}", status_code=204)
async def delete_checkpoint(run_id: str, segment: str, name: str, server: Serving, owner: Owner) -> None:
    server.delete_checkpoint(owner, run_id, segment, name)


@router.post("/training_runs/{run_id}/checkpoints/{segment}/{name}/publish", status_code=204)
async def publish(run_id: str, segment: str, name: str, server: Serving, owner: Owner) -> None:
    server.publish(owner, run_id, segment, name, public=True)


@router.delete("/training_runs/{run_id}/checkpoints/{segment}/{name}/publish", status_code=204)
async def unpublish(run_id: str, segment: str, name: str, server: Serving, owner: Owner) -> None:
    server.publish(owner, run_id, segment, name, public=False)


@router.put("/training_runs/{run_id}/checkpoints/{segment}/{name}/ttl", status_code=204)
async def set_ttl(run_id: str, segment: str, name: str, body: messages.SetTtl, server: Serving, owner: Owner) -> None:
    server.set_ttl(owner, run_id, segment, name, body.ttl_seconds)


@router.get("/checkpoints")
async def checkpoints(server: Serving, owner: Owner, limit: int = 100, offset: int = 0) -> dict[str, Any]:
    return listings.checkpoints(server.store, owner, limit, offset)


@router.post("/weights_info")
async def weights_info(body: messages.WeightsInfo, server: Serving, owner: Owner) -> dict[str, Any]:
    return listings.weights_info(server.store, server.visible_checkpoint(owner, body.tinker_path))


@router.post("/copy_weights")
async def copy_weights(body: messages.CopyWeights, server: Serving, owner: Owner) -> dict[str, Any]:
    return server.copy_weights(owner, body)


@router.get("/sessions")
async def sessions(server: Serving, owner: Owner, limit: int = 20, offset: int = 0) -> dict[str, Any]:
    return {"sessions": [each["id"] for each in server.store.sessions(owner, limit, offset)]}


@router.get("/sessions/{session_id}")
async def session(session_id: str, server: Serving, owner: Owner) -> dict[str, Any]:
    return listings.session(server.store, server.session(owner, session_id))


@router.api_route("/{rest:path}", methods=["GET", "POST", "PUT", "DELETE", "PATCH"], include_in_schema=False)
async def unsupported(rest: str) -> Response:
    """404 for every other request."""
    return JSONResponse({"detail": f"/api/v1/{rest} is not supported by this server"}, status_code=404)
