"""The work behind the HTTP routes of a Tinker server: sessions, training runs, checkpoints and
samplers of one base model. Contains no HTTP.

A method that returns a Promise accepts the request at once. It raises only if fields are missing or
exclude each other, too many samples are asked for, or the session does not exist; every other error
is the promise's answer.
"""

import asyncio
import contextlib
import logging
import os
import random
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from controllers.tinker_server import messages, requests
from controllers.tinker_server.beside import beside
from controllers.tinker_server.config import ServeConfig, tokenizer_id
from controllers.tinker_server.curves import RATE_SECONDS, Rates, RunCurves
from controllers.tinker_server.futures import Answer, Futures, Json, NotFoundError, Promise, UserError
from controllers.tinker_server.samples import TrainingCall, write_output
from controllers.tinker_server.sampling import VersionedGenerator, Weights
from controllers.tinker_server.store import Checkpoint, Run, Sampler, Store, checkpoint_path
from controllers.tinker_server.trainers import Trainers
from rl_actors import OptimParams, adapters
from rl_actors.clients.limits import TrainerLimits
from rl_actors.validation import MAX_TOP_LOGPROBS

logger = logging.getLogger(__name__)

ABANDONED_SECONDS = 120.0
"""A run's client is gone after this long without heartbeat of its session or request to the run."""
SILENT_SECONDS = 24 * 3600.0
"""After this long without heartbeat, unnamed sampler weights of a session's runs are deleted."""
SWEEP_SECONDS = 60.0
"""Seconds between two calls of Server.sweep."""


class Server:
    """A server's state and calls."""

    def __init__(
        self,
        config: ServeConfig,
        folder: Path,
        *,
        store: Store,
        trainers: Trainers,
        generator: VersionedGenerator,
        sampling: requests.SamplingLimits,
    ) -> None:
        self.config = config
        self.folder = folder
        self.store = store
        self.trainers = trainers
        self.generator = generator
        self.sampling = sampling
        self.futures = Futures()
        self.training_limits = TrainerLimits.of_config(config.trainer)
        self.base_version = store.version_of_base(config.hf_path)
        self._link(self.base_version, Path(config.hf_path))
        self._repeating: list[asyncio.Task[None]] = []
        self._removals: set[asyncio.Future[None]] = set()  # running deletions of versions
        self.num_sampled_tokens = self.num_trained_positions = self.num_optim_steps = 0
        self._taken: Counter[str] = Counter()  # names of runs, checkpoints and samplers that calls are about to write
        self.curves: dict[str, RunCurves] = {}  # by run id
        self.rates = Rates()

    # start and end

    def begin(self) -> None:
        """Call `sweep` and `measure` periodically. Needs a running event loop."""
        self.trainers.sweep_unnamed()
        self._repeating = [asyncio.create_task(self._sweep()), asyncio.create_task(self._measure())]

    async def close(self) -> None:
        """Cancel the requests, write the runs to disk, and end the actors."""
        for task in self._repeating:
            task.cancel()
        await self.futures.close()
        await asyncio.gather(*self._removals)
        await self.trainers.close()
        await self.generator.generator.close()
        self.store.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep(time.time())

    async def _measure(self) -> None:
        while True:
            self.measure(time.monotonic())
            await asyncio.sleep(RATE_SECONDS)

    def measure(self, now: float) -> None:
        """Add a point to the curves of tokens per second."""
        self.rates.add(now, {"sampled": self.num_sampled_tokens, "trained": self.num_trained_positions})

    def sweep(self, now: float) -> None:
        """Delete expired checkpoints, unnamed weights of silent sessions, and states of abandoned
        runs.
        """
        self.trainers.sweep(now)
        for checkpoint in self.store.expired(now):
            self._delete(checkpoint)
        for number in self.store.forgotten_versions(now - SILENT_SECONDS):
            self._drop_version(number)

    @contextlib.contextmanager
    def _taking(self, name: str, *, exists: bool, hint: str) -> Iterator[None]:
        """Reserve a new name for a call, from its acceptance on. Raises UserError with the hint if
        it exists or is reserved.
        """
        if exists:
            raise UserError(f"{name} exists; {hint}")
        if self._taken[name]:
            raise UserError(f"an earlier call is about to make {name}; {hint}")
        with self._writing(name):
            yield

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Reserve a name, also one that other calls are writing."""
        self._taken[name] += 1
        try:
            yield
        finally:
            self._taken[name] -= 1
            if not self._taken[name]:
                del self._taken[name]

    # sessions

    def create_session(self, owner: str, body: messages.CreateSession) -> Json:
        session_id = uuid.uuid4().hex
        self.store.add_session(session_id, owner, body.model_dump(exclude={"type"}))
        return {"type": "create_session", "session_id": session_id}

    def heartbeat(self, owner: str, session_id: str) -> Json:
        self.session(owner, session_id)
        self.store.touch_session(session_id)
        return {"type": "session_heartbeat"}

    def finish_session(self, owner: str, session_id: str, body: messages.FinishSession) -> None:
        self.session(owner, session_id)
        self.store.update_session(session_id, finished=str(body.reason.get("type", "")))

    def session(self, owner: str, session_id: str) -> dict[str, Any]:
        session = self.store.session(session_id)
        if session is None or session["owner"] != owner:
            raise NotFoundError(f"there is no session {session_id}")
        return session

    def is_abandoned(self, run: Run) -> bool:
        """True if the run's session is finished, or silent for ABANDONED_SECONDS."""
        return is_abandoned(self.store, run)

    # training runs

    def create_model(self, owner: str, body: messages.CreateModel) -> Promise:
        self.session(owner, body.session_id)
        run_id = f"{body.session_id}:train:{body.model_seq_id}"

        async def work() -> Answer:
            self._require_base(body.base_model)
            requests.require_adam(body.optimizer_config)
            lora = body.lora_config or messages.Lora(rank=0)
            await self._start_run(
                Run(
                    id=run_id,
                    session_id=body.session_id,
                    owner=owner,
                    base_model=body.base_model,
                    lora=_lora_of(lora),
                    user_metadata=body.user_metadata,
                )
            )
            return Answer(json={"type": "create_model", "model_id": run_id})

        return self.futures.submit(("create", run_id), "create_model", work, {"model_id": run_id}, owner=owner)

    async def _start_run(self, run: Run, checkpoint: str | None = None, *, optimizer: bool = False) -> None:
        with self._taking(run.id, exists=self.store.run(run.id) is not None, hint="give another model_seq_id"):
            await self.trainers.create(run, checkpoint, optimizer=optimizer)
            self.store.add_run(run)

    def load_weights(self, owner: str, body: messages.LoadWeights) -> Promise:
        """Load a checkpoint into a new run (session_id, model_seq_id) or an existing one (model_id,
        seq_id).
        """
        if body.model_id is not None:
            return self._load_into(owner, body, body.model_id)
        if body.session_id is None or body.model_seq_id is None:
            raise ValueError("load_weights needs session_id and model_seq_id, or model_id and seq_id")
        session_id = body.session_id
        self.session(owner, session_id)
        run_id = f"{session_id}:train:{body.model_seq_id}"

        async def work() -> Answer:
            requests.require_adam(body.optimizer_config)
            if body.base_model is not None:
                self._require_base(body.base_model)
            checkpoint = self._training_checkpoint(owner, body.path)
            former = self.store.run(checkpoint.run_id)
            assert former is not None
            run = Run(
                id=run_id,
                session_id=session_id,
                owner=owner,
                base_model=body.base_model or former.base_model,
                lora=former.lora,
                user_metadata=body.user_metadata,
            )
            await self._start_run(run, checkpoint.directory, optimizer=body.optimizer)
            return Answer(json={"type": "load_weights", "path": body.path, "model_id": run_id})

        return self.futures.submit(("create", run_id), "load_weights", work, {"model_id": run_id}, owner=owner)

    def _load_into(self, owner: str, body: messages.LoadWeights, run_id: str) -> Promise:
        async def work() -> Answer:
            self._run(owner, run_id)
            checkpoint = self._training_checkpoint(owner, body.path)
            await self.trainers.load(run_id, checkpoint.directory, optimizer=body.optimizer)
            return Answer(json={"type": "load_weights", "path": body.path, "model_id": run_id})

        return self.futures.submit(_key(run_id, body.seq_id), "load_weights", work, {"model_id": run_id}, owner=owner)

    def _training_checkpoint(self, owner: str, path: str) -> Checkpoint:
        checkpoint = self.visible_checkpoint(owner, path)
        if checkpoint.kind != "training":
            raise UserError(f"{path} is not a training state; load a path with /weights/, which save_state returns")
        return checkpoint

    def info(self, owner: str, run_id: str) -> Json:
        run = self._run(owner, run_id)
        rank = run.lora["rank"]
        return {
            "type": "get_info",
            "model_id": run_id,
            "model_data": {
                "arch": self.config.trainer.model.architecture,
                "model_name": run.base_model,
                "tokenizer_id": tokenizer_id(self.config.hf_path),
            },
            "model_name": run.base_model,
            "is_lora": rank > 0,
            "lora_rank": rank,
        }

    def forward_backward(self, owner: str, call: TrainingCall) -> Promise:
        batch = call.batch

        async def work() -> Answer:
            self._run(owner, call.model_id)
            if isinstance(batch, Exception):
                raise batch
            if call.forward_only:
                output = await self.trainers.forward(call.model_id, batch)
            else:
                output = await self.trainers.forward_backward(call.model_id, batch)
                self.num_trained_positions += batch.num_positions
                curves = self._curves(call.model_id)
                curves.num_losses += 1
                curves.losses.append(output.metrics["loss:sum"] / batch.num_datums)
            return Answer(proto=await beside(batch.num_bytes, write_output, batch, output))

        return self.futures.submit(
            _key(call.model_id, call.seq_id),
            "forward" if call.forward_only else "forward_backward",
            work,
            {"model_id": call.model_id},
            owner=owner,
            keeps_key=not call.forward_only,
            num_bytes=call.num_bytes,
        )

    def optim_step(self, owner: str, body: messages.OptimStep) -> Promise:
        async def work() -> Answer:
            self._run(owner, body.model_id)
            result = await self.trainers.optim_step(body.model_id, _optim_params(body))
            if result.skipped:
                # empty if only the norm over all parameters overflows
                names = ", ".join(result.nonfinite_parameters) or "none by itself, only their norm"
                raise UserError(
                    f"the gradient is not finite (parameters: {names}); it was dropped, and no weight has changed"
                )
            self.num_optim_steps += 1
            curves = self._curves(body.model_id)
            curves.num_steps += 1
            curves.grad_norms.append(result.grad_norm)
            return Answer(json={"metrics": {"unclipped_grad_l2:mean": result.grad_norm}})

        return self.futures.submit(
            _key(body.model_id, body.seq_id),
            "optim_step",
            work,
            {"model_id": body.model_id},
            owner=owner,
            keeps_key=True,
        )

    def _curves(self, run_id: str) -> RunCurves:
        return self.curves.setdefault(run_id, RunCurves())

    def _run(self, owner: str, run_id: str) -> Run:
        run = self.store.run(run_id)
        if run is None or run.owner != owner:
            raise NotFoundError(f"there is no training run {run_id}")
        return run

    def _require_base(self, name: str) -> None:
        if name not in (self.config.name, self.config.hf_path):
            raise UserError(f"base_model={name!r}; this server has {self.config.name}")

    # checkpoints

    def save_weights(self, owner: str, body: messages.SaveWeights) -> Promise:
        async def work() -> Answer:
            run = self._run(owner, body.model_id)
            name = body.path or uuid.uuid4().hex
            path = checkpoint_path(run.id, "training", name)
            exists = self.store.checkpoint(path) is not None
            hint = "give another name, or overwrite=True"
            # an older checkpoint's files stay until the new ones are complete
            directory = self.folder / "runs" / run.id.replace(":", "_") / "weights" / name
            with self._writing(path) if body.overwrite else self._taking(path, exists=exists, hint=hint):
                await self.trainers.save(run.id, directory)
                self._put(run, "training", name, directory, body.ttl_seconds, body.user_metadata)
            return Answer(json={"type": "save_weights", "path": path})

        return self.futures.submit(
            _key(body.model_id, body.seq_id), "save_weights", work, {"model_id": body.model_id}, owner=owner
        )

    def save_weights_for_sampler(self, owner: str, body: messages.SaveWeightsForSampler) -> Promise:
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise ValueError("save_weights_for_sampler needs path or sampling_session_seq_id, but not both")

        async def work() -> Answer:
            run = self._run(owner, body.model_id)
            if body.path is not None:
                return await self._save_named(run, body, body.path)
            sampler_id = f"{run.session_id}:sample:{body.sampling_session_seq_id}"
            exists = self.store.sampler(sampler_id) is not None
            with self._taking(sampler_id, exists=exists, hint="give another sampling_session_seq_id"):
                version = await self._export(run, is_ephemeral=True)
                if body.kind == "inflight":
                    self.store.update_run(run.id, inflight_version=version)
                self.store.add_sampler(
                    Sampler(
                        id=sampler_id,
                        session_id=run.session_id,
                        owner=owner,
                        base_model=run.base_model,
                        run_id=run.id,
                        version=version,
                        kind=body.kind,
                    )
                )
            self._drop_old_versions(run)
            return Answer(json={"type": "save_weights_for_sampler", "sampling_session_id": sampler_id})

        what = "save_weights_for_sampler"
        return self.futures.submit(
            _key(body.model_id, body.seq_id), what, work, {"model_id": body.model_id}, owner=owner
        )

    async def _save_named(self, run: Run, body: messages.SaveWeightsForSampler, name: str) -> Answer:
        path = checkpoint_path(run.id, "sampler", name)
        with self._taking(path, exists=self.store.checkpoint(path) is not None, hint="give another name"):
            version = await self._export(run, is_ephemeral=False)
            directory = self._directory(version)
            self._put(run, "sampler", name, directory, body.ttl_seconds, body.user_metadata, version=version)
        return Answer(json={"type": "save_weights_for_sampler", "path": path})

    def save_weights_external(self, owner: str, body: messages.SaveWeightsExternal) -> Promise:
        """Write a downloadable Hugging Face directory, with adapters merged."""

        async def work() -> Answer:
            if body.age_encryption_recipients:
                raise UserError("age_encryption_recipients is not supported: this server encrypts no files")
            run = self._run(owner, body.model_id)
            path = checkpoint_path(run.id, "external", body.path)
            directory = self.folder / "runs" / run.id.replace(":", "_") / "external_weights" / body.path
            with self._taking(path, exists=self.store.checkpoint(path) is not None, hint="give another name"):
                await self.trainers.export(run.id, directory, "float32")
                self._put(run, "external", body.path, directory, body.ttl_seconds, None)
            return Answer(json={"type": "save_weights_external", "path": path})

        what = "save_weights_external"
        return self.futures.submit(
            _key(body.model_id, body.seq_id), what, work, {"model_id": body.model_id}, owner=owner
        )

    async def _export(self, run: Run, *, is_ephemeral: bool) -> int:
        """Write a run's weights as a new version for samplers, and return its number: an adapter if
        the generator can apply it, else whole weights.
        """
        version = self.store.add_version(run.id, is_ephemeral=is_ephemeral)
        directory = self._directory(version)
        config = self.config.generator
        if config.max_adapters and 0 < run.lora["rank"] <= config.max_adapter_rank:
            await self.trainers.export_adapter(run.id, directory)
        else:
            await self.trainers.export(run.id, directory, config.dtype)
        self.store.finish_version(version, str(directory))
        return version

    def _directory(self, version: int) -> Path:
        return self.folder / "samplers" / str(version)

    def _link(self, version: int, directory: Path) -> None:
        """Link the directory of this version to `directory`."""
        link = self._directory(version)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.unlink(missing_ok=True)  # may point to a folder that is gone
            link.symlink_to(directory.absolute())

    def _drop_old_versions(self, run: Run) -> None:
        """Drop the run's unnamed versions except the newest `samplers_kept`, and the one that its
        "inflight" samplers use.
        """
        in_use = self.store.run(run.id)
        for version in self.store.ephemeral_versions(run.id)[: -self.config.samplers_kept]:
            if in_use is None or version != in_use.inflight_version:
                self._drop_version(version)

    def _drop_version(self, version: int) -> None:
        self.store.drop_version(version)
        removal = asyncio.ensure_future(self._remove(version, self._directory(version)))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _remove(self, version: int, directory: Path) -> None:
        """Unload a version's adapter, which the generator may read until then, and delete the
        directory.
        """
        await self.generator.unload(version)
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _put(
        self,
        run: Run,
        kind: str,
        name: str,
        directory: Path,
        ttl_seconds: int | None,
        user_metadata: Mapping[str, str] | None,
        version: int | None = None,
    ) -> None:
        """Add a checkpoint, whose files must be complete."""
        self.store.put_checkpoint(
            Checkpoint(
                path=checkpoint_path(run.id, kind, name),
                run_id=run.id,
                owner=run.owner,
                kind=kind,
                name=name,
                directory=str(directory),
                version=version,
                size_bytes=sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()),
                expires=None if ttl_seconds is None else time.time() + ttl_seconds,
                user_metadata=user_metadata,
            )
        )

    def visible_checkpoint(self, owner: str, path: str) -> Checkpoint:
        checkpoint = self.store.checkpoint(path)
        is_visible = checkpoint is not None and (checkpoint.owner == owner or checkpoint.public)
        if checkpoint is None or not is_visible or checkpoint.has_expired(time.time()):
            raise NotFoundError(f"there is no checkpoint {path}")
        return checkpoint

    def copy_weights(self, owner: str, body: messages.CopyWeights) -> Json:
        """Make a run, which cannot be trained, with a copy of a checkpoint in hard links."""
        source = self.visible_checkpoint(owner, body.source_path)
        former = self.store.run(source.run_id)
        if source.kind == "external" or former is None:
            raise UserError(f"{source.path} cannot be copied; only training states and weights for samplers can")
        session_id = body.session_id
        if session_id is None:
            fields = {"tags": ["copy"], "project_id": body.destination_project_id}
            session_id = uuid.uuid4().hex
            self.store.add_session(session_id, owner, fields)
        self.session(owner, session_id)
        run = replace(former, id=f"{session_id}:train:{body.model_seq_id or 0}", session_id=session_id, owner=owner)
        run = replace(run, parked=None, inflight_version=None)
        if self.store.run(run.id) is not None or self._taken[run.id]:
            raise UserError(f"{run.id} exists; give another model_seq_id")
        version = None
        directory = self.folder / "runs" / run.id.replace(":", "_") / "weights" / source.name
        if source.kind == "sampler":
            version = self.store.add_version(run.id, is_ephemeral=False)
            directory = self._directory(version)
        try:
            shutil.copytree(source.directory, directory, copy_function=os.link)
        except OSError:
            shutil.rmtree(directory, ignore_errors=True)  # so that the request can be sent again
            raise
        self.store.add_run(run)
        if version is not None:
            self.store.finish_version(version, str(directory))
        self._put(run, source.kind, source.name, directory, body.ttl_seconds, source.user_metadata, version=version)
        return {"tinker_path": checkpoint_path(run.id, source.kind, source.name)}

    def own_checkpoint(self, owner: str, run_id: str, segment: str, name: str) -> Checkpoint:
        checkpoint = self.store.checkpoint(f"tinker://{run_id}/{segment}/{name}")
        if checkpoint is None or checkpoint.owner != owner:
            raise NotFoundError(f"there is no checkpoint tinker://{run_id}/{segment}/{name}")
        return checkpoint

    def delete_checkpoint(self, owner: str, run_id: str, segment: str, name: str) -> None:
        self._delete(self.own_checkpoint(owner, run_id, segment, name))

    def _delete(self, checkpoint: Checkpoint) -> None:
        self.store.delete_checkpoint(checkpoint.path)
        if checkpoint.version is not None:
            self._drop_version(checkpoint.version)
        else:
            shutil.rmtree(checkpoint.directory, ignore_errors=True)

    def publish(self, owner: str, run_id: str, segment: str, name: str, *, public: bool) -> None:
        self.store.update_checkpoint(self.own_checkpoint(owner, run_id, segment, name).path, public=public)

    def set_ttl(self, owner: str, run_id: str, segment: str, name: str, ttl_seconds: int | None) -> None:
        expires = None if ttl_seconds is None else time.time() + ttl_seconds
        self.store.update_checkpoint(self.own_checkpoint(owner, run_id, segment, name).path, expires=expires)

    # samplers

    def create_sampling_session(self, owner: str, body: messages.CreateSamplingSession) -> Json:
        self.session(owner, body.session_id)
        sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        answer: Json = {"type": "create_sampling_session", "sampling_session_id": sampler_id}
        sampler = self._new_sampler(owner, sampler_id, body)
        former = self.store.sampler(sampler_id)
        if former is not None:
            # the SDK repeats a request whose answer was lost
            if replace(former, created=0.0) != sampler:
                raise UserError(f"{sampler_id} exists; give another sampling_session_seq_id")
            return answer
        if self._taken[sampler_id]:
            raise UserError(f"an earlier call is about to make {sampler_id}; give another sampling_session_seq_id")
        self.store.add_sampler(sampler)
        return answer

    def _new_sampler(self, owner: str, sampler_id: str, body: messages.CreateSamplingSession) -> Sampler:
        if body.model_path is None:
            if body.base_model is None:
                raise ValueError("create_sampling_session needs base_model or model_path")
            self._require_base(body.base_model)
            return Sampler(
                id=sampler_id,
                session_id=body.session_id,
                owner=owner,
                base_model=body.base_model,
                version=self.base_version,
            )
        checkpoint = self.visible_checkpoint(owner, body.model_path)
        run = self.store.run(checkpoint.run_id)
        if checkpoint.version is None or run is None:
            raise UserError(
                f"{body.model_path} holds no weights for a sampler; give a path that save_weights_for_sampler returned"
            )
        return Sampler(
            id=sampler_id,
            session_id=body.session_id,
            owner=owner,
            base_model=run.base_model,
            model_path=body.model_path,
            run_id=run.id,
            version=checkpoint.version,
        )

    def sampler(self, owner: str, sampler_id: str) -> Sampler:
        sampler = self.store.sampler(sampler_id)
        if sampler is None or sampler.owner != owner:
            raise NotFoundError(f"there is no sampler {sampler_id}")
        return sampler

    def sample(self, owner: str, body: messages.SampleRequest) -> Promise:
        """Raises ValueError without a sampling session, which SDK 0.38 always names."""
        if body.sampling_session_id is None or body.seq_id is None:
            raise ValueError("asample needs sampling_session_id and seq_id")
        sampler_id = body.sampling_session_id
        seq_id = body.seq_id
        if body.num_samples > self.config.max_samples:
            raise ValueError(f"num_samples={body.num_samples}; it must be at most {self.config.max_samples}")

        fault = self._fault_of_sizes(body)

        async def fail() -> Answer:
            raise ValueError(fault)

        async def work() -> Answer:
            sampler = self.sampler(owner, sampler_id)
            wanted = await beside(body.num_bytes, self.sampling.read, body)
            wanted.require_small_answer(self.config.max_answer_bytes)
            async with self._weights_of(sampler) as weights:
                answer, num_tokens = await wanted.run(weights)
            self.num_sampled_tokens += num_tokens
            return Answer(proto=answer)

        ids = [f"{sampler_id}:{seq_id}:{index}" for index in range(body.num_samples)]
        key = ("sample", sampler_id, seq_id)
        extra: Json = {"sample_sequence_ids": ids}
        if fault:  # the body is not kept until its turn
            return self.futures.submit(key, "sample", fail, extra, owner=owner)
        return self.futures.submit(key, "sample", work, extra, owner=owner, num_bytes=body.num_bytes)

    def _fault_of_sizes(self, body: messages.SampleRequest) -> str:
        """Why the body is larger than any request can be, else ""."""
        num_tokens = sum(len(chunk.tokens or ()) for chunk in body.prompt.chunks)
        longest = self.sampling.max_model_len
        if num_tokens > longest:
            return f"the prompt has {num_tokens} tokens; max_model_len={longest}"
        cells = len(body.target_prompt_logprobs.data) if body.target_prompt_logprobs is not None else 0
        if cells > (most := longest * MAX_TOP_LOGPROBS):
            return f"target_prompt_logprobs has {cells} cells; at most {most} are allowed: {MAX_TOP_LOGPROBS} at each position"
        return ""

    def _weights_of(self, sampler: Sampler) -> AbstractAsyncContextManager[Weights]:
        """Hold the weights that the sampler uses now. Raises UserError if they were dropped."""
        version = sampler.version
        if sampler.kind == "inflight":
            run = self.store.run(sampler.run_id or "")
            assert run is not None and run.inflight_version is not None
            version = run.inflight_version
        directory = self.store.directory_of(version)
        if directory is None:
            raise UserError(
                f"the weights of sampler {sampler.id} were dropped; weights with a name are dropped when they are "
                "deleted or expire; weights without a name are dropped when the run has saved "
                f"{self.config.samplers_kept} newer ones (samplers_kept), or when the session has sent no heartbeat "
                f"for {SILENT_SECONDS / 3600:g} hours"
            )
        if adapters.is_adapter(Path(directory)):
            return self.generator.using_adapter(version, directory, base=self.base_version)
        return self.generator.using(version)


def is_abandoned(store: Store, run: Run) -> bool:
    """As Server.is_abandoned."""
    session = store.session(run.session_id)
    if session is None or session["finished"]:
        return True
    return time.time() - max(session["last_seen"], run.last_request) > ABANDONED_SECONDS


def _key(run_id: str, seq_id: int | None) -> tuple[str, str, int] | None:
    """By which a repeated request to a run is recognised; None without seq_id."""
    return ("run", run_id, seq_id) if seq_id else None


def _lora_of(lora: messages.Lora) -> dict[str, Any]:
    values = lora.model_dump()
    if values["seed"] is None:
        values["seed"] = random.SystemRandom().randrange(1 << 31)
    return values


def _optim_params(body: messages.OptimStep) -> OptimParams:
    """Raises UserError for an optimizer that is not AdamW."""
    if body.adam_params is None:
        kind = (body.optimizer_params or {}).get("type")
        raise UserError(f"optimizer_params of type {kind!r}; this server has only AdamW, whose field is adam_params")
    values = body.adam_params.model_dump()
    clip = values.pop("grad_clip_norm")
    return OptimParams(**values, grad_clip_norm=clip if clip > 0 else None, grad_divisor=1.0)
