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
from rl_actors import (
    GeneratorClient,
    GeneratorConfig,
    ReferenceClient,
    TrainerClient,
    TrainerConfig,
    ValueTrainerClient,
)
from rl_actors.clients.base import ActorDiedError, ActorSilentError
from rl_actors.clients.call import in_background
from rl_actors.clients.replicas import Restarts
from rl_actors.processes.output import LogRoute
from rl_actors.transports.base import Transport
from rl_actors.transports.index import default_transport

if TYPE_CHECKING:
    from controllers.run.config import RunConfig

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 5.0  # seconds for each step of closing: the last checkpoint, then actors and transport
DEATH_TIMEOUT = 1.0  # seconds that a failed call waits for the report of a death
END_TIMEOUT = 60.0  # seconds in which cancelled work must end
KILL_TIMEOUT = 30.0  # seconds in which killed processes must end
BEYOND_LIMIT = "this is the first of {num_deaths} deaths in the last hour, but survival.max_restarts_per_hour={limit}; the last death: {last}"

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
    """Monarch 0.7 cannot connect to hosts a second time, so a new process must go on with the run."""

    def __init__(self, cause: str, lost: Sequence[str]) -> None:
        super().__init__(cause)
        self.lost = tuple(lost)  # the hosts whose workers have ended


class Actors:
    """The transport, the trainers and the generator of a run.

    Roles: "trainer", "generator", "reference", "critic", "store" (the process with the index of the
    published weights). A spawn method returns the role's client, and spawns it if there is none.
    """

    def __init__(
        self, config: "RunConfig", folder: RunFolder, *, on_event: Callable[[str], None] = logger.info, verbose: bool
    ) -> None:
        """on_event: see GeneratorClient.on_news."""
        self.config = config
        self.on_event = on_event
        self.logs = LogRoute(directory=folder.path.absolute() / "logs", tee=verbose)
        self.configs: dict[str, TrainerConfig | GeneratorConfig] = {}
        tokenizer_folder = folder.path.absolute() / "tokenizer"
        for role, model in config.models().items():
            own = replace(model, seed=config.seed + model.seed)
            if config.alphabet and tokenizer_folder.is_dir():
                own.tokenizer_path = str(tokenizer_folder)
            self.configs[role] = own
        self.configs["generator"] = self._generator_config()
        self.clients: dict[str, TrainerClient | ReferenceClient | GeneratorClient] = {}
        self.restarts = Restarts(config.survival.policy(), note=BEYOND_LIMIT)
        self.deaths: dict[str, Exception] = {}  # role -> the error that reports its death
        self._died = asyncio.Event()
        self._watches: dict[str, asyncio.Task[None]] = {}
        # before the transport opens: `connect` sets this process's address, before Monarch's first use
        self.placement = config.hosts.connect(self.logs.directory)
        self.folder = folder
        # in the background, because it imports modules for seconds
        self._open_transport()

    def _generator_config(self) -> GeneratorConfig:
        own = GeneratorConfig.of(cast(TrainerConfig, self.configs["trainer"]))
        given = self.config.generator
        return replace(
            given,
            seed=self.config.seed + given.seed,
            stop_token_ids=own.stop_token_ids if given.stop_token_ids is None else given.stop_token_ids,
            tokenizer_path=given.tokenizer_path or own.tokenizer_path,
            restarts=self.config.survival.policy(),
            shares_gpu=shares_gpu(self.config) and not self.config.colocation.enabled,
        )

    def _open_transport(self) -> None:
        self.transport = in_background(_opened_transport(self.config, self.folder), "opening the transport")
        self._watches["store"] = asyncio.ensure_future(self._watch_store())

    def spawn_trainer(self) -> TrainerClient:
        return self._client("trainer", rl_actors.TrainerClient.spawn, transport=self.transport)

    def spawn_reference(self) -> ReferenceClient:
        return self._client("reference", rl_actors.ReferenceClient.spawn)

    def spawn_critic(self) -> ValueTrainerClient:
        return self._client("critic", rl_actors.ValueTrainerClient.spawn, name="critic")

    def spawn_generator(self) -> GeneratorClient:
        generator = self._client("generator", rl_actors.GeneratorClient.spawn, transport=self.transport)
        generator.on_news(self.on_event)
        return generator

    def _client(self, role: str, spawn: Callable[..., AnyClient], **options: object) -> AnyClient:
        if role not in self.clients:
            hosts = self.placement.generators if role == "generator" else self.placement.trainer
            client = spawn(self.configs[role], logs=self.logs, hosts=hosts, **options)
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
            cause = await transport.death(self.config.survival.silent_after)
            self.report("store", ActorDiedError(cause, "store"))

    def report(self, role: str, death: Exception) -> None:
        """Record a death. Not a generator's, because GeneratorClient replaces it."""
        if role != "generator":
            self.deaths.setdefault(role, death)
            self._died.set()

    async def until_death(self, work: Coroutine[object, None, T]) -> T:
        """The work's result or error. If an actor dies, cancels the work and raises Death."""
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
        """The death that caused a call's error, or None. The error may be that of another actor."""
        if isinstance(error, ActorDiedError | ActorSilentError):
            names = {client.name: role for role, client in self.clients.items()}
            self.report(names.get(error.actor, "generator"), error)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self.first_death(), DEATH_TIMEOUT)
        if lost := await asyncio.to_thread(self.placement.lost):
            self.report("trainer", ActorDiedError(f"trainer: the worker of {', '.join(lost)} has ended", "trainer"))
        elif hasattr(error, "rank") and (role := await self._silent_on_hosts()):
            self.report(role, ActorDiedError(f"{role}: a process on another host does not answer", role))
        elif reason := await self._store_error():
            self.report("store", ActorDiedError(f"store: the index of the weights does not answer: {reason}", "store"))
        return next(iter(self.deaths.values()), None)

    async def _silent_on_hosts(self) -> str | None:
        """The first role with a process that does not answer: Monarch may report its death late."""
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

    async def kill_for_restart(self, others: Collection[str] = ()) -> None:
        """Kill what is left of dead actors, and the roles `others`; all roles if the store has died
        or trainer and generator share GPUs. With `--hosts`, raises StartAgainError instead."""
        if self.placement.all is not None:
            lost = await asyncio.to_thread(self.placement.lost)
            cause = f"the worker of {', '.join(lost)} has ended" if lost else str(next(iter(self.deaths.values())))
            raise StartAgainError(cause, lost)
        roles = {*self.deaths, *others}
        # all actors have the address of a dead store, so all must be spawned again
        if "store" in roles or self.config.colocation.enabled or shares_gpu(self.config):
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

    async def start_with_retries(self, setup: Setup) -> tuple[TrainerClient, GeneratorClient]:
        """`start`, again after each death, as often as the config allows."""
        while True:
            try:
                return await self.until_death(self.start(setup))
            except Death as death:
                pause = self.restarts.pause_after(death.error)
                with setup(f"{death}; starting again"):
                    await self.kill_for_restart()
                    await asyncio.sleep(pause)

    async def start(self, setup: Setup) -> tuple[TrainerClient, GeneratorClient]:
        """Spawn missing actors, and wait until trainer and generator are ready."""
        generator = cast(GeneratorClient, None)  # without a generator the loop never uses it
        names = "trainer"
        if self.config.has_generator:
            names = "trainer and generator"
            if self.config.colocation.enabled:  # the trainer first, because it leaves its memory to vLLM
                with setup("starting trainer"):
                    await self.spawn_trainer().ready()
                    await self.spawn_trainer().offload(self.config.colocation.parts)
            generator = self.spawn_generator()  # before other trainers, because it takes longer
        trainer = self.spawn_trainer()
        for role, spawn in {"reference": self.spawn_reference, "critic": self.spawn_critic}.items():
            if role in self.configs and not shares_gpu(self.config, role):  # else later: vLLM measures free memory
                spawn()
        with setup(f"starting {names}"):
            await asyncio.gather(*(client.ready() for client in (trainer, generator) if client is not None))
        return trainer, generator

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
        await (await self.transport).close()


async def _end(task: asyncio.Task[T]) -> None:
    """Cancel a task and wait. Raises TimeoutError after END_TIMEOUT seconds."""
    task.cancel()
    _, running = await asyncio.wait((task,), timeout=END_TIMEOUT)
    if running:
        raise TimeoutError(f"the work of the run did not end within {END_TIMEOUT:g} s after the death of an actor")
    if not task.cancelled():
        task.exception()  # asyncio prints a warning about an exception that no code has read


def shares_gpu(config: "RunConfig", role: str = "trainer") -> bool:
    """True if the generator shares a GPU with a rank of this model."""
    is_possible = config.has_generator and torch.cuda.is_available()
    return is_possible and overlap(config.models()[role].gpus(), config.generator.gpus())


async def _opened_transport(config: "RunConfig", folder: RunFolder) -> Transport:
    transport = await asyncio.to_thread(_make_transport, config, folder)
    timeout = config.trainer.setup_timeout
    try:
        await asyncio.wait_for(transport.open(), timeout)
    except TimeoutError:
        raise TimeoutError(f"the transport {config.transport} did not open within {timeout:g} s") from None
    return transport


def _make_transport(config: "RunConfig", folder: RunFolder) -> Transport:
    if config.transport == "files":
        return rl_actors.FilesTransport(folder.path.absolute() / "weights")
    return rl_actors.MemoryTransport() if config.transport == "memory" else default_transport(config.weights)
