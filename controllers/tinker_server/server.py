"""The state of a Tinker server of one base model. Contains no HTTP."""

import asyncio
import contextlib
import shutil
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from controllers.tinker_server.config import ServeConfig
from controllers.tinker_server.futures import Futures, UserError
from controllers.tinker_server.requests import SamplingLimits
from controllers.tinker_server.sampling import VersionedGenerator
from controllers.tinker_server.store import Checkpoint, OwnRow, Store, Version
from controllers.tinker_server.trainers import Spawn, Trainers
from rl_actors import GeneratorClient
from rl_actors.clients.limits import TrainerLimits

POINTS = 300  # of a curve on the status page; the oldest are dropped
RATE_SECONDS = 5.0  # between two points of a rate
SILENT_SECONDS = 24 * 3600.0
"""After this long without heartbeat, unnamed sampler weights of a session's runs are deleted."""
SWEEP_SECONDS = 60.0  # between two calls of Server.sweep


def _points() -> deque[float]:
    return deque(maxlen=POINTS)


@dataclass(slots=True)
class RunCurves:
    """One run's curves, newest point last."""

    # loss:sum per datum of each forward_backward
    losses: deque[float] = field(default_factory=_points)
    num_losses: int = 0  # since the server started, those that the curve has dropped included
    grad_norms: deque[float] = field(default_factory=_points)  # of each optim_step
    num_steps: int = 0  # successful, since the server started


class Server:
    def __init__(
        self, config: ServeConfig, folder: Path, *, spawn: Spawn, generator: GeneratorClient, sampling: SamplingLimits
    ) -> None:
        """folder: of the state, also an earlier server's. spawn: starts a trainer."""
        self.config = config
        self.folder = folder
        self.store = Store(folder / "state.sqlite")
        self.trainers = Trainers(config, self.store, folder / "parked", spawn)
        self.generator = VersionedGenerator(generator)
        self.sampling = sampling
        self.futures = Futures()
        self.training_limits = TrainerLimits.of_config(config.trainer)
        self.base_version = self._add_base(config.hf_path)
        self._repeating: list[asyncio.Task[None]] = []
        self._removals: set[asyncio.Future[None]] = set()  # running deletions of versions
        self.num_sampled_tokens = self.num_trained_positions = self.num_optim_steps = 0
        self.taken: Counter[str] = Counter()  # keys of runs, checkpoints and samplers that calls are about to write
        self.curves: dict[str, RunCurves] = defaultdict(RunCurves)  # by run id
        self.rates: dict[str, deque[float]] = defaultdict(_points)  # tokens per second
        self._measured: tuple[float, dict[str, int]] | None = None  # time and totals of the last `measure`

    def begin(self) -> None:
        """Call `sweep` and `measure` periodically. Needs a running event loop."""
        self.trainers.sweep_unnamed()
        self.measure(time.monotonic())
        self._repeating = [
            asyncio.create_task(_repeat(SWEEP_SECONDS, self.sweep, time.time)),
            asyncio.create_task(_repeat(RATE_SECONDS, self.measure, time.monotonic)),
        ]

    async def close(self) -> None:
        """Cancel the requests, write the runs to disk, and end the actors."""
        for task in self._repeating:
            task.cancel()
        await self.futures.close()
        await asyncio.gather(*self._removals)
        await self.trainers.close()
        await self.generator.generator.close()
        self.store.db.close()

    def measure(self, now: float) -> None:
        """Add a point to the curves of tokens per second, but not the first time."""
        totals = {"sampled": self.num_sampled_tokens, "trained": self.num_trained_positions}
        if self._measured is not None:
            then, former = self._measured
            for name, total in totals.items():
                self.rates[name].append((total - former[name]) / (now - then))
        self._measured = (now, totals)

    def sweep(self, now: float) -> None:
        """Delete what has expired: checkpoints, weights of silent sessions, states without client."""
        self.trainers.sweep(now)
        for checkpoint in self.store.expired(now):
            self.delete(checkpoint)
        for version in self.store.forgotten_versions(now - SILENT_SECONDS):
            self.drop_version(version.number)

    def require_base(self, name: str) -> None:
        if name not in (self.config.name, self.config.hf_path):
            raise UserError(f"base_model={name!r}; this server has {self.config.name}")

    @contextlib.contextmanager
    def taking(self, kind: type[OwnRow], key: str, hint: str, *, overwrite: bool = False) -> Iterator[None]:
        """Reserve the key of a row. Raises UserError with the hint if it exists or is reserved."""
        if not overwrite and self.store.get(kind, key) is not None:
            raise UserError(f"{key} exists; {hint}")
        if not overwrite and self.taken[key]:
            raise UserError(f"an earlier call is about to make {key}; {hint}")
        self.taken[key] += 1
        try:
            yield
        finally:
            self.taken[key] -= 1
            if not self.taken[key]:
                del self.taken[key]

    def directory_of(self, version: int) -> Path:
        return self.folder / "samplers" / str(version)

    def _add_base(self, directory: str) -> int:
        """The version of the base model, added if missing, with a link to its directory."""
        known = self.store.find(Version, run_id=None, directory=directory)
        version = known[0].number if known else self.store.put(Version(directory=directory))
        link = self.directory_of(version)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.unlink(missing_ok=True)  # may point to a folder that is gone
            link.symlink_to(Path(directory).absolute())
        return version

    def delete(self, checkpoint: Checkpoint) -> None:
        self.store.delete(Checkpoint, checkpoint.path)
        if checkpoint.version is not None:
            self.drop_version(checkpoint.version)
        else:
            shutil.rmtree(checkpoint.directory, ignore_errors=True)

    def drop_version(self, version: int) -> None:
        self.store.update(Version, version, is_dropped=True)
        removal = asyncio.ensure_future(self._remove(version))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _remove(self, version: int) -> None:
        """Unload a version's adapter, which the generator may read until then, and delete its files."""
        await self.generator.unload(version)
        await asyncio.to_thread(shutil.rmtree, self.directory_of(version), ignore_errors=True)


async def _repeat(seconds: float, call: Callable[[float], None], clock: Callable[[], float]) -> None:
    while True:
        await asyncio.sleep(seconds)
        call(clock())
