"""The routes of clients and their sessions."""

import time
import uuid

from fastapi import APIRouter, Request

from controllers.tinker_server import messages
from controllers.tinker_server.bodies import JsonRoute
from controllers.tinker_server.caller import Calling
from controllers.tinker_server.futures import Json
from controllers.tinker_server.store import Sampler, Session, TrainingRun

routes = APIRouter(route_class=JsonRoute)


@routes.post("/client/config")
async def client_config(body: messages.ClientConfig) -> Json:
    return {
        "pjwt_auth_enabled": False,
        "parallel_fwdbwd_chunks": True,
        "proto_compress_fwdbwd": False,
        "sample_use_retrieve_futures": False,
        "custom_loss_server_side": False,
        "sample_join_sampling_session": False,
    }


@routes.post("/client/dynamic_config")
async def client_dynamic_config(body: messages.ClientConfig) -> Json:
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": False}


@routes.post("/create_session")
async def create_session(body: messages.CreateSession, caller: Calling) -> Json:
    session = Session(id=uuid.uuid4().hex, owner=caller.owner, **body.model_dump(exclude={"type"}))
    caller.server.store.put(session)
    return {"type": "create_session", "session_id": session.id}


@routes.post("/session_heartbeat")
async def session_heartbeat(body: messages.OfSession, caller: Calling) -> Json:
    session = caller.own(Session, body.session_id)
    caller.server.store.update(Session, session.id, last_seen=time.time())
    return {"type": "session_heartbeat"}


@routes.post("/sessions/{session_id}/finish", status_code=204)
async def finish_session(session_id: str, body: messages.FinishSession, caller: Calling) -> None:
    session = caller.own(Session, session_id)
    caller.server.store.update(Session, session.id, finished=str(body.reason.get("type", "")))


@routes.post("/telemetry")
async def telemetry(request: Request) -> Json:
    """Discard the SDK's telemetry."""
    await request.body()
    return {"status": "accepted"}


@routes.get("/get_server_capabilities")
async def get_server_capabilities(caller: Calling) -> Json:
    config = caller.server.config
    model = {"model_name": config.name, "max_context_length": config.generator.max_model_len}
    return {"supported_models": [model | {"trainable": True, "sampleable": True}]}


@routes.get("/sessions")
async def sessions(caller: Calling, limit: int = 20, offset: int = 0) -> Json:
    rows, _ = caller.page(Session, limit, offset)
    return {"sessions": [row.id for row in rows]}


@routes.get("/sessions/{session_id}")
async def session(session_id: str, caller: Calling) -> Json:
    row = caller.own(Session, session_id)
    store = caller.server.store
    return {
        "training_run_ids": [run.id for run in store.find(TrainingRun, session_id=row.id)],
        "sampler_ids": [sampler.id for sampler in reversed(store.find(Sampler, session_id=row.id))],
        "user_metadata": row.user_metadata,
        "display_name": row.display_name,
    }
