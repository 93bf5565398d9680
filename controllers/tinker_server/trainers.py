"""The trainers of a server's training runs, each for the runs whose adapters have the same rank and
layers, or for one run of all weights (rank 0). The states of other runs wait on disk.
"""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from controllers.tinker_server.config import ServeConfig
from controllers.tinker_server.futures import UserError
from controllers.tinker_server.samples import Batch
from controllers.tinker_server.store import Checkpoint, Session, Store, TrainingRun
from rl_actors import TrainerClient, TrainerConfig
from rl_actors.clients.base import ActorDiedError
from rl_actors.clients.training import TenantClient
from rl_actors.config import LoRAConfig
from rl_actors.types import ForwardBackwardOutput

logger = logging.getLogger(__name__)

ABANDONED_SECONDS = 120.0
"""A run's client is gone after this long without heartbeat of its session or request to the run."""
Spawn = Callable[[TrainerConfig], TrainerClient]


@dataclass(slots=True, kw_only=True, eq=False)
class LoadedTrainer:
    client: TrainerClient
    lora: LoRAConfig  # of all its runs' adapters; with rank 0 it has only one run
    runs: "dict[str, LoadedRun]" = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class LoadedRun:
    run: TrainingRun
    home: LoadedTrainer
    client: TrainerClient | TenantClient  # the trainer's until the run is a tenant of it
    used: float = field(default_factory=time.monotonic)  # last request, time.monotonic
    has_gradients: bool = False  # accumulated by forward_backward, not yet used by optim_step

    async def discard_gradients(self) -> None:
        await self.client.discard_gradients()
        self.has_gradients = False

    async def save(self, directory: Path) -> None:
        """Write weights, optimizer state and policy_version; returns when they are on disk."""
        self.require_no_gradients()
        saved = await self.client.save_checkpoint(str(directory), optimizer=True)
        await saved.wait()

    def require_no_gradients(self) -> None:
        """Raises UserError if the run has gradients, which a checkpoint cannot hold."""
        if self.has_gradients:
            raise UserError(
                "forward_backward has accumulated gradients; call optim_step before you save or load a state"
            )


class Trainers:
    def __init__(self, config: ServeConfig, store: Store, folder: Path, spawn: Spawn) -> None:
        self.config = config
        self.store = store
        self.folder = folder  # of the states on disk
        self._spawn = spawn
        self.homes: list[LoadedTrainer] = []
        self._turns: dict[str, asyncio.Lock] = {}
        self._placing = asyncio.Lock()

    @property
    def residents(self) -> dict[str, LoadedRun]:
        """The runs in memory, by id."""
        return {run_id: resident for home in self.homes for run_id, resident in home.runs.items()}

    def _turn(self, run_id: str) -> asyncio.Lock:
        return self._turns.setdefault(run_id, asyncio.Lock())

    async def create(self, run: TrainingRun, checkpoint: str | None = None, *, optimizer: bool = False) -> None:
        """Add a new run, from a checkpoint if given. ValueError: no trainer can be built, or the
        checkpoint is of another model. UserError: there is no room.
        """
        async with self._turn(run.id):
            await self._start(run, checkpoint, optimizer=optimizer)

    @contextlib.asynccontextmanager
    async def using(self, run_id: str) -> AsyncIterator[LoadedRun]:
        """Yield the run for one request, after the earlier ones. UserError: lost, or no room."""
        async with self._turn(run_id):
            resident = self.residents.get(run_id) or await self._reload(run_id)
            resident.used = time.monotonic()
            self.store.update(TrainingRun, run_id, last_request=time.time())
            async with self._noticing_death(resident):
                yield resident

    @contextlib.asynccontextmanager
    async def _noticing_death(self, resident: LoadedRun) -> AsyncIterator[None]:
        """On ActorDiedError forget the trainer, and raise RuntimeError naming the last saved state."""
        try:
            yield
        except ActorDiedError as error:
            await self._forget(resident.home)
            raise RuntimeError(self._ended(resident.run.id, f": {error}")) from error

    def _ended(self, run_id: str, reason: str = "") -> str:
        saved = self.store.find(Checkpoint, limit=1, run_id=run_id, kind="training")
        last = "it saved no state"
        if saved:
            last = f"its last saved state is {saved[0].path}, from which create_training_client_from_state_with_optimizer continues"
        return f"the training run {run_id} has ended{reason}; {last}"

    async def _reload(self, run_id: str) -> LoadedRun:
        run = self.store.get(TrainingRun, run_id)
        if run is None or run.parked is None:
            raise UserError(self._ended(run_id))
        resident = await self._start(run, run.parked, optimizer=True)
        self.store.update(TrainingRun, run_id, parked=None)
        await asyncio.to_thread(shutil.rmtree, run.parked, ignore_errors=True)
        return resident

    async def _start(self, run: TrainingRun, checkpoint: str | None, *, optimizer: bool) -> LoadedRun:
        resident = await self._place(run)
        try:
            async with self._noticing_death(resident):
                trainer = resident.home.client
                await trainer.ready()
                if resident.home.lora.rank:
                    resident.client = trainer.new_tenant(run.id, seed=run.lora["seed"])
                    await resident.client.ready()
                if checkpoint is not None:
                    await resident.client.load_checkpoint(checkpoint, optimizer=optimizer)
        except BaseException:
            await self._remove(resident)
            raise
        return resident

    async def _place(self, run: TrainingRun) -> LoadedRun:
        """Add a run to a trainer, parking the least recently used. The caller holds its lock."""
        lora = LoRAConfig()
        if run.lora["rank"]:
            layers = {name: value for name, value in run.lora.items() if name != "seed"}
            lora = LoRAConfig(alpha=self.config.lora_alpha, **layers)
        async with self._placing:
            home = next((each for each in self.homes if lora.rank and each.lora == lora), None)
            if home is None:
                while len(self.homes) >= self.config.max_trainers:
                    full = f"max_trainers={self.config.max_trainers}: every trainer in memory has a run that"
                    await self._evict_one([list(each.runs.values()) for each in self.homes], full, "--max-trainers")
                home = LoadedTrainer(client=self._spawn(replace(self.config.trainer, lora=lora)), lora=lora)
                self.homes.append(home)
            resident = home.runs[run.id] = LoadedRun(run=run, home=home, client=home.client)
            try:
                while len(home.runs) > self.config.max_tenants:
                    full = f"max_tenants={self.config.max_tenants}: every run with adapters of the same rank and layers"
                    await self._evict_one([[each] for each in home.runs.values()], full, "--max-tenants")
            except BaseException:
                await self._remove(resident)
                raise
            return resident

    async def _evict_one(self, groups: list[list[LoadedRun]], full: str, flag: str) -> None:
        """Of the groups whose runs may all go to disk, the least recently used. UserError: none may."""
        idle = [group for group in groups if all(map(self._may_go, group))]
        if not idle:
            raise UserError(
                f"{full} is at work, or has gradients and waits for its optim_step; "
                f"try again later, or start the server with a larger {flag}"
            )
        for resident in min(idle, key=lambda group: max(resident.used for resident in group)):
            await self._evict(resident)

    def _may_go(self, resident: LoadedRun) -> bool:
        """True if no request of the run is at work, and it has no gradients or no client."""
        is_free = not resident.has_gradients or self._is_abandoned(resident.run)
        return is_free and not self._turn(resident.run.id).locked()

    def _is_abandoned(self, run: TrainingRun) -> bool:
        """True if the run's session is finished, or silent for ABANDONED_SECONDS."""
        session = self.store.get(Session, run.session_id)
        if session is None or session.finished:
            return True
        return time.time() - max(session.last_seen, run.last_request) > ABANDONED_SECONDS

    async def _remove(self, resident: LoadedRun) -> None:
        """Take a run out of its trainer, and end a trainer without runs."""
        home = resident.home
        if home.runs.pop(resident.run.id, None) is None:
            return  # the trainer has died
        if not home.runs:
            self.homes.remove(home)
            await home.client.close()
        elif resident.client is not home.client:
            await resident.client.close()

    async def _forget(self, home: LoadedTrainer) -> None:
        """Forget and close a trainer, perhaps dead, with all its runs."""
        if home not in self.homes:
            return
        self.homes.remove(home)
        home.runs.clear()
        with contextlib.suppress(Exception):
            await home.client.close()

    async def _evict(self, resident: LoadedRun, *, must_end: bool = False) -> None:
        """Write a run's state to disk, and take it out of its trainer until its next request."""
        run = resident.run
        async with self._turn(run.id):
            if self.residents.get(run.id) is not resident:
                return  # its trainer died before this call got the lock
            if resident.has_gradients and not (must_end or self._is_abandoned(run)):
                return  # gradients of a forward_backward before this call got the lock
            directory = self.folder / run.id.replace(":", "_")
            try:
                if resident.has_gradients:
                    await resident.discard_gradients()
                await resident.save(directory)
            except ActorDiedError as error:
                logger.exception("%s", self._ended(run.id, f": {error}"))
                await self._forget(resident.home)
                return
            self.store.update(TrainingRun, run.id, parked=str(directory))
            await self._remove(resident)
            logger.info("the training run %s waits on disk for its next request", run.id)

    async def forward_backward(self, run_id: str, batch: Batch) -> ForwardBackwardOutput:
        """ValueError or TypeError: refused input. RuntimeError: a failure, which drops the gradients."""
        async with self.using(run_id) as resident:
            had_gradients = resident.has_gradients
            # before the call, which the trainer finishes even if this coroutine is cancelled
            resident.has_gradients = True
            outputs: list[ForwardBackwardOutput] = []
            try:
                for group in batch.groups:
                    outputs.append(await resident.client.forward_backward(group, batch.loss))
            except Exception as error:
                if isinstance(error, ValueError | TypeError) and not outputs:
                    resident.has_gradients = had_gradients
                    raise  # refused: nothing has changed
                await self._mend(resident, error)
                raise RuntimeError(f"{error}; the gradients since the last optim_step are dropped") from error
            return batch.merged(outputs)

    async def _mend(self, resident: LoadedRun, error: Exception) -> None:
        """Drop the gradients after a failed call, or else remove the run and raise RuntimeError."""
        try:
            await resident.discard_gradients()
        except Exception:
            try:
                await self._remove(resident)
            except Exception:  # then all runs of the trainer are lost
                await self._forget(resident.home)
            raise RuntimeError(self._ended(resident.run.id, f": {error}")) from error

    def sweep(self, now: float) -> None:
        """Delete states above the limits of age and size, of runs whose client is gone."""
        parked = self.store.parked_runs()
        sizes = {run.id: size_of(Path(run.parked or "")) for run in parked}
        oldest = now - self.config.keep_parked_hours * 3600
        for run in parked:
            is_too_much = sum(sizes.values()) > self.config.max_parked_bytes
            if self._turn(run.id).locked() or not (run.last_request < oldest or is_too_much):
                continue
            if self._is_abandoned(run):
                logger.info("the state of the training run %s is deleted from disk: its client is gone", run.id)
                self.store.update(TrainingRun, run.id, parked=None)
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
                text = "the state of the training run %s could not be written to disk; its saved checkpoints are still there"
                logger.exception(text, resident.run.id)
        for home in list(self.homes):
            await self._forget(home)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
