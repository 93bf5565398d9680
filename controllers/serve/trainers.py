"""The trainers of training runs. Every run has one of its own. At most max_trainers are in memory, and the others wait on disk.

A run's requests are done one after the other, in the order of their arrival.
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

from controllers.serve.config import ServeConfig
from controllers.serve.futures import UserError
from controllers.serve.samples import Batch
from controllers.serve.store import Run, Store
from rl_actors import OptimParams, TrainerConfig
from rl_actors.clients.model_calls import SavedCheckpoint
from rl_actors.config import LoRAConfig
from rl_actors.losses import Loss
from rl_actors.types import ForwardBackwardOutput, OptimResult, Sample

logger = logging.getLogger(__name__)


class Trainer(Protocol):
    """The calls of TrainerClient that a server makes. tests/fakes.py has one without a model."""

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


@dataclass(slots=True, kw_only=True)
class Resident:
    """A run whose trainer is in memory."""

    run: Run
    trainer: Trainer
    used: float = field(default_factory=time.monotonic)
    has_gradients: bool = False  # accumulated by forward_backward, and not used by optim_step yet


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
        """folder: for the state of runs that wait on disk. is_abandoned: function that says whether the client of a run is gone."""
        self.config, self.store, self.folder = config, store, folder
        self._spawn, self._is_abandoned = spawn, is_abandoned
        self.residents: dict[str, Resident] = {}
        self.num_starting = 0
        self._turns: dict[str, asyncio.Lock] = {}
        self._making_room = asyncio.Lock()

    def _turn(self, run_id: str) -> asyncio.Lock:
        return self._turns.setdefault(run_id, asyncio.Lock())

    async def create(self, run: Run, checkpoint: str | None = None, *, optimizer: bool = False) -> None:
        """Start the trainer of a new run, with the state of a checkpoint if one is given.

        Raises ValueError if no trainer can be built for the run or the checkpoint is another model's, and UserError if there is no room.
        """
        async with self._turn(run.id):
            await self._start(run, checkpoint, optimizer=optimizer)

    @contextlib.asynccontextmanager
    async def using(self, run_id: str) -> AsyncIterator[Resident]:
        """Context manager that waits for the caller's turn, and gives the run. Turns have the order in which they were asked for."""
        async with self._turn(run_id):
            resident = self.residents.get(run_id) or await self._revive(run_id)
            resident.used = time.monotonic()
            self.store.update_run(run_id, last_request=time.time())
            yield resident

    async def _revive(self, run_id: str) -> Resident:
        run = self.store.run(run_id)
        if run is None:
            raise UserError(f"there is no training run {run_id}")
        if run.parked is None:
            raise UserError(f"the trainer of {run_id} ended with the server that ran it; {self._last_saved(run_id)}")
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
        await self._make_room()
        try:
            trainer = self._spawn(self._config_of(run))
            try:
                await trainer.ready()
                if checkpoint is not None:
                    await trainer.load_checkpoint(checkpoint, optimizer=optimizer)
            except BaseException:
                await trainer.close()
                raise
            resident = self.residents[run.id] = Resident(run=run, trainer=trainer)
            return resident
        finally:
            self.num_starting -= 1

    def _config_of(self, run: Run) -> TrainerConfig:
        lora = dict(run.lora)
        rank = lora.pop("rank")
        adapters = LoRAConfig(rank=rank, alpha=self.config.lora_alpha, **lora) if rank else LoRAConfig()
        return replace(self.config.trainer, lora=adapters)

    async def _make_room(self) -> None:
        """Reserve the place of one trainer. If no place is free, the least recently used run goes to disk."""
        async with self._making_room:
            while len(self.residents) + self.num_starting >= self.config.max_trainers:
                await self._park(self._least_needed())
            self.num_starting += 1

    def _least_needed(self) -> Resident:
        """The least recently used run that may go to disk. Raises UserError if every run is at work or has gradients that a step will use."""
        idle = []
        for resident in self.residents.values():
            is_free = not resident.has_gradients or self._is_abandoned(resident.run)
            if is_free and not self._turn(resident.run.id).locked():
                idle.append(resident)
        if not idle:
            raise UserError(
                f"max_trainers={self.config.max_trainers}: every training run in memory is at work or has gradients for a "
                "step; try again later, or start the server with a larger --max-trainers"
            )
        return min(idle, key=lambda resident: resident.used)

    async def _park(self, resident: Resident, *, must_end: bool = False) -> None:
        """Write the state of a run to disk and end its trainer. Its next request starts one again.

        must_end=False: a run with gradients that no optim_step has used stays in memory, unless its client is gone.
        """
        run = resident.run
        async with self._turn(run.id):
            if resident.has_gradients and not (must_end or self._is_abandoned(run)):
                return  # a request came before this call got its turn
            if resident.has_gradients:
                await resident.trainer.discard_gradients()
                resident.has_gradients = False
            directory = self.folder / run.id.replace(":", "_")
            saved = await resident.trainer.save_checkpoint(str(directory), optimizer=True)
            await saved.wait()
            self.store.update_run(run.id, parked=str(directory))
            del self.residents[run.id]
            await resident.trainer.close()
            logger.info("%s waits on disk", run.id)

    async def forward(self, run_id: str, batch: Batch) -> ForwardBackwardOutput:
        async with self.using(run_id) as resident:
            return await resident.trainer.forward(batch.samples, batch.loss)

    async def forward_backward(self, run_id: str, batch: Batch) -> ForwardBackwardOutput:
        """Raises RuntimeError if the trainer failed. The gradients of the open step are then lost."""
        async with self.using(run_id) as resident:
            had_gradients = resident.has_gradients
            # Set before the call, because the trainer finishes the call even if it is cancelled here.
            resident.has_gradients = True
            try:
                return await resident.trainer.forward_backward(batch.samples, batch.loss)
            except (ValueError, TypeError):
                resident.has_gradients = had_gradients
                raise  # refused: nothing has changed
            except Exception as error:
                await self._mend(resident, error)
                raise RuntimeError(f"{error}; the gradients since the last optim_step are dropped") from error

    async def _mend(self, resident: Resident, error: Exception) -> None:
        """Make a run usable after a call that failed. Raises RuntimeError and closes the trainer if the trainer fails again."""
        try:
            await resident.trainer.discard_gradients()
            resident.has_gradients = False
        except Exception:
            run_id = resident.run.id
            self.residents.pop(run_id, None)
            with contextlib.suppress(Exception):
                await resident.trainer.close()
            raise RuntimeError(f"the trainer of {run_id} has ended: {error}; {self._last_saved(run_id)}") from error

    async def optim_step(self, run_id: str, params: OptimParams) -> OptimResult:
        async with self.using(run_id) as resident:
            if not resident.has_gradients:
                raise UserError("no gradients are accumulated; optim_step comes after forward_backward")
            result = await resident.trainer.optim_step(params)
            resident.has_gradients = False
            return result

    async def save(self, run_id: str, directory: Path) -> None:
        """Write weights, optimizer state and version. Returns when they are on disk."""
        async with self.using(run_id) as resident:
            require_no_gradients(resident)
            saved = await resident.trainer.save_checkpoint(str(directory), optimizer=True)
            await saved.wait()

    async def load(self, run_id: str, directory: str, *, optimizer: bool) -> None:
        async with self.using(run_id) as resident:
            require_no_gradients(resident)
            await resident.trainer.load_checkpoint(directory, optimizer=optimizer)

    async def export(self, run_id: str, directory: Path, dtype: Literal["float32", "bfloat16"]) -> None:
        """Write a Hugging Face directory of the weights, with adapters merged."""
        async with self.using(run_id) as resident:
            await resident.trainer.export_hf(str(directory), dtype)

    async def export_adapter(self, run_id: str, directory: Path) -> None:
        """Write the adapter of a run, without the weights under it."""
        async with self.using(run_id) as resident:
            await resident.trainer.export_lora(str(directory))

    async def close(self) -> None:
        """Write the state of all runs to disk and end their trainers. Gradients of open steps are dropped."""
        for resident in list(self.residents.values()):
            try:
                await self._park(resident, must_end=True)
            except Exception:
                logger.exception("%s was not written; its last saved state is still there", resident.run.id)
                self.residents.pop(resident.run.id, None)
                await resident.trainer.close()


def require_no_gradients(resident: Resident) -> None:
    """Raises UserError if an open step has gradients, which no checkpoint can hold."""
    if resident.has_gradients:
        raise UserError(
            "the gradients of forward_backward wait for an optim_step; states are saved and loaded after it"
        )
