"""The routes that save, copy, list, publish and delete checkpoints of training runs."""

import os
import shutil
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import FileResponse

from controllers.tinker_server import messages
from controllers.tinker_server.bodies import JsonRoute
from controllers.tinker_server.caller import Calling
from controllers.tinker_server.downloads import VALID_SECONDS
from controllers.tinker_server.futures import Answer, Json, NotFoundError, UserError
from controllers.tinker_server.server import Server
from controllers.tinker_server.store import Checkpoint, Sampler, Session, TrainingRun, Version, checkpoint_path
from controllers.tinker_server.trainers import size_of

routes = APIRouter(route_class=JsonRoute)
pages = APIRouter()
PATH = "/training_runs/{run_id}/checkpoints/{segment}/{name}"


async def own_checkpoint(run_id: str, segment: str, name: str, caller: Calling) -> Checkpoint:
    return caller.own(Checkpoint, f"tinker://{run_id}/{segment}/{name}")


Own = Annotated[Checkpoint, Depends(own_checkpoint)]


def find_visible(server: Server, owner: str, path: str) -> Checkpoint:
    """The owner's or a published checkpoint that has not expired."""
    checkpoint = server.store.get(Checkpoint, path)
    if checkpoint is None or not (checkpoint.owner == owner or checkpoint.public):
        raise NotFoundError(f"there is no checkpoint {path}")
    if checkpoint.expires is not None and checkpoint.expires <= time.time():
        raise NotFoundError(f"there is no checkpoint {path}")
    return checkpoint


@routes.post("/save_weights")
async def save_weights(body: messages.SaveWeights, caller: Calling) -> Json:
    return caller.submit("save_weights", body, _save_weights)


async def _save_weights(server: Server, run: TrainingRun, body: messages.SaveWeights) -> Answer:
    name = body.path or uuid.uuid4().hex
    path = checkpoint_path(run.id, "training", name)
    # an older checkpoint's files stay until the new ones are complete
    directory = _directory(server, run, "weights", name)
    hint = "give another name, or overwrite=True"
    with server.taking(Checkpoint, path, hint, overwrite=body.overwrite):
        async with server.trainers.using(run.id) as loaded:
            await loaded.save(directory)
        _put(server, run, "training", name, directory, body.ttl_seconds, user_metadata=body.user_metadata)
    return Answer(json={"type": "save_weights", "path": path})


@routes.post("/save_weights_external")
async def save_weights_external(body: messages.SaveWeightsExternal, caller: Calling) -> Json:
    """Write a downloadable Hugging Face directory, with adapters merged."""
    return caller.submit("save_weights_external", body, _save_external)


async def _save_external(server: Server, run: TrainingRun, body: messages.SaveWeightsExternal) -> Answer:
    if body.age_encryption_recipients:
        raise UserError("age_encryption_recipients is not supported: this server encrypts no files")
    path = checkpoint_path(run.id, "external", body.path)
    directory = _directory(server, run, "external_weights", body.path)
    with server.taking(Checkpoint, path, hint="give another name"):
        async with server.trainers.using(run.id) as loaded:
            await loaded.client.export_hf(str(directory), "float32")
        _put(server, run, "external", body.path, directory, body.ttl_seconds)
    return Answer(json={"type": "save_weights_external", "path": path})


@routes.post("/save_weights_for_sampler")
async def save_weights_for_sampler(body: messages.SaveWeightsForSampler, caller: Calling) -> Json:
    if (body.path is None) == (body.sampling_session_seq_id is None):
        raise ValueError("save_weights_for_sampler needs path or sampling_session_seq_id, but not both")
    return caller.submit("save_weights_for_sampler", body, _save_for_sampler if body.path is None else _save_named)


async def _save_named(server: Server, run: TrainingRun, body: messages.SaveWeightsForSampler) -> Answer:
    name = body.path or ""
    path = checkpoint_path(run.id, "sampler", name)
    with server.taking(Checkpoint, path, hint="give another name"):
        version = await _export(server, run, is_ephemeral=False)
        more = {"version": version, "user_metadata": body.user_metadata}
        _put(server, run, "sampler", name, server.directory_of(version), body.ttl_seconds, **more)
    return Answer(json={"type": "save_weights_for_sampler", "path": path})


async def _save_for_sampler(server: Server, run: TrainingRun, body: messages.SaveWeightsForSampler) -> Answer:
    sampler_id = f"{run.session_id}:sample:{body.sampling_session_seq_id}"
    with server.taking(Sampler, sampler_id, hint="give another sampling_session_seq_id"):
        version = await _export(server, run, is_ephemeral=True)
        if body.kind == "inflight":
            server.store.update(TrainingRun, run.id, inflight_version=version)
        sampler = Sampler(
            id=sampler_id,
            session_id=run.session_id,
            owner=run.owner,
            base_model=run.base_model,
            run_id=run.id,
            version=version,
            kind=body.kind,
        )
        server.store.put(sampler)
    _drop_old_versions(server, run)
    return Answer(json={"type": "save_weights_for_sampler", "sampling_session_id": sampler_id})


async def _export(server: Server, run: TrainingRun, *, is_ephemeral: bool) -> int:
    """Write a new version for samplers: an adapter if the generator can apply it, else all weights."""
    version = server.store.put(Version(run_id=run.id, is_ephemeral=is_ephemeral))
    directory = str(server.directory_of(version))
    config = server.config.generator
    async with server.trainers.using(run.id) as loaded:
        if config.max_adapters and 0 < run.lora["rank"] <= config.max_adapter_rank:
            await loaded.client.export_lora(directory)
        else:
            await loaded.client.export_hf(directory, config.dtype)
    server.store.update(Version, version, directory=directory)
    return version


def _drop_old_versions(server: Server, run: TrainingRun) -> None:
    """All unnamed ones but the newest `samplers_kept`, and the one that "inflight" samplers use."""
    now = server.store.get(TrainingRun, run.id)
    unnamed = server.store.find(Version, run_id=run.id, is_ephemeral=True, is_dropped=False)
    for version in [each for each in unnamed if each.directory][server.config.samplers_kept :]:
        if now is None or version.number != now.inflight_version:
            server.drop_version(version.number)


def _directory(server: Server, run: TrainingRun, segment: str, name: str) -> Path:
    return server.folder / "runs" / run.id.replace(":", "_") / segment / name


def _put(
    server: Server, run: TrainingRun, kind: str, name: str, directory: Path, ttl_seconds: int | None, **more: Any
) -> None:
    """Add a checkpoint, whose files must be complete. more: its version and user_metadata."""
    checkpoint = Checkpoint(
        path=checkpoint_path(run.id, kind, name),
        run_id=run.id,
        owner=run.owner,
        kind=kind,
        name=name,
        directory=str(directory),
        size_bytes=size_of(directory),
        expires=_expiry(ttl_seconds),
        **more,
    )
    server.store.put(checkpoint)


def _expiry(ttl_seconds: int | None) -> float | None:
    return None if ttl_seconds is None else time.time() + ttl_seconds


@routes.post("/copy_weights")
async def copy_weights(body: messages.CopyWeights, caller: Calling) -> Json:
    """Make a run, which cannot be trained, with a copy of a checkpoint in hard links."""
    server = caller.server
    source = find_visible(server, caller.owner, body.source_path)
    former = server.store.get(TrainingRun, source.run_id)
    if source.kind == "external" or former is None:
        raise UserError(f"{source.path} cannot be copied; only training states and weights for samplers can")
    session_id = body.session_id
    if session_id is None:
        session_id = uuid.uuid4().hex
        project = body.destination_project_id
        server.store.put(Session(id=session_id, owner=caller.owner, tags=["copy"], project_id=project))
    fields = {name: getattr(former, name) for name in ("base_model", "lora", "user_metadata")}
    run = caller.new_run(session_id, body.model_seq_id or 0, fields)
    if server.store.get(TrainingRun, run.id) is not None or server.taken[run.id]:
        raise UserError(f"{run.id} exists; give another model_seq_id")
    version = None
    directory = _directory(server, run, "weights", source.name)
    if source.kind == "sampler":
        version = server.store.put(Version(run_id=run.id))
        directory = server.directory_of(version)
    try:
        shutil.copytree(source.directory, directory, copy_function=os.link)
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)  # so that the request can be sent again
        raise
    server.store.put(run)
    if version is not None:
        server.store.update(Version, version, directory=str(directory))
    more = {"version": version, "user_metadata": source.user_metadata}
    _put(server, run, source.kind, source.name, directory, body.ttl_seconds, **more)
    return {"tinker_path": checkpoint_path(run.id, source.kind, source.name)}


@routes.get("/checkpoints")
async def checkpoints(caller: Calling, limit: int = 100, offset: int = 0) -> Json:
    rows, cursor = caller.page(Checkpoint, limit, offset)
    return {"checkpoints": [shown(row) for row in rows], "cursor": cursor}


@routes.get("/training_runs/{run_id}/checkpoints")
async def checkpoints_of_run(run_id: str, caller: Calling) -> Json:
    run = caller.own(TrainingRun, run_id)
    return {"checkpoints": [shown(row) for row in caller.server.store.find(Checkpoint, run_id=run.id)]}


def shown(checkpoint: Checkpoint) -> Json:
    return {
        "checkpoint_id": checkpoint.path.removeprefix(f"tinker://{checkpoint.run_id}/"),
        "checkpoint_type": checkpoint.kind,
        "time": as_time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": as_time(checkpoint.expires),
    }


def as_time(seconds: float | None) -> str | None:
    """Seconds since 1970 as ISO 8601."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


@routes.post("/weights_info")
async def weights_info(body: messages.WeightsInfo, caller: Calling) -> Json:
    checkpoint = find_visible(caller.server, caller.owner, body.tinker_path)
    run = caller.server.store.get(TrainingRun, checkpoint.run_id)
    assert run is not None
    layers = {name: run.lora[name] for name in ("train_unembed", "train_mlp", "train_attn")}
    rank = run.lora["rank"]
    return {"base_model": run.base_model, "is_lora": rank > 0, "lora_rank": rank, **layers}


@routes.delete(PATH, status_code=204)
async def delete_checkpoint(checkpoint: Own, caller: Calling) -> None:
    caller.server.delete(checkpoint)


@routes.post(f"{PATH}/publish", status_code=204)
@routes.delete(f"{PATH}/publish", status_code=204)
async def publish(checkpoint: Own, caller: Calling, request: Request) -> None:
    caller.server.store.update(Checkpoint, checkpoint.path, public=request.method == "POST")


@routes.put(f"{PATH}/ttl", status_code=204)
async def set_ttl(checkpoint: Own, body: messages.SetTtl, caller: Calling) -> None:
    caller.server.store.update(Checkpoint, checkpoint.path, expires=_expiry(body.ttl_seconds))


@routes.get(f"{PATH}/external_weights_urls")
async def external_weights_urls(checkpoint: Own, request: Request) -> Json:
    if checkpoint.kind != "external":
        raise NotFoundError(f"{checkpoint.path} was not saved by save_weights_external")
    now = time.time()
    urls = request.app.state.downloads.urls(checkpoint, str(request.base_url), now)
    return {"urls": urls, "expires": as_time(now + VALID_SECONDS)}


@pages.get("/download/{expires}/{signature}/{run_id}/{segment}/{name}/{file}")
async def download(
    expires: int, signature: str, run_id: str, segment: str, name: str, file: str, request: Request, caller: Calling
) -> Response:
    path = f"tinker://{run_id}/{segment}/{name}"
    request.app.state.downloads.require(path, file, expires, signature)
    checkpoint = caller.server.store.get(Checkpoint, path)
    if checkpoint is None:
        raise NotFoundError(f"{path} was deleted")
    return FileResponse(Path(checkpoint.directory) / file)
