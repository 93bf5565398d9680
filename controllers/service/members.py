"""The members of a service: the models and the generator that it owns, each with its only client."""

import asyncio
import contextlib
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from controllers.service.open_step import CHANGING, AttachedClient, OpenStep
from rl_actors.clients.base import Client
from rl_actors.clients.completions import Group
from rl_actors.clients.generator import GeneratorClient
from rl_actors.clients.trainer import ModelClient, TrainerClient
from rl_actors.clients.training import SavedCheckpoint
from rl_actors.policy_trainer import VERBS
from rl_actors.types import SamplingParams, TrainerInfo

logger = logging.getLogger(__name__)

RELAYED = VERBS - {"new_tenant", "drop_tenant", "save_checkpoint"}
"""Endpoints of a model whose arguments and answers pass through the service unchanged."""


class Member(ABC):
    """An actor of the service, and its only client."""

    client: Client
    num_ranks = 1  # answers to a call
    num_restarts = 0
    step: OpenStep | None = None  # None: an actor without steps

    @abstractmethod
    async def run(
        self, client: AttachedClient, endpoint: str, arguments: Sequence[object], step_wait: float
    ) -> list[object]:
        """The answers of all ranks. step_wait: seconds to wait for the end of another client's step."""

    @abstractmethod
    async def leave(self, client: AttachedClient) -> None:
        """End the unfinished work of a client that has left."""

    async def describe(self) -> dict[str, object]:
        """For people, as JSON values."""
        return {"state": repr(self.client), "ranks": self.num_ranks, "alive": await self.client.is_alive()}

    async def require_alive(self) -> list[object]:
        if not await self.client.is_alive():
            raise RuntimeError(f"{self.client.name}: not all processes answer")
        return [None]


class ModelMember(Member):
    """A trainer, value model or reference, with one open step at a time."""

    client: ModelClient
    step: OpenStep

    def __init__(self, client: ModelClient, infos: Sequence[TrainerInfo]) -> None:
        """client: of a model that is set up. infos: of every rank."""
        self.client = client
        self.num_ranks = len(infos)
        self._infos = infos
        self.step = OpenStep()
        self._saved: dict[int, SavedCheckpoint] = {}  # last of each client, by number

    async def run(
        self, client: AttachedClient, endpoint: str, arguments: Sequence[object], step_wait: float
    ) -> list[object]:
        if endpoint == "setup":  # answered without the ranks, which may be busy with a call of another client
            version = self.client.policy_version or 0
            return [replace(info, policy_version=version) for info in self._infos]
        if endpoint == "info":
            return list(await self.client.info())
        if endpoint == "is_alive":
            return await self.require_alive()
        if endpoint == "wait_for_checkpoint":
            await self._saved[client.number].wait()
            return [None] * self.num_ranks
        if endpoint not in CHANGING:
            return await self._send(client, endpoint, arguments)
        await self.step.enter(client, endpoint, step_wait)
        try:
            answers = await self._send(client, endpoint, arguments)
        except Exception:
            # an idle trainer has refused a step's first call: close the step; otherwise gradients
            # or a failure keep it open
            if await self._is_idle():
                self.step.leave(client)
            raise
        if endpoint != "forward_backward":
            self.step.leave(client)
        return answers

    async def _send(self, client: AttachedClient, endpoint: str, arguments: Sequence[object]) -> list[object]:
        if endpoint == "save_checkpoint" and isinstance(self.client, TrainerClient):
            path, optimizer = arguments
            saved = await self.client.save_checkpoint(str(path), optimizer=bool(optimizer))
            self._saved[client.number] = saved
            return [saved.policy_version] * self.num_ranks
        if endpoint not in RELAYED:
            raise ValueError(f"{self.client.name} has no call {endpoint!r}")
        return await self.client.relay(endpoint, *arguments)

    async def _is_idle(self) -> bool:
        """True without accumulated gradients or a failure within a step."""
        try:
            infos: list[TrainerInfo] = await self.client.info()
        except Exception:
            return False
        return all(info.state == "idle" for info in infos)

    async def leave(self, client: AttachedClient) -> None:
        """Discard the gradients of the client's open step, after the running call."""
        self._saved.pop(client.number, None)
        if self.step.holder is not client:
            return
        try:
            await self.client.relay("discard_gradients")
            logger.info("%s has left while its step was open; its gradients were discarded", client)
        except Exception as error:
            logger.warning("%s has left, but its gradients could not be discarded: %r", client, error)
        self.step.leave(client)

    async def describe(self) -> dict[str, object]:
        described = await super().describe()
        holder = self.step.holder
        described["open_step_of"] = None if holder is None else str(holder)
        if holder is not None:
            described["open_for_seconds"] = round(self.step.seconds(), 1)
        return described


class GeneratorMember(Member):
    """A generator with one or several replicas, for concurrent calls."""

    client: GeneratorClient

    def __init__(self, client: GeneratorClient) -> None:
        self.client = client
        self._numbers = itertools.count()

    @property
    def num_restarts(self) -> int:  # type: ignore[override]
        return self.client.num_restarts

    async def run(
        self, client: AttachedClient, endpoint: str, arguments: Sequence[object], step_wait: float
    ) -> list[object]:
        await self.client.ready()
        if endpoint == "is_alive":
            return await self.require_alive()
        return [await self._answer(client, endpoint, *arguments)]

    async def _answer(self, client: AttachedClient, endpoint: str, *arguments: Any) -> object:
        match endpoint:
            case "setup" | "info":
                return await self.client.info()
            case "start_generate":
                return await self._start(client, *arguments)
            case "finished_groups":
                return await self._fetch(client, *arguments)
            case "abort_generate":
                await self._abort(client, *arguments)
                return None
            case "compute_logprobs":
                sequences, adapter = arguments
                return await self.client.compute_logprobs(sequences, adapter=adapter)
            case "pull_model_state_dict":
                version, timeout, in_flight = arguments
                await self.client.pull_model_state_dict(version, timeout, in_flight=in_flight)
                return self.client.last_pull
            case "sleep":
                return await self.client.sleep(*arguments)
            case "wake":
                return await self.client.wake()
            case "load_adapter" | "unload_adapter":
                raise ValueError(
                    f"{endpoint} is only for the program that runs the service; an attached client has no adapters"
                )
            case _:
                raise ValueError(f"{self.client.name} has no call {endpoint!r}")

    async def _start(
        self,
        client: AttachedClient,
        prompts: list[list[int]],
        params: SamplingParams,
        seed_indices: list[int] | None = None,
        adapter: str | None = None,
    ) -> int:
        number = next(self._numbers)
        client.generations[number] = await self.client.start_generate(prompts, params, seed_indices, adapter)
        if client.has_left:
            await self._abort(client, number)
        return number

    async def _fetch(self, client: AttachedClient, number: int, at_least: int = 1) -> list[Group]:
        if number not in client.generations:
            raise ValueError(
                f"no generate call {number} of this client is running: it has given all its completions, has failed, or was aborted"
            )
        call = client.generations[number]
        try:
            return await call.take(at_least)
        finally:
            if call.is_over:
                client.generations.pop(number, None)

    async def _abort(self, client: AttachedClient, number: int) -> None:
        if (call := client.generations.pop(number, None)) is not None:
            await call.abort()

    async def leave(self, client: AttachedClient) -> None:
        """End the client's requests that still run in the engine."""
        aborts = [self._abort(client, number) for number in list(client.generations)]
        with contextlib.suppress(Exception):
            await asyncio.gather(*aborts)
