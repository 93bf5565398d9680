"""The routes of training runs, which the protocol also calls models."""

import contextlib
import random
from functools import partial

from fastapi import APIRouter, Request

from controllers.tinker_server import messages
from controllers.tinker_server.beside import SMALL_BYTES, beside
from controllers.tinker_server.bodies import JsonRoute, decompressed
from controllers.tinker_server.caller import Caller, Calling
from controllers.tinker_server.checkpoints import as_time, find_visible, shown
from controllers.tinker_server.config import tokenizer_id
from controllers.tinker_server.futures import Answer, Json, UserError
from controllers.tinker_server.requests import require_adam
from controllers.tinker_server.samples import TrainingCall, read_call, write_output
from controllers.tinker_server.server import Server
from controllers.tinker_server.store import Checkpoint, Session, TrainingRun
from rl_actors import OptimParams

routes = APIRouter(route_class=JsonRoute)


@routes.post("/create_model")
async def create_model(body: messages.CreateModel, caller: Calling) -> Json:
    lora = (body.lora_config or messages.Lora(rank=0)).model_dump()
    if lora["seed"] is None:
        lora["seed"] = random.SystemRandom().randrange(1 << 31)
    fields = {"base_model": body.base_model, "lora": lora, "user_metadata": body.user_metadata}
    run = caller.new_run(body.session_id, body.model_seq_id, fields)

    async def work() -> Answer:
        caller.server.require_base(body.base_model)
        require_adam(body.optimizer_config)
        await _start(caller, run)
        return Answer(json={"type": "create_model", "model_id": run.id})

    return caller.submit_as(("create", run.id), "create_model", run.id, work)


async def _start(caller: Caller, run: TrainingRun, checkpoint: str | None = None, *, optimizer: bool = False) -> None:
    with caller.server.taking(TrainingRun, run.id, hint="give another model_seq_id"):
        await caller.server.trainers.create(run, checkpoint, optimizer=optimizer)
        caller.server.store.put(run)


@routes.post("/load_weights")
async def load_weights(body: messages.LoadWeights, caller: Calling) -> Json:
    """Into a new run (session_id, model_seq_id) or an existing one (model_id, seq_id)."""
    if body.model_id is not None:
        return caller.submit("load_weights", body, _load_into)
    if body.session_id is None or body.model_seq_id is None:
        raise ValueError("load_weights needs session_id and model_seq_id, or model_id and seq_id")
    caller.own(Session, body.session_id)
    run_id = f"{body.session_id}:train:{body.model_seq_id}"
    return caller.submit_as(("create", run_id), "load_weights", run_id, partial(_load_new, caller, body))


async def _load_new(caller: Caller, body: messages.LoadWeights) -> Answer:
    require_adam(body.optimizer_config)
    if body.base_model is not None:
        caller.server.require_base(body.base_model)
    checkpoint = _find_state(caller.server, caller.owner, body.path)
    former = caller.server.store.get(TrainingRun, checkpoint.run_id)
    assert former is not None
    base_model = body.base_model or former.base_model
    fields = {"base_model": base_model, "lora": former.lora, "user_metadata": body.user_metadata}
    run = caller.new_run(body.session_id or "", body.model_seq_id or 0, fields)
    await _start(caller, run, checkpoint.directory, optimizer=body.optimizer)
    return Answer(json={"type": "load_weights", "path": body.path, "model_id": run.id})


async def _load_into(server: Server, run: TrainingRun, body: messages.LoadWeights) -> Answer:
    checkpoint = _find_state(server, run.owner, body.path)
    async with server.trainers.using(run.id) as loaded:
        loaded.require_no_gradients()
        await loaded.client.load_checkpoint(checkpoint.directory, optimizer=body.optimizer)
    return Answer(json={"type": "load_weights", "path": body.path, "model_id": run.id})


def _find_state(server: Server, owner: str, path: str) -> Checkpoint:
    checkpoint = find_visible(server, owner, path)
    if checkpoint.kind != "training":
        raise UserError(f"{path} is not a training state; load a path with /weights/, which save_state returns")
    return checkpoint


@routes.post("/get_info")
async def get_info(body: messages.OfModel, caller: Calling) -> Json:
    run = caller.own(TrainingRun, body.model_id)
    config = caller.server.config
    return {
        "type": "get_info",
        "model_id": run.id,
        "model_data": {
            "arch": config.trainer.model.architecture,
            "model_name": run.base_model,
            "tokenizer_id": tokenizer_id(config.hf_path),
        },
        "model_name": run.base_model,
        "is_lora": run.lora["rank"] > 0,
        "lora_rank": run.lora["rank"],
    }


@routes.post("/forward_backward")
async def forward_backward(request: Request, caller: Calling) -> Json:
    """Reads the whole body before it accepts the request, so that a run's calls keep their order."""
    raw = await request.body()
    is_small = len(raw) < SMALL_BYTES and "content-encoding" not in request.headers
    # one large request at a time: each may take many times its bytes before the limit of waiting
    # data applies
    async with contextlib.nullcontext() if is_small else request.app.state.reading:
        body = await decompressed(request, raw)
        call = await beside(len(body), read_call, body, caller.server.training_limits)
        caller.require_room(call.num_bytes)
        what = "forward" if call.forward_only else "forward_backward"
        return caller.submit(what, call, _train, keeps_key=not call.forward_only, num_bytes=call.num_bytes)


async def _train(server: Server, run: TrainingRun, call: TrainingCall) -> Answer:
    batch = call.batch
    if isinstance(batch, Exception):
        raise batch
    if call.forward_only:
        async with server.trainers.using(run.id) as loaded:
            output = batch.merged([await loaded.client.forward(group, batch.loss) for group in batch.groups])
    else:
        output = await server.trainers.forward_backward(run.id, batch)
        server.num_trained_positions += batch.num_positions
        curves = server.curves[run.id]
        curves.num_losses += 1
        curves.losses.append(output.metrics["loss:sum"] / batch.num_datums)
    return Answer(proto=await beside(batch.num_bytes, write_output, batch, output))


@routes.post("/optim_step")
async def optim_step(body: messages.OptimStep, caller: Calling) -> Json:
    return caller.submit("optim_step", body, _optim_step, keeps_key=True)


async def _optim_step(server: Server, run: TrainingRun, body: messages.OptimStep) -> Answer:
    params = _optim_params(body)
    async with server.trainers.using(run.id) as loaded:
        if not loaded.has_gradients:
            raise UserError("no gradients are accumulated; optim_step comes after forward_backward")
        result = await loaded.client.optim_step(params)
        loaded.has_gradients = False
    if result.skipped:
        # empty if only the norm over all parameters overflows
        names = ", ".join(result.nonfinite_parameters) or "none by itself, only their norm"
        raise UserError(f"the gradient is not finite (parameters: {names}); it was dropped, and no weight has changed")
    server.num_optim_steps += 1
    curves = server.curves[run.id]
    curves.num_steps += 1
    curves.grad_norms.append(result.grad_norm)
    return Answer(json={"metrics": {"unclipped_grad_l2:mean": result.grad_norm}})


def _optim_params(body: messages.OptimStep) -> OptimParams:
    """Raises UserError for an optimizer that is not AdamW."""
    if body.adam_params is None:
        kind = (body.optimizer_params or {}).get("type")
        raise UserError(f"optimizer_params of type {kind!r}; this server has only AdamW, whose field is adam_params")
    values = body.adam_params.model_dump()
    clip = values.pop("grad_clip_norm")
    return OptimParams(**values, grad_clip_norm=clip if clip > 0 else None, grad_divisor=1.0)


@routes.get("/training_runs")
async def training_runs(caller: Calling, limit: int = 20, offset: int = 0) -> Json:
    rows, cursor = caller.page(TrainingRun, limit, offset)
    return {"training_runs": [_shown(caller, run) for run in rows], "cursor": cursor}


@routes.get("/training_runs/{run_id}")
async def training_run(run_id: str, caller: Calling) -> Json:
    return _shown(caller, caller.own(TrainingRun, run_id))


def _shown(caller: Caller, run: TrainingRun) -> Json:
    """With its newest training and sampler checkpoints."""
    rank = run.lora["rank"]
    newest = {}
    for kind in ("training", "sampler"):
        found = caller.server.store.find(Checkpoint, limit=1, run_id=run.id, kind=kind)
        newest[kind] = shown(found[0]) if found else None
    return {
        "training_run_id": run.id,
        "base_model": run.base_model,
        "model_owner": run.owner,
        "is_lora": rank > 0,
        "lora_rank": rank or None,
        "last_request_time": as_time(run.last_request),
        "last_checkpoint": newest["training"],
        "last_sampler_checkpoint": newest["sampler"],
        "user_metadata": run.user_metadata,
    }
