"""The trainers of a server's training runs. A run trains LoRA adapters over the base weights, or all weights if its LoRA rank is 0. Runs whose
adapters have the same shape (LoRA rank and layers) are tenants of one trainer: they share the base weights of this trainer. A run of rank 0
has a trainer of its own.

At most max_trainers trainers are in memory, with at most max_tenants runs each. The state of the other runs waits on disk. The requests to a
run are done one after the other, in the order of their arrival. A trainer executes one request at a time.
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
from rl_actors.clients.model_calls import SavedCheckpoint
from rl_actors.config import LoRAConfig
from rl_actors.losses import Loss
from rl_actors.types import ForwardBackwardOutput, OptimResult, Sample

logger = logging.getLogger(__name__)


Shape = tuple[tuple[str, int | bool], ...]
"""The LoRA rank of a run, and the layers that have adapters: the sorted (name, value) pairs of `Run.lora`, without the seed."""


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
    """The methods of TrainerClient that a server calls. tests/fakes.py has an implementation without a model."""

    def new_tenant(self, name: str, *, seed: int = 0) -> Calls: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Home:
    """A trainer in memory, and its runs."""

    trainer: Trainer
    shape: Shape | None  # shape that the adapters of all its runs have; None: its only run has LoRA rank 0
    runs: "dict[str, Resident]" = field(default_factory=dict)

    def calls_of(self, run: Run) -> Calls:
        """The object whose methods train a new run: the trainer itself, or a new tenant. Raises ValueError if the trainer cannot add the tenant."""
        return self.trainer if self.shape is None else self.trainer.new_tenant(run.id, seed=run.lora["seed"])


@dataclass(slots=True, kw_only=True, eq=False)
class Resident:
    """A run whose state is in a trainer in memory."""

    run: Run
    home: Home
    calls: Calls | None = None  # None while the run is being started
    used: float = field(default_factory=time.monotonic)  # time.monotonic of the run's last request
    has_gradients: bool = False  # True: forward_backward has accumulated gradients that no optim_step has used yet

    @property
    def trainer(self) -> Calls:
        assert self.calls is not None
        return self.calls


class Trainers:
    """The trainers of a server's runs."""

    def __init__(
        self,
        config: ServeConfig,
        store: Store,
        folder: Path,
        *,
        spawn: Callable[[TrainerConfig], Trainer],
        is_abandoned: Callable[[Run], bool],
    ) -> None:
        """folder: the folder for the state of runs that wait on disk. is_abandoned: a function that returns True if the client of a run is gone."""
        self.config, self.store, self.folder = config, store, folder
        self._spawn, self._is_abandoned = spawn, is_abandoned
        self.residents: dict[str, Resident] = {}
        self.homes: list[Home] = []
        self._turns: dict[str, asyncio.Lock] = {}
        self._placing = asyncio.Lock()

    def _turn(self, run_id: str) -> asyncio.Lock:
        return self._turns.setdefault(run_id, asyncio.Lock())

    async def create(self, run: Run, checkpoint: str | None = None, *, optimizer: bool = False) -> None:
        """Add a new run to a trainer, and start the trainer if necessary. If a checkpoint is given, the run begins with the checkpoint's weights.

        optimizer: True if the run also begins with the checkpoint's optimizer state. Raises ValueError if no trainer can be built for the run,
        or if the checkpoint holds another model. Raises UserError if max_trainers or max_tenants is reached and no other run may go to disk.
        """
        async with self._turn(run.id):
            await self._start(run, checkpoint, optimizer=optimizer)

    @contextlib.asynccontextmanager
    async def using(self, run_id: str) -> AsyncIterator[Resident]:
        """Context manager for one request to a run. It waits until the earlier requests to the run have ended, loads the run's state if this
        state waits on disk, and yields the run. Raises UserError if the run is unknown, if its state is lost, or if no trainer has room for it."""
        async with self._turn(run_id):
            resident = self.residents.get(run_id) or await self._revive(run_id)
            resident.used = time.monotonic()
            self.store.update_run(run_id, last_request=time.time())
            async with self._noticing_death(resident):
                yield resident

    @contextlib.asynccontextmanager
    async def _noticing_death(self, resident: Resident) -> AsyncIterator[None]:
        """Context manager for calls to the trainer of a run. If the `with` block raises ActorDiedError, the context manager forgets the trainer, and
        raises a RuntimeError that names the last saved state of the run."""
        try:
            yield
        except ActorDiedError as error:
            await self._lose(resident.home)
            raise RuntimeError(self._ended(resident.run.id, error)) from error

    def _ended(self, run_id: str, error: Exception) -> str:
        return f"the training run {run_id} has ended: {error}; {self._last_saved(run_id)}"

    async def _revive(self, run_id: str) -> Resident:
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

    async def _start(self, run: Run, checkpoint: str | None, *, optimizer: bool) -> Resident:
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

    async def _place(self, run: Run) -> Resident:
        """Add a run to the trainer for its shape, or to a new trainer. If max_trainers or max_tenants is reached, the least recently used runs go
        to disk. The caller holds the lock of the run (`_turn`)."""
        shape = _shape_of(run)
        async with self._placing:
            home = next((each for each in self.homes if shape is not None and each.shape == shape), None)
            if home is None:
                await self._make_room()
                home = Home(trainer=self._spawn(self._config_of(shape)), shape=shape)
                self.homes.append(home)
            resident = self.residents[run.id] = home.runs[run.id] = Resident(run=run, home=home)
            try:
                while len(home.runs) > self.config.max_tenants:
                    await self._park(self._least_needed(home))
            except BaseException:
                await self._remove(resident)
                raise
            return resident

    def _config_of(self, shape: Shape | None) -> TrainerConfig:
        adapters = LoRAConfig() if shape is None else LoRAConfig(alpha=self.config.lora_alpha, **dict(shape))  # type: ignore[arg-type]
        return replace(self.config.trainer, lora=adapters)

    async def _make_room(self) -> None:
        """Make room for a new trainer. If max_trainers is reached, the runs of the least recently used trainer go to disk, and this trainer ends."""
        while len(self.homes) >= self.config.max_trainers:
            for resident in list(self._least_needed_home().runs.values()):
                await self._park(resident)

    def _least_needed_home(self) -> Home:
        """The least recently used trainer among those whose runs may all go to disk. Raises UserError if there is no such trainer."""
        idle = [home for home in self.homes if all(self._may_go(resident) for resident in home.runs.values())]
        if not idle:
            raise UserError(
                f"max_trainers={self.config.max_trainers}: every trainer in memory has a run that is at work, or that has gradients and "
                "waits for its optim_step; try again later, or start the server with a larger --max-trainers"
            )
        return min(idle, key=_last_use)

    def _least_needed(self, home: Home) -> Resident:
        """The trainer's least recently used run among those that may go to disk. Raises UserError if there is no such run."""
        idle = [resident for resident in home.runs.values() if self._may_go(resident)]
        if not idle:
            raise UserError(
                f"max_tenants={self.config.max_tenants}: every run with adapters of the same rank and layers is at work, or has gradients and "
                "waits for its optim_step; try again later, or start the server with a larger --max-tenants"
            )
        return min(idle, key=lambda resident: resident.used)

    def _may_go(self, resident: Resident) -> bool:
        """True if a run may go to disk now: none of its requests is at work, and either it has no gradients or its client is gone."""
        is_free = not resident.has_gradients or self._is_abandoned(resident.run)
        return is_free and not self._turn(resident.run.id).locked()

    async def _remove(self, resident: Resident) -> None:
        """Take a run out of its trainer. If this trainer has no other run, the trainer ends."""
        home, run_id = resident.home, resident.run.id
        if home.runs.pop(run_id, None) is None:
            return  # the trainer has died
        self.residents.pop(run_id, None)
        if not home.runs:
            self.homes.remove(home)
            await home.trainer.close()
        elif resident.calls is not None:
            await resident.calls.close()

    async def _lose(self, home: Home) -> None:
        """Forget a trainer and all its runs, and close the trainer. The trainer may have died."""
        if home not in self.homes:
            return
        self.homes.remove(home)
        for run_id in home.runs:
            self.residents.pop(run_id, None)
        home.runs.clear()
        with contextlib.suppress(Exception):
            await home.trainer.close()

    async def _park(self, resident: Resident, *, must_end: bool = False) -> None:
        """Write the state of a run to disk and take the run out of its trainer. The next request to the run loads the state again.

        A run with gradients that no optim_step has used stays in memory, unless must_end is True or the run's client is gone. In these two cases
        the gradients are dropped. If the trainer has died, all its runs are lost.
        """
        run = resident.run
        async with self._turn(run.id):
            if self.residents.get(run.id) is not resident:
                return  # the run's trainer died before this call got the lock
            if resident.has_gradients and not (must_end or self._is_abandoned(run)):
                return  # a forward_backward came before this call got the lock
            try:
                directory = await self._write(resident)
            except ActorDiedError as error:
                logger.exception("%s", self._ended(run.id, error))
                await self._lose(resident.home)
                return
            self.store.update_run(run.id, parked=str(directory))
            await self._remove(resident)
            logger.info("the training run %s waits on disk for its next request", run.id)

    async def _write(self, resident: Resident) -> Path:
        """Drop the gradients of a run, write its state to the folder for runs that wait on disk, and return the directory with the state."""
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
        """Raises RuntimeError if the call fails in the trainer. All gradients since the last optim_step are then dropped.

        Raises ValueError or TypeError if the trainer refuses the input. Earlier gradients are then kept.
        """
        async with self.using(run_id) as resident:
            had_gradients = resident.has_gradients
            # Set before the call, because the trainer finishes the call even if this coroutine is cancelled.
            resident.has_gradients = True
            outputs: list[ForwardBackwardOutput] = []
            try:
                for group in batch.groups:
                    outputs.append(await resident.trainer.forward_backward(group, batch.loss))
            except Exception as error:
                if isinstance(error, ValueError | TypeError) and not outputs:
                    resident.has_gradients = had_gradients
                    raise  # the trainer refused the input and has changed nothing
                await self._mend(resident, error)
                raise RuntimeError(f"{error}; the gradients since the last optim_step are dropped") from error
            return batch.merged(outputs)

    async def _mend(self, resident: Resident, error: Exception) -> None:
        """Make a run usable again after a failed call, by dropping its gradients. If this fails, removes the run and raises RuntimeError."""
        try:
            await resident.trainer.discard_gradients()
            resident.has_gradients = False
        except Exception:
            try:
                await self._remove(resident)
            except Exception:  # the trainer cannot even remove the run, so all runs of the trainer are lost
                await self._lose(resident.home)
            raise RuntimeError(self._ended(resident.run.id, error)) from error

    async def optim_step(self, run_id: str, params: OptimParams) -> OptimResult:
        async with self.using(run_id) as resident:
            if not resident.has_gradients:
                raise UserError("no gradients are accumulated; optim_step comes after forward_backward")
            result = await resident.trainer.optim_step(params)
            resident.has_gradients = False
            return result

    async def save(self, run_id: str, directory: Path) -> None:
        """Write the weights, optimizer state and policy_version of a run to a directory. Returns when they are on disk."""
        async with self.using(run_id) as resident:
            require_no_gradients(resident)
            saved = await resident.trainer.save_checkpoint(str(directory), optimizer=True)
            await saved.wait()

    async def load(self, run_id: str, directory: str, *, optimizer: bool) -> None:
        async with self.using(run_id) as resident:
            require_no_gradients(resident)
            await resident.trainer.load_checkpoint(directory, optimizer=optimizer)

    async def export(self, run_id: str, directory: Path, dtype: Literal["float32", "bfloat16"]) -> None:
        """Write the weights of a run, with the adapters merged into them, as a Hugging Face directory."""
        async with self.using(run_id) as resident:
            await resident.trainer.export_hf(str(directory), dtype)

    async def export_adapter(self, run_id: str, directory: Path) -> None:
        """Write the adapters of a run, without the base weights."""
        async with self.using(run_id) as resident:
            await resident.trainer.export_lora(str(directory))

    def sweep(self, now: float) -> None:
        """Delete the states on disk that nobody will ask for.

        These are the states of runs whose client is gone: those whose last request is older than keep_parked_hours, and the least
        recently used ones while the states of all runs together take more than max_parked_bytes. A run whose client is there is kept.
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
        """Delete folders that no run names: a server was killed while it wrote them. Only before the first request."""
        named = {Path(run.parked or "").name for run in self.store.parked_runs()}
        for folder in self.folder.glob("*"):
            if folder.name not in named:
                shutil.rmtree(folder, ignore_errors=True)

    async def close(self) -> None:
        """Write the state of all runs to disk and end their trainers. Gradients that no optim_step has used are dropped."""
        for resident in list(self.residents.values()):
            try:
                await self._park(resident, must_end=True)
            except Exception:
                logger.exception(
                    "the state of the training run %s could not be written to disk; its saved checkpoints are still there",
                    resident.run.id,
                )
        for home in list(self.homes):
            await self._lose(home)


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _shape_of(run: Run) -> Shape | None:
    """The shape of a run's adapters. None if the run has LoRA rank 0."""
    return (
        tuple(sorted((name, value) for name, value in run.lora.items() if name != "seed")) if run.lora["rank"] else None
    )


def _last_use(home: Home) -> float:
    return max(resident.used for resident in home.runs.values())


def require_no_gradients(resident: Resident) -> None:
    """Raises UserError if a run has gradients that no optim_step has used. A checkpoint cannot hold gradients."""
    if resident.has_gradients:
        raise UserError("forward_backward has accumulated gradients; call optim_step before you save or load a state")
