"""The routes of samplers, which the protocol also calls sampling sessions."""

from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from fastapi import APIRouter

from controllers.tinker_server import messages
from controllers.tinker_server.beside import beside
from controllers.tinker_server.bodies import JsonRoute
from controllers.tinker_server.caller import Caller, Calling, try_later
from controllers.tinker_server.checkpoints import find_visible
from controllers.tinker_server.futures import Answer, Json, UserError
from controllers.tinker_server.sampling import Weights
from controllers.tinker_server.server import SILENT_SECONDS, Server
from controllers.tinker_server.store import Sampler, Session, TrainingRun, Version
from rl_actors import adapters
from rl_actors.validation import MAX_TOP_LOGPROBS

routes = APIRouter(route_class=JsonRoute)


@routes.post("/create_sampling_session")
async def create_sampling_session(body: messages.CreateSamplingSession, caller: Calling) -> Json:
    store = caller.server.store
    caller.own(Session, body.session_id)
    sampler = _new_sampler(caller, body)
    former = store.get(Sampler, sampler.id)
    # the SDK repeats a request whose answer was lost
    if former is None or replace(former, created=sampler.created) != sampler:
        with caller.server.taking(Sampler, sampler.id, hint="give another sampling_session_seq_id"):
            store.put(sampler)
    return {"type": "create_sampling_session", "sampling_session_id": sampler.id}


def _new_sampler(caller: Caller, body: messages.CreateSamplingSession) -> Sampler:
    sampler = Sampler(
        id=f"{body.session_id}:sample:{body.sampling_session_seq_id}",
        session_id=body.session_id,
        owner=caller.owner,
        base_model=body.base_model or "",
        version=caller.server.base_version,
    )
    if body.model_path is None:
        if body.base_model is None:
            raise ValueError("create_sampling_session needs base_model or model_path")
        caller.server.require_base(body.base_model)
        return sampler
    checkpoint = find_visible(caller.server, caller.owner, body.model_path)
    run = caller.server.store.get(TrainingRun, checkpoint.run_id)
    if checkpoint.version is None or run is None:
        raise UserError(
            f"{body.model_path} holds no weights for a sampler; give a path that save_weights_for_sampler returned"
        )
    sampler = replace(sampler, base_model=run.base_model, model_path=body.model_path)
    return replace(sampler, run_id=run.id, version=checkpoint.version)


@routes.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, caller: Calling) -> Json:
    sampler = caller.own(Sampler, sampler_id)
    return {"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": sampler.model_path}


@routes.post("/asample")
async def asample(body: messages.SampleRequest, caller: Calling) -> Json:
    server = caller.server
    if server.futures.num_waiting >= server.config.max_waiting:
        raise try_later(f"{server.config.max_waiting} requests (max_waiting) already wait for their answers")
    caller.require_room(body.num_bytes)
    if body.sampling_session_id is None or body.seq_id is None:
        raise ValueError("asample needs sampling_session_id and seq_id")
    if body.num_samples > server.config.max_samples:
        raise ValueError(f"num_samples={body.num_samples}; it must be at most {server.config.max_samples}")
    sampler_id = body.sampling_session_id
    fault = _fault_of_sizes(body, server.sampling.max_model_len)
    return server.futures.submit(
        ("sample", sampler_id, body.seq_id),
        "sample",
        # a faulty body is not kept until its turn
        partial(_fail, fault) if fault else partial(_sample, caller, body, sampler_id),
        {"sample_sequence_ids": [f"{sampler_id}:{body.seq_id}:{index}" for index in range(body.num_samples)]},
        owner=caller.owner,
        num_bytes=0 if fault else body.num_bytes,
    ).reply()


def _fault_of_sizes(body: messages.SampleRequest, longest: int) -> str:
    """Why the body is larger than any request can be, else ""."""
    num_tokens = sum(len(chunk.tokens or ()) for chunk in body.prompt.chunks)
    if num_tokens > longest:
        return f"the prompt has {num_tokens} tokens; max_model_len={longest}"
    cells = len(body.target_prompt_logprobs.data) if body.target_prompt_logprobs is not None else 0
    if cells > (most := longest * MAX_TOP_LOGPROBS):
        return (
            f"target_prompt_logprobs has {cells} cells; at most {most} are allowed: {MAX_TOP_LOGPROBS} at each position"
        )
    return ""


async def _fail(fault: str) -> Answer:
    raise ValueError(fault)


async def _sample(caller: Caller, body: messages.SampleRequest, sampler_id: str) -> Answer:
    server = caller.server
    sampler = caller.own(Sampler, sampler_id)
    wanted = await beside(body.num_bytes, server.sampling.read, body)
    wanted.require_small_answer(server.config.max_answer_bytes)
    async with _weights_of(server, sampler) as weights:
        answer, num_tokens = await wanted.run(weights)
    server.num_sampled_tokens += num_tokens
    return Answer(proto=answer)


def _weights_of(server: Server, sampler: Sampler) -> AbstractAsyncContextManager[Weights]:
    """Hold the weights that the sampler uses now. Raises UserError if they were dropped."""
    number = sampler.version
    if sampler.kind == "inflight":
        run = server.store.get(TrainingRun, sampler.run_id or "")
        assert run is not None and run.inflight_version is not None
        number = run.inflight_version
    version = server.store.get(Version, number)
    if version is None or version.is_dropped or not version.directory:
        raise UserError(
            f"the weights of sampler {sampler.id} were dropped; weights with a name are dropped when they are "
            "deleted or expire; weights without a name are dropped when the run has saved "
            f"{server.config.samplers_kept} newer ones (samplers_kept), or when the session has sent no heartbeat "
            f"for {SILENT_SECONDS / 3600:g} hours"
        )
    if adapters.is_adapter(Path(version.directory)):
        return server.generator.using_adapter(number, version.directory, base=server.base_version)
    return server.generator.using(number)
