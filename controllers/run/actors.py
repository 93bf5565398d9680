"""Spawns the actors of a run, watches them, replaces actors that have died, and closes all actors.

The training loops call the actors.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar, cast

import torch

import rl_actors
from controllers.observe.run_folder import RunFolder
from controllers.run.colocation import overlap
from rl_actors import GeneratorClient, GeneratorConfig, ReferenceClient, TrainerClient, ValueTrainerClient
from rl_actors.clients.base import ActorDiedError, ActorSilentError
from rl_actors.clients.call import in_background
from rl_actors.clients.restarts import Restarts
from rl_actors.processes.output import LogRoute
from rl_actors.transports.base import Transport
from rl_actors.transports.default import default_transport

if TYPE_CHECKING:
    from controllers.run.config import RunConfig

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 5.0
"""Seconds that each step of closing a run may take.

The first step waits until the last checkpoint is written. The second step ends the actors and closes the transport.
"""
DEATH_TIMEOUT = 1.0
"""When a call has failed, the run waits this many seconds for a report that an actor has died.

If no report comes, `Actors.death_behind` looks for a death in other ways. If it finds none, the call has failed for another reason.
"""
END_TIMEOUT = 60.0
"""Seconds in which the run's current work must end after the run has cancelled it. The run cancels the work after the death of an actor."""
BEYOND_LIMIT = "this is the first of {num_deaths} deaths in the last hour, but survival.max_restarts_per_hour={limit}; the last death: {last}"
"""Note on the error that ends the run after too many deaths. The error reports the first death of the last hour.

If there was only one death, the error gets no note.
"""
KILL_TIMEOUT = 30.0
"""Seconds in which killed processes must end."""

Setup = Callable[[str], AbstractContextManager[None]]
"""Function that shows a phase of the start, as in `with setup("starting trainer"): ...`."""
T = TypeVar("T")
AnyClient = TypeVar("AnyClient", bound=TrainerClient | ReferenceClient | GeneratorClient)


class Death(Exception):
    """Raised when work was cancelled or failed because an actor has died. `error` says which actor has died."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class StartAgainError(Exception):
    """An actor of a run with `--hosts` has died. The run can go on only in a new program, because Monarch 0.7 cannot connect to hosts a
    second time in the same program after one of the hosts was lost.
    """

    def __init__(self, cause: str, lost: Sequence[str]) -> None:
        """lost: names of the hosts whose workers have ended. Empty if all workers still run.

        A worker is the program that starts the run's processes on a host.
        """
        super().__init__(cause)
        self.lost = tuple(lost)


class Actors:
    """Holds the transport, the trainers and the generator of a run.

    Watches these actors, replaces actors that have died, and closes all of them.

    The actors have names, called roles: "trainer", "generator", "reference", "critic" and "store". The store is the process in which the
    transport keeps the index of the published weights. A spawn method returns the client of its role. It spawns an actor only if the role
    has no client.
    """

    def __init__(self, config: "RunConfig", folder: RunFolder, *, verbose: bool) -> None:
        self.config, self.folder = config, folder
        self.logs = LogRoute(directory=folder.path.absolute() / "logs", tee=verbose)
        self.models = config.models()
        for name, model in self.models.items():
            self.models[name] = replace(model, seed=config.seed + model.seed)
        tokenizer_folder = folder.path.absolute() / "tokenizer"
        if config.alphabet and tokenizer_folder.is_dir():
            for model in self.models.values():
                model.tokenizer_path = str(tokenizer_folder)
        stops, own = config.generator.stop_token_ids, GeneratorConfig.of(self.models["trainer"])
        self.generator_config = replace(
            config.generator,
            seed=config.seed + config.generator.seed,
            stop_token_ids=own.stop_token_ids if stops is None else stops,
            tokenizer_path=config.generator.tokenizer_path or own.tokenizer_path,
            restarts=config.survival.policy(),
        )
        self.tell: Callable[[str], None] = logger.info
        """Function that is called with a line of text when a generator has died, is healthy again, or will not be started again."""
        self.clients: dict[str, TrainerClient | ReferenceClient | GeneratorClient] = {}
        self.restarts = Restarts(config.survival.policy(), note=BEYOND_LIMIT)
        self.deaths: dict[str, Exception] = {}  # role -> the error that reports its death
        self._died = asyncio.Event()
        self._watches: dict[str, asyncio.Task[None]] = {}
        # `connect` sets the address of this process. The address must be set before Monarch is first used, so `connect`
        # is called before the transport opens.
        self.placement = config.hosts.connect(self.logs.directory)
        # Opening the transport takes time, because it imports modules. So the transport opens in the background while
        # the processes of the actors start.
        self._open_transport()

    def _open_transport(self) -> None:
        self.transport = in_background(_opened_transport(self.config, self.folder), "opening the transport")
        self._watches["store"] = asyncio.ensure_future(self._watch_store())

    def spawn_trainer(self) -> TrainerClient:
        def spawn() -> TrainerClient:
            return rl_actors.TrainerClient.spawn(
                self.models["trainer"], transport=self.transport, logs=self.logs, hosts=self.placement.trainer
            )

        return self._client("trainer", spawn)

    def spawn_reference(self) -> ReferenceClient:
        def spawn() -> ReferenceClient:
            return rl_actors.ReferenceClient.spawn(
                self.models["reference"], logs=self.logs, hosts=self.placement.trainer
            )

        return self._client("reference", spawn)

    def spawn_critic(self) -> ValueTrainerClient:
        def spawn() -> ValueTrainerClient:
            return rl_actors.ValueTrainerClient.spawn(
                self.models["critic"], name="critic", logs=self.logs, hosts=self.placement.trainer
            )

        return self._client("critic", spawn)

    def spawn_generator(self) -> GeneratorClient:
        def spawn() -> GeneratorClient:
            generator = rl_actors.GeneratorClient.spawn(
                self.generator_config, transport=self.transport, logs=self.logs, hosts=self.placement.generators
            )
            generator.on_news(lambda line: self.tell(line))
            return generator

        return self._client("generator", spawn)

    def _client(self, role: str, spawn: Callable[[], AnyClient]) -> AnyClient:
        """The client of a role. If the role has no client, this method spawns a client and starts to watch it."""
        if role not in self.clients:
            client = spawn()
            self.clients[role] = client
            self._watches[role] = asyncio.ensure_future(self._watch(role, client))
        return cast(AnyClient, self.clients[role])

    async def _watch(self, role: str, client: TrainerClient | ReferenceClient | GeneratorClient) -> None:
        death = await client.death(self.config.survival.silent_after)
        if death is not None:
            self.report(role, death)

    async def _watch_store(self) -> None:
        with contextlib.suppress(Exception):  # if the transport does not open, the actors raise its error
            transport = await self.transport
            silent_after = self.config.survival.silent_after
            self.report("store", ActorDiedError(await transport.death(silent_after), "store"))

    def report(self, role: str, death: Exception) -> None:
        """Record the death of an actor.

        The death of a generator is not recorded, because GeneratorClient replaces the generator.
        """
        if role == "generator":
            return
        self.deaths.setdefault(role, death)
        self._died.set()

    async def until_death(self, work: Coroutine[object, None, T]) -> T:
        """The result of the work. If an actor dies meanwhile, cancels the work and raises Death.

        If the work fails for another reason, raises the error of the work.
        """
        task = asyncio.ensure_future(work)
        dying = asyncio.ensure_future(self.first_death())
        try:
            await asyncio.wait((task, dying), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Death(dying.result())
            error = None if task.cancelled() else task.exception()
            if isinstance(error, Exception) and (death := await self.death_behind(error)):
                raise Death(death) from error
            return task.result()
        finally:
            dying.cancel()
            await _end(task)

    async def first_death(self) -> Exception:
        """Wait until an actor has died, and return the error that says so."""
        while not self.deaths:
            self._died.clear()
            await self._died.wait()
        return next(iter(self.deaths.values()))

    async def death_behind(self, error: Exception) -> Exception | None:
        """The death that caused the error of a call. None if no death caused the error.

        The first sign of a death may be an error of another actor that needs the dead actor. Examples are another rank
        of the same trainer, and a generator that pulls weights.
        """
        if isinstance(error, ActorDiedError | ActorSilentError):
            names = {client.name: role for role, client in self.clients.items()}
            self.report(names.get(error.actor, "generator"), error)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self.first_death(), DEATH_TIMEOUT)
        if lost := await asyncio.to_thread(self.placement.lost):
            self.report("trainer", ActorDiedError(f"trainer: the worker of {', '.join(lost)} has ended", "trainer"))
            return await self.first_death()
        if hasattr(error, "rank") and (role := await self._silent_on_hosts()):
            text = f"{role}: a process on another host does not answer"
            self.report(role, ActorDiedError(text, role))
            return await self.first_death()
        if reason := await self._store_error():
            self.report("store", ActorDiedError(f"store: the index of the weights does not answer: {reason}", "store"))
            return await self.first_death()
        return None

    async def _silent_on_hosts(self) -> str | None:
        """The first role, except the generator, with a process that does not answer.

        None if all processes answer, or if the run uses only this machine. This check is needed because Monarch may be
        late to report the death of a process on another host.
        """
        if self.placement.all is None:
            return None
        for role, client in self.clients.items():
            if role != "generator" and not await client.is_alive(self.config.survival.silent_after):
                return role
        return None

    async def _store_error(self) -> str:
        """The reason why the transport does not answer, or "" if it answers."""
        try:
            transport = await self.transport
            question = asyncio.ensure_future(transport.get_object("latest"))
            await asyncio.wait_for(question, self.config.survival.silent_after)
        except Exception as error:
            return repr(error)
        return ""

    async def bury(self, others: Collection[str] = ()) -> set[str]:
        """Kill the remaining processes of dead actors, and the actors with the roles `others`.

        If the store has died, kill all actors and open a new transport.

        Returns the roles of these actors, which can be spawned again. If the run uses `--hosts`, kills nothing and raises
        StartAgainError.
        """
        if self.placement.all is not None:
            lost = await asyncio.to_thread(self.placement.lost)
            cause = f"the worker of {', '.join(lost)} has ended" if lost else str(next(iter(self.deaths.values())))
            raise StartAgainError(cause, lost)
        roles = {*self.deaths, *others}
        if "store" in roles:  # all actors have the address of the old store, so all must be spawned again
            roles |= self.clients.keys()
        self.deaths = {}
        ends = []
        for role in roles:
            if role in self._watches:
                self._watches.pop(role).cancel()
            if role in self.clients:
                ends.append(self.clients.pop(role).kill())
        try:
            await asyncio.wait_for(asyncio.gather(*ends, return_exceptions=True), KILL_TIMEOUT)
        except TimeoutError:
            raise TimeoutError(
                f"{', '.join(sorted(roles))} did not end within {KILL_TIMEOUT:g} s after they were killed"
            ) from None
        if "store" in roles:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._close_transport(), CLOSE_TIMEOUT)
            self._open_transport()
        return roles

    async def start_whatever_dies(self, setup: Setup) -> tuple[TrainerClient, GeneratorClient]:
        """Call `start`. If an actor dies meanwhile, call `start` again, as often as the config allows."""
        while True:
            try:
                return await self.until_death(self.start(setup))
            except Death as death:
                pause = self.restarts.pause_after(death.error)
                with setup(f"{death}; starting again"):
                    await self.bury(self.all_together())
                    await asyncio.sleep(pause)

    def all_together(self) -> set[str]:
        """The roles of all actors if trainer and generator share GPUs, otherwise an empty set.

        The actors of this set must be replaced together, because they share the memory of GPUs and must start one after
        the other.
        """
        shares = self.config.turns.enabled or (self.config.has_generator and shares_gpu(self.config))
        return set(self.clients) if shares else set()

    async def start(self, setup: Setup) -> tuple[TrainerClient, GeneratorClient]:
        """Spawn the trainer and the generator if they are missing, and wait until all actors are ready."""
        trainer, generator = await self._spawn(setup)
        with setup("starting trainer and generator" if self.config.has_generator else "starting trainer"):
            # The report at the end of the run needs matplotlib. Importing it now costs no time, because the actors take
            # longer to start.
            importing = asyncio.to_thread(import_module, "controllers.observe.report")
            await asyncio.gather(*(client.ready() for client in self.clients.values()), importing)
        return trainer, generator

    async def _spawn(self, setup: Setup) -> tuple[TrainerClient, GeneratorClient]:
        """Spawn trainer and generator. If both share a GPU, the generator is spawned only when the trainer is ready.

        The reason is that vLLM measures the free memory at its start. Meanwhile the trainer must not allocate memory.
        """
        config = self.config
        if not config.has_generator:
            # If a config has no generator, its controller never uses `run.generator`.
            return self.spawn_trainer(), cast(GeneratorClient, None)
        if config.turns.enabled or shares_gpu(config):
            trainer = self.spawn_trainer()
            with setup("starting trainer"):
                await trainer.ready()
                await trainer.offload(config.turns.parts)
            return trainer, self.spawn_generator()
        generator = self.spawn_generator()  # first, because it takes longer to start than the trainer
        return self.spawn_trainer(), generator

    async def close(self) -> None:
        """End all actors and close the transport. Waits at most CLOSE_TIMEOUT seconds until this is done.

        Then, if a job of this run has started workers on hosts, end these workers.
        """
        for watch in self._watches.values():
            watch.cancel()
        closing = [client.kill() if role in self.deaths else client.close() for role, client in self.clients.items()]
        done = asyncio.gather(*closing, self._close_transport(), return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done, CLOSE_TIMEOUT)
        await asyncio.to_thread(self.placement.close)

    async def _close_transport(self) -> None:
        transport = await self.transport
        await transport.close()


async def _end(task: asyncio.Task[T]) -> None:
    """Cancel a task and wait for its end. Raises TimeoutError if the task still runs after END_TIMEOUT seconds."""
    task.cancel()
    _, running = await asyncio.wait((task,), timeout=END_TIMEOUT)
    if running:
        raise TimeoutError(f"the work of the run did not end within {END_TIMEOUT:g} s after the death of an actor")
    if not task.cancelled():
        task.exception()  # asyncio prints a warning about an exception that no code has read


def shares_gpu(config: "RunConfig") -> bool:
    """True if the generator shares a GPU with a rank of the trainer.

    Then the rank must not allocate memory while vLLM measures the free memory.
    """
    return torch.cuda.is_available() and overlap(config.trainer.gpus(), config.generator.gpus())


async def _opened_transport(config: "RunConfig", folder: RunFolder) -> Transport:
    transport = await asyncio.to_thread(make_transport, config, folder)
    timeout = config.trainer.setup_timeout
    try:
        await asyncio.wait_for(transport.open(), timeout)
    except TimeoutError:
        raise TimeoutError(f"the transport {config.transport} did not open within {timeout:g} s") from None
    return transport


def make_transport(config: "RunConfig", folder: RunFolder) -> Transport:
    """The transport of the config."""
    if config.transport == "files":
        return rl_actors.FilesTransport(folder.path.absolute() / "weights")
    return rl_actors.MemoryTransport() if config.transport == "memory" else default_transport(config.weights)
