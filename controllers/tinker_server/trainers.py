"""The trainers of a server's training runs, each for the runs whose adapters have the same rank and
layers, or for one run of all weights (rank 0).

At most max_trainers are in memory, with at most max_tenants runs each; the states of other runs
wait on disk. Requests to a run are done in the order of arrival.
"""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from controllers.tinker_server.config import ServeConfig
from controllers.tinker_server.futures import UserError
from controllers.tinker_server.samples import Batch
from controllers.tinker_server.store import Run, Store
from rl_actors import OptimParams, TrainerConfig
from rl_actors.clients.base import ActorDiedError
from rl_actors.clients.training import SavedCheckpoint
from rl_actors.config import LoRAConfig
from rl_actors.losses import Loss
from rl_actors.types import ForwardBackwardOutput, OptimResult, Sample

logger = logging.getLogger(__name__)


Shape = tuple[tuple[str, int | bool], ...]
"""A run's LoRA rank and layers: the sorted items of `Run.lora`, without the seed."""


class Calls(Protocol):
    """The methods of TenantClient that a server calls for a run."""

    def ready(self) -> Awaitable[None]: ...
    def forward(self, samples: Sequence[Sample], loss: Loss) -> Awaitable[ForwardBackwardOutput]: ...
    def forward_backward(self, samples: Sequence[Sample], loss: Loss) -> Awaitable[ForwardBackwardOutput]: ...
    def optim_step(self, params: OptimParams) -> Awaitable[OptimResult]: ...
    def discard_gradients(self) -> Awaitable[None]: ...
    def save_checkpoint(self, path: str, *, optimizer: bool = True) -> Awaitable[SavedCheckpoint]: ...
    def load_checkpoint(self, path: str, *, optimizer: bool = True) -> Awaitable[int]: ...
    def export_hf(self, path: str, dtype: Literal["float32", "bfloat16"] = "float32") -> Awaitable[None]: ...
    def export_lora(self, path: str) -> Awaitable[None]: ...
    def close(self) -> Awaitable[None]: ...


class Trainer(Calls, Protocol):
    """The methods of TrainerClient that a server calls. tests/fakes.py has a fake."""

    def new_tenant(self, name: str, *, seed: int = 0) -> Calls: ...


@dataclass(slots=True, kw_only=True, eq=False)
class LoadedTrainer:
    """A trainer in memory, and its runs."""

    trainer: Trainer
    shape: Shape | None  # of all its runs' adapters; None: its only run has rank 0
    runs: "dict[str, LoadedRun]" = field(default_factory=dict)

    def calls_of(self, run: Run) -> Calls:
        """What trains a new run: the trainer or a new tenant. Raises ValueError if it cannot be
        added.
        """
        return self.trainer if self.shape is None else self.trainer.new_tenant(run.id, seed=run.lora["seed"])


@dataclass(slots=True, kw_only=True, eq=False)
class LoadedRun:
    """A run in a trainer in memory."""

    run: Run
    home: LoadedTrainer
    calls: Calls | None = None  # None while the run is being started
    used: float = field(default_factory=time.monotonic)  # last request, time.monotonic
    has_gradients: bool = False  # accumulated by forward_backward, not yet used by optim_step

    @property
    def trainer(self) -> Calls:
        assert self.calls is not None
        return self.calls


class Trainers:
    def __init__(
        self,
        config: ServeConfig,
        store: Store,
        folder: Path,
        *,
        spawn: Callable[[TrainerConfig], Trainer],
        is_abandoned: Callable[[Run], bool],
    ) -> None:
        """folder: of the states on disk. is_abandoned: whether a run's client is gone."""
        self.config = config
        self.store = store
        self.folder = folder
        self._spawn = spawn
        self._is_abandoned = is_abandoned
        self.residents: dict[str, LoadedRun] = {}
        self.homes: list[LoadedTrainer] = []
        self._turns: dict[str, asyncio.Lock] = {}
        self._placing = asyncio.Lock()

    def _turn(self, run_id: str) -> asyncio.Lock:
        return self._turns.setdefault(run_id, asyncio.Lock())

    async def create(self, run: Run, checkpoint: str | None = None, *, optimizer: bool = False) -> None:
        """Add a new run, from a checkpoint if given (optimizer: with its state). Starts a trainer
        if necessary.

        Raises ValueError if no trainer can be built or the checkpoint is of another model,
        UserError if max_trainers or max_tenants is reached and no other run may go to disk.
        """
        async with self._turn(run.id):
            await self._start(run, checkpoint, optimizer=optimizer)

    @contextlib.asynccontextmanager
    async def using(self, run_id: str) -> AsyncIterator[LoadedRun]:
        """Yield the run for one request, after the earlier ones, loaded from disk if necessary.
        Raises UserError if it is unknown, lost, or finds no room.
        """
        async with self._turn(run_id):
            resident = self.residents.get(run_id) or await self._reload(run_id)
            resident.used = time.monotonic()
            self.store.update_run(run_id, last_request=time.time())
            async with self._noticing_death(resident):
                yield resident

    @contextlib.asynccontextmanager
    async def _noticing_death(self, resident: LoadedRun) -> AsyncIterator[None]:
        """On ActorDiedError forget the trainer, and raise RuntimeError naming the run's last saved
        state.
        """
        try:
            yield
        except ActorDiedError as error:
            await self._forget(resident.home)
            raise RuntimeError(self._ended(resident.run.id, error)) from error

    def _ended(self, run_id: str, error: Exception) -> str:
        return f"the training run {run_id} has ended: {error}; {self._last_saved(run_id)}"

    async def _reload(self, run_id: str) -> LoadedRun:
        run = self.store.run(run_id)
        if run is None:
            raise UserError(f"there is no training run {run_id}")
        if run.parked is None:
            raise UserError(f"the training run {run_id} has ended; {self._last_saved(run_id)}")
        resident = await self._start(run, run.parked, optimizer=True)
        self.store.update_run(run_id, parked=None)
        await asyncio.to_thread(shutil.rmtree, run.parked, ignore_errors=True)
        return resident

    def _last_saved(self, run_id: str) -> str:
        saved = [checkpoint for checkpoint in self.store.checkpoints(run_id=run_id) if checkpoint.kind == "training"]
        if not saved:
            return "it saved no state"
        return f"its last saved state is {saved[0].path}, from which create_training_client_from_state_with_optimizer continues"

    async def _start(self, run: Run, checkpoint: str | None, *, optimizer: bool) -> LoadedRun:
        resident = await self._place(run)
        try:
            async with self._noticing_death(resident):
                await resident.home.trainer.ready()
                resident.calls = resident.home.calls_of(run)
                await resident.calls.ready()
                if checkpoint is not None:
                    await resident.calls.load_checkpoint(checkpoint, optimizer=optimizer)
        except BaseException:
            await self._remove(resident)
            raise
        return resident

    async def _place(self, run: Run) -> LoadedRun:
        """Add a run to the trainer for its shape, or a new one, parking the least recently used.
        The caller holds the run's lock.
        """
        shape = _shape_of(run)
        async with self._placing:
            home = next((each for each in self.homes if shape is not None and each.shape == shape), None)
            if home is None:
                await self._make_room()
                home = LoadedTrainer(trainer=self._spawn(self._config_of(shape)), shape=shape)
                self.homes.append(home)
            resident = self.residents[run.id] = home.runs[run.id] = LoadedRun(run=run, home=home)
            try:
                while len(home.runs) > self.config.max_tenants:
                    await self._evict(self._least_needed(home))
            except BaseException:
                await self._remove(resident)
                raise
            return resident

    def _config_of(self, shape: Shape | None) -> TrainerConfig:
        adapters = LoRAConfig() if shape is None else LoRAConfig(alpha=self.config.lora_alpha, **dict(shape))  # type: ignore[arg-type]
        return replace(self.config.trainer, lora=adapters)

    async def _make_room(self) -> None:
        """Make room for a new trainer: at max_trainers, park the runs of the least recently used
        one, which ends it.
        """
        while len(self.homes) >= self.config.max_trainers:
            for resident in list(self._least_needed_home().runs.values()):
                await self._evict(resident)

    def _least_needed_home(self) -> LoadedTrainer:
        """The least recently used trainer whose runs may all go to disk. Raises UserError if there
        is none.
        """
        idle = [home for home in self.homes if all(self._may_go(resident) for resident in home.runs.values())]
        if not idle:
            raise UserError(
                f"max_trainers={self.config.max_trainers}: every trainer in memory has a run that is at work, or that has gradients and "
                "waits for its optim_step; try again later, or start the server with a larger --max-trainers"
            )
        return min(idle, key=_last_use)

    def _least_needed(self, home: LoadedTrainer) -> LoadedRun:
        """The least recently used run of a trainer that may go to disk. Raises UserError if there
        is none.
        """
        idle = [resident for resident in home.runs.values() if self._may_go(resident)]
        if not idle:
            raise UserError(
                f"max_tenants={self.config.max_tenants}: every run with adapters of the same rank and layers is at work, or has gradients and "
                "waits for its optim_step; try again later, or start the server with a larger --max-tenants"
            )
        return min(idle, key=lambda resident: resident.used)

    def _may_go(self, resident: LoadedRun) -> bool:
        """True if no request of the run is at work, and it has no gradients or no client."""
        is_free = not resident.has_gradients or self._is_abandoned(resident.run)
        return is_free and not self._turn(resident.run.id).locked()

    async def _remove(self, resident: LoadedRun) -> None:
        """Take a run out of its trainer, and end a trainer without runs."""
        home = resident.home
        run_id = resident.run.id
        if home.runs.pop(run_id, None) is None:
            return  # the trainer has died
        self.residents.pop(run_id, None)
        if not home.runs:
            self.homes.remove(home)
            await home.trainer.close()
        elif resident.calls is not None:
            await resident.calls.close()

    async def _forget(self, home: LoadedTrainer) -> None:
        """Forget and close a trainer, perhaps dead, with all its runs."""
        if home not in self.homes:
            return
        self.homes.remove(home)
        for run_id in home.runs:
            self.residents.pop(run_id, None)
        home.runs.clear()
        with contextlib.suppress(Exception):
            await home.trainer.close()

    async def _evict(self, resident: LoadedRun, *, must_end: bool = False) -> None:
        """Write a run's state to disk and take it out of its trainer, until its next request.

        A run with gradients stays, unless must_end or its client is gone: then they are dropped. If
        the trainer has died, all its runs are lost.
        """
        run = resident.run
        async with self._turn(run.id):
            if self.residents.get(run.id) is not resident:
                return  # its trainer died before this call got the lock
            if resident.has_gradients and not (must_end or self._is_abandoned(run)):
                return  # of a forward_backward before this call got the lock
            try:
                directory = await self._write(resident)
            except ActorDiedError as error:
                logger.exception("%s", self._ended(run.id, error))
                await self._forget(resident.home)
                return
            self.store.update_run(run.id, parked=str(directory))
            await self._remove(resident)
            logger.info("the training run %s waits on disk for its next request", run.id)

    async def _write(self, resident: LoadedRun) -> Path:
        """Drop the gradients, write the state, and return its directory."""
        if resident.has_gradients:
            await resident.trainer.discard_gradients()
            resident.has_gradients = False
        directory = self.folder / resident.run.id.replace(":", "_")
        saved = await resident.trainer.save_checkpoint(str(directory), optimizer=True)
        await saved.wait()
        return directory

    async def forward(self, run_id: str, batch: Batch) -> ForwardBackwardOutput:
        async with self.using(run_id) as resident:
            return batch.merged([await resident.trainer.forward(group, batch.loss) for group in batch.groups])

    async def forward_backward(self, run_id: str, batch: Batch) -> ForwardBackwardOutput:
        """Raises ValueError or TypeError for refused input, keeping earlier gradients; RuntimeError
        for a failure in the trainer, dropping all since the last optim_step.
        """
        async with self.using(run_id) as resident:
            had_gradients = resident.has_gradients
            # before the call, which the trainer finishes even if this coroutine is cancelled
            resident.has_gradients = True
            outputs: list[ForwardBackwardOutput] = []
            try:
                for group in batch.groups:
                    outputs.append(await resident.trainer.forward_backward(group, batch.loss))
            except Exception as error:
                if isinstance(error, ValueError | TypeError) and not outputs:
                    resident.has_gradients = had_gradients
                    raise  # refused: nothing has changed
                await self._mend(resident, error)
                raise RuntimeError(f"{error}; the gradients since the last optim_step are dropped") from error
            return batch.merged(outputs)

    async def _mend(self, resident: LoadedRun, error: Exception) -> None:
        """Drop the gradients after a failed call. If that fails, remove the run and raise
        RuntimeError.
        """
        try:
            await resident.trainer.discard_gradients()
            resident.has_gradients = False
        except Exception:
            try:
                await self._remove(resident)
            except Exception:  # then all runs of the trainer are lost
                await self._forget(resident.home)
            raise RuntimeError(self._ended(resident.run.id, error)) from error

    async def optim_step(self, run_id: str, params: OptimParams) -> OptimResult:
        async with self.using(run_id) as resident:
            if not resident.has_gradients:
                raise UserError("no gradients are accumulated; optim_step comes after forward_backward")
            result = await resident.trainer.optim_step(params)
            resident.has_gradients = False
            return result

    async def save(self, run_id: str, directory: Path) -> None:
        """Write weights, optimizer state and policy_version; returns when they are on disk."""
        async with self.using(run_id) as resident:
            require_no_gradients(resident)
            saved = await resident.trainer.save_checkpoint(str(directory), optimizer=True)
            await saved.wait()

    async def load(self, run_id: str, directory: str, *, optimizer: bool) -> None:
        async with self.using(run_id) as resident:
            require_no_gradients(resident)
            await resident.trainer.load_checkpoint(directory, optimizer=optimizer)

    async def export(self, run_id: str, directory: Path, dtype: Literal["float32", "bfloat16"]) -> None:
        """Write a Hugging Face directory, with adapters merged."""
        async with self.using(run_id) as resident:
            await resident.trainer.export_hf(str(directory), dtype)

    async def export_adapter(self, run_id: str, directory: Path) -> None:
        """Write the adapters, without the base weights."""
        async with self.using(run_id) as resident:
            await resident.trainer.export_lora(str(directory))

    def sweep(self, now: float) -> None:
        """Delete states on disk of runs whose client is gone: older than keep_parked_hours, or the
        least recently used above max_parked_bytes.
        """
        parked = self.store.parked_runs()
        sizes = {run.id: _size_of(Path(run.parked or "")) for run in parked}
        oldest = now - self.config.keep_parked_hours * 3600
        for run in parked:
            is_too_much = sum(sizes.values()) > self.config.max_parked_bytes
            if self._turn(run.id).locked() or not (run.last_request < oldest or is_too_much):
                continue
            if self._is_abandoned(run):
                logger.info("the state of the training run %s is deleted from disk: its client is gone", run.id)
                self.store.update_run(run.id, parked=None)
                shutil.rmtree(run.parked or "", ignore_errors=True)
                del sizes[run.id]

    def sweep_unnamed(self) -> None:
        """Delete folders of no run, left by a killed server. Only before the first request."""
        named = {Path(run.parked or "").name for run in self.store.parked_runs()}
        for folder in self.folder.glob("*"):
            if folder.name not in named:
                shutil.rmtree(folder, ignore_errors=True)

    async def close(self) -> None:
        """Write all runs to disk, without unused gradients, and end their trainers."""
        for resident in list(self.residents.values()):
            try:
                await self._evict(resident, must_end=True)
            except Exception:
                logger.exception(
                    "the state of the training run %s could not be written to disk; its saved checkpoints are still there",
                    resident.run.id,
                )
        for home in list(self.homes):
            await self._forget(home)


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _shape_of(run: Run) -> Shape | None:
    """None for LoRA rank 0."""
    return (
        tuple(sorted((name, value) for name, value in run.lora.items() if name != "seed")) if run.lora["rank"] else None
    )


def _last_use(home: LoadedTrainer) -> float:
    return max(resident.used for resident in home.runs.values())


def require_no_gradients(resident: LoadedRun) -> None:
    """Raises UserError if a run has gradients, which a checkpoint cannot hold."""
    if resident.has_gradients:
        raise UserError("forward_backward has accumulated gradients; call optim_step before you save or load a state")
