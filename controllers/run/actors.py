"""Spawns, watches, replaces and closes the actors of a run."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar, cast

import torch

import rl_actors
from controllers.observe.run_folder import RunFolder
from controllers.run.colocation import overlap
from rl_actors import GeneratorClient, GeneratorConfig, ReferenceClient, TrainerClient, ValueTrainerClient
from rl_actors.clients.base import ActorDiedError, ActorSilentError
from rl_actors.clients.call import in_background
from rl_actors.clients.replicas import Restarts
from rl_actors.processes.output import LogRoute
from rl_actors.transports.base import Transport
from rl_actors.transports.default import default_transport

if TYPE_CHECKING:
    from controllers.run.config import RunConfig

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 5.0
"""Seconds for each step of closing: the last checkpoint, then actors and transport."""
DEATH_TIMEOUT = 1.0
"""Seconds that a failed call waits for the report of a death. Then `death_behind` looks for one in
other ways."""
END_TIMEOUT = 60.0
"""Seconds in which cancelled work must end."""
BEYOND_LIMIT = "this is the first of {num_deaths} deaths in the last hour, but survival.max_restarts_per_hour={limit}; the last death: {last}"
"""Note on the error that ends the run after several deaths."""
KILL_TIMEOUT = 30.0
"""Seconds in which killed processes must end."""

Setup = Callable[[str], AbstractContextManager[None]]
"""Shows a phase of the start: with setup("starting trainer"): …"""
T = TypeVar("T")
AnyClient = TypeVar("AnyClient", bound=TrainerClient | ReferenceClient | GeneratorClient)


class Death(Exception):
    """Work was cancelled or failed because an actor has died; `error` says which."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class StartAgainError(Exception):
    """A run with `--hosts` can go on only in a new process: Monarch 0.7 cannot connect to hosts a
    second time after one was lost."""

    def __init__(self, cause: str, lost: Sequence[str]) -> None:
        """lost: the hosts whose workers have ended."""
        super().__init__(cause)
        self.lost = tuple(lost)


class Actors:
    """The transport, the trainers and the generator of a run.
    Roles: "trainer", "generator", "reference", "critic", "store" (the process with the index of the
    published weights). A spawn method returns the role's client, which it spawns only if there is
    none.
    """

    def __init__(
        self,
        config: "RunConfig",
        folder: RunFolder,
        *,
        tell: Callable[[str], None] = logger.info,
        verbose: bool,
    ) -> None:
        """tell: gets a line when a generator has died, is healthy again, or will not be started again."""
        self.config = config
        self.folder = folder
        self.tell = tell
        self.logs = LogRoute(directory=folder.path.absolute() / "logs", tee=verbose)
        self.models = config.models()
        for name, model in self.models.items():
            self.models[name] = replace(model, seed=config.seed + model.seed)
        tokenizer_folder = folder.path.absolute() / "tokenizer"
        if config.alphabet and tokenizer_folder.is_dir():
            for model in self.models.values():
                model.tokenizer_path = str(tokenizer_folder)
        stops = config.generator.stop_token_ids
        own = GeneratorConfig.of(self.models["trainer"])
        self.generator_config = replace(
            config.generator,
            seed=config.seed + config.generator.seed,
            stop_token_ids=own.stop_token_ids if stops is None else stops,
            tokenizer_path=config.generator.tokenizer_path or own.tokenizer_path,
            restarts=config.survival.policy(),
        )
        self.clients: dict[str, TrainerClient | ReferenceClient | GeneratorClient] = {}
        self.restarts = Restarts(config.survival.policy(), note=BEYOND_LIMIT)
        self.deaths: dict[str, Exception] = {}  # role -> the error that reports its death
        self._died = asyncio.Event()
        self._watches: dict[str, asyncio.Task[None]] = {}
        # before the transport opens: `connect` sets this process's address, before Monarch's first use
        self.placement = config.hosts.connect(self.logs.directory)
        # in the background, because it imports modules for seconds
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
            generator.on_news(self.tell)
            return generator

        return self._client("generator", spawn)

    def _client(self, role: str, spawn: Callable[[], AnyClient]) -> AnyClient:
        """The role's client, spawned and watched if there is none."""
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
        """Record a death. Not a generator's, because GeneratorClient replaces it."""
        if role == "generator":
            return
        self.deaths.setdefault(role, death)
        self._died.set()

    async def until_death(self, work: Coroutine[object, None, T]) -> T:
        """The result of the work. Raises Death, and cancels the work, if an actor dies; else the
        work's own error."""
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
        """Wait for a death, and return its error."""
        while not self.deaths:
            self._died.clear()
            await self._died.wait()
        return next(iter(self.deaths.values()))

    async def death_behind(self, error: Exception) -> Exception | None:
        """The death that caused a call's error, or None.
        The first sign may be an error of another actor that needs the dead one, such as another
        rank, or a generator that pulls.
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
        """The first role, except the generator, with a process that does not answer; Monarch may be
        late to report a death on another host."""
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

    async def kill_for_restart(self, others: Collection[str] = ()) -> set[str]:
        """Kill what is left of dead actors, and the roles `others`; if the store has died, all
        actors. Returns the killed roles.
        With `--hosts`, kills nothing and raises StartAgainError.
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

    async def start_with_retries(self, setup: Setup) -> tuple[TrainerClient, GeneratorClient]:
        """`start`, again after each death, as often as the config allows."""
        while True:
            try:
                return await self.until_death(self.start(setup))
            except Death as death:
                pause = self.restarts.pause_after(death.error)
                with setup(f"{death}; starting again"):
                    await self.kill_for_restart(self.all_together())
                    await asyncio.sleep(pause)

    def all_together(self) -> set[str]:
        """All roles if trainer and generator share GPUs, so that they must start one after the
        other; else none."""
        shares = self.config.colocation.enabled or (self.config.has_generator and shares_gpu(self.config))
        return set(self.clients) if shares else set()

    async def start(self, setup: Setup) -> tuple[TrainerClient, GeneratorClient]:
        """Spawn trainer and generator if they are missing, and wait until all actors are ready."""
        trainer, generator = await self._spawn(setup)
        with setup("starting trainer and generator" if self.config.has_generator else "starting trainer"):
            await asyncio.gather(*(client.ready() for client in self.clients.values()))
        return trainer, generator

    async def _spawn(self, setup: Setup) -> tuple[TrainerClient, GeneratorClient]:
        """On a shared GPU the generator waits for the trainer, because vLLM measures the free
        memory at its start."""
        config = self.config
        if not config.has_generator:
            # If a config has no generator, its controller never uses `run.generator`.
            return self.spawn_trainer(), cast(GeneratorClient, None)
        if config.colocation.enabled or shares_gpu(config):
            trainer = self.spawn_trainer()
            with setup("starting trainer"):
                await trainer.ready()
                await trainer.offload(config.colocation.parts)
            return trainer, self.spawn_generator()
        generator = self.spawn_generator()  # first, because it takes longer to start than the trainer
        return self.spawn_trainer(), generator

    async def close(self) -> None:
        """End actors and transport within CLOSE_TIMEOUT seconds, then the workers of a job."""
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
    """Cancel a task and wait. Raises TimeoutError after END_TIMEOUT seconds."""
    task.cancel()
    _, running = await asyncio.wait((task,), timeout=END_TIMEOUT)
    if running:
        raise TimeoutError(f"the work of the run did not end within {END_TIMEOUT:g} s after the death of an actor")
    if not task.cancelled():
        task.exception()  # asyncio prints a warning about an exception that no code has read


def shares_gpu(config: "RunConfig") -> bool:
    """True if the generator shares a GPU with a rank, which then must not allocate while vLLM
    measures."""
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
